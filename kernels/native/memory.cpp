#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace twopool {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

void advise_huge_pages(void* data, size_t num_bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(data), end = (first + num_bytes) / kHugePage * kHugePage;
  const uintptr_t start = round_up(first, kHugePage);
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

HugeBuffer::HugeBuffer(size_t num_bytes) {
  if (num_bytes == 0) return;
  const bool huge = num_bytes >= kHugePage / 2;
  const size_t wanted = round_up(num_bytes, huge ? kHugePage : kPage);
  // The kernel aligns to small pages only: map more and give the ends back.
  const size_t mapped = huge ? wanted + kHugePage : wanted;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  uint8_t* first = static_cast<uint8_t*>(base);
  data_ = first;
  size_ = wanted;
  if (!huge) return;
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(first), kHugePage));
  const size_t before = static_cast<size_t>(data_ - first);
  if (before > 0) munmap(first, before);
  if (mapped - before > wanted) munmap(data_ + wanted, mapped - before - wanted);
  madvise(data_, wanted, MADV_HUGEPAGE);  // advice only: small pages serve where it is refused
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

void HugeBuffer::reserve(size_t num_bytes) {
  if (num_bytes <= size_) return;
  *this = HugeBuffer();  // gives the old memory back first
  *this = HugeBuffer(num_bytes);
}

}  // namespace twopool
