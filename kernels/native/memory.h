// Zeroed memory in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twopool {

// Asks for huge pages for the whole ones within memory of somebody else's; best before it is first touched.
void advise_huge_pages(void* data, size_t num_bytes);

class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t num_bytes);  // throws std::bad_alloc
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  ~HugeBuffer();

  // Makes room for `num_bytes`; what was in the buffer is lost (zeroed) if it has to grow.
  void reserve(size_t num_bytes);

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;  // bytes mapped
};

}  // namespace twopool
