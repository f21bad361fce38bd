// Where the ranks of a tensor-parallel group on one host meet and hand one another numbers: a segment of memory that all
// of them map. One rank is one process (in tests, one thread).
//
//   header: one word the ranks wait on, their arrivals, what each of them is about to compute
//   slots:  [2 turns][size ranks][slot_bytes], each written by its rank and read by all
//
// Meetings are numbered; `turn` is a meeting's number modulo 2. A rank writes its slot of a turn, meets the others, and
// reads theirs. It may write the same turn's slot again after the next meeting, to which every rank came with its reading
// done: so one meeting an exchange is enough.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace twopool {

constexpr int kMaxRanks = 64;
constexpr int64_t kSpinUs = 200;

// The group cannot go on: a rank gave up, is late, or is at another step.
class GroupLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Collective {
 public:
  // Maps the segment of `fd`, which create_segment() made; the descriptor may be closed afterwards. Spins for at most
  // `spin_us` in a meeting before it sleeps; negative: kSpinUs if the CPUs the ranks may use, all together, are at least as
  // many as the ranks, else not at all. Throws std::invalid_argument for another segment than these numbers name.
  Collective(int fd, int rank, int size, int64_t slot_bytes, int spin_us, int timeout_ms);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // -> a new anonymous segment's descriptor, closed on exec unless it is passed on. Throws std::runtime_error.
  static int create_segment(int size, int64_t slot_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  int64_t spin_us() const { return spin_us_.load(std::memory_order_relaxed); }

  // The number of the next meeting, the same for every thread of a rank until the rank has arrived there.
  uint32_t round() const;

  uint8_t* slot(int rank, uint32_t round) const;

  template <typename T>
  T* slot_as(int rank, uint32_t round) const {
    return reinterpret_cast<T*>(slot(rank, round));
  }

  // Waits until every rank has arrived at meeting `round`; of a rank's threads one says `arrives`. False when the group is
  // lost. All threads of a rank, and all ranks that are waiting, get the same answer for the same meeting.
  bool meet(uint32_t round, bool arrives);

  // Says before a meeting what the rank is about to compute, and after it whether all ranks said the same; if not, aborts.
  void announce(uint32_t round, uint64_t what);
  bool all_announced(uint32_t round, uint64_t what);

  // Every rank that waits, or will, learns that the group is lost. From any thread.
  void abort();
  bool lost() const;
  std::string loss() const;  // in words

  // Single-threaded whole operations; throw GroupLost.
  void barrier();
  // rows [num_rows][columns], contiguous: replaced by the sum over the ranks, in their order.
  void all_reduce(float* rows, int64_t num_rows, int64_t columns);
  // bounds [size + 1]: rank r has columns bounds[r] ... bounds[r + 1] - 1; out (rank 0's): [num_rows][bounds[size]].
  void gather(const float* rows, int64_t num_rows, const int64_t* bounds, float* out);

 private:
  struct Header;

  void publish_cpus();
  void choose_spin();
  void give_up(int reason);

  Header* header_ = nullptr;
  uint8_t* slots_ = nullptr;
  size_t mapped_bytes_ = 0;
  const int rank_, size_;
  const int64_t slot_bytes_;
  std::atomic<int64_t> spin_us_;
  std::atomic<bool> chooses_spin_;
  const int64_t timeout_ms_;
};

// out[i] = (onto ? out[i] : 0) + rank 0's + rank 1's + ...
void add_slots(const Collective& collective, uint32_t round, int64_t offset, int64_t n, bool onto, float* out);

}  // namespace twopool
