#include "collective.h"

#include <fcntl.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

namespace twopool {
namespace {

constexpr uint32_t kMagic = 0x7450326c;
constexpr uint32_t kLost = uint32_t{1} << 31;  // beside a meeting's number in the word all wait on
constexpr uint32_t kRoundMask = kLost - 1;
constexpr int64_t kPage = 4096;
constexpr int64_t kHeaderBytes = 4 * kPage;
constexpr int kCpuWords = CPU_SETSIZE / 64;
constexpr int64_t kMaxSlotBytes = int64_t{1} << 36;

enum Reason { kAborted = 1, kTimedOut = 2, kDiffered = 3 };

int64_t now_us() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
}

// Not FUTEX_PRIVATE: the waiters are other processes.
void futex_wait(std::atomic<uint32_t>* word, uint32_t value, int64_t timeout_us) {
  timespec timeout = {};
  timeout.tv_sec = static_cast<time_t>(timeout_us / 1'000'000);
  timeout.tv_nsec = static_cast<long>(timeout_us % 1'000'000 * 1000);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

int64_t page_up(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

struct Collective::Header {
  uint32_t magic;
  int32_t size;
  int64_t slot_bytes;
  alignas(64) std::atomic<uint32_t> word;  // the next meeting's number, and kLost
  alignas(64) std::atomic<int32_t> num_arrived;
  alignas(64) std::atomic<int32_t> num_sleepers;
  alignas(64) std::atomic<int32_t> reason;
  std::atomic<int32_t> culprit;  // the rank that gave up
  alignas(64) std::atomic<uint64_t> announced[2][kMaxRanks];
  std::atomic<uint64_t> cpus[kMaxRanks][kCpuWords];  // that a rank may run on
};

namespace {

void check_sizes(int size, int64_t slot_bytes) {
  require(size >= 1 && size <= kMaxRanks, "a group has from 1 to 64 ranks");
  require(slot_bytes >= 64 && slot_bytes <= kMaxSlotBytes, "max_bytes is out of range");
}

}  // namespace

int Collective::create_segment(int size, int64_t slot_bytes) {
  static_assert(sizeof(Header) <= kHeaderBytes, "the header has outgrown its pages");
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain word");
  check_sizes(size, slot_bytes);
  slot_bytes = page_up(slot_bytes);
  const int fd = memfd_create("twopool-ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw std::runtime_error(std::string("memfd_create: ") + std::strerror(errno));
  const int64_t bytes = kHeaderBytes + 2 * size * slot_bytes;
  // Sealed: a segment that shrinks under a rank would kill it.
  if (ftruncate(fd, bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const std::string problem = std::strerror(errno);
    close(fd);
    throw std::runtime_error("a segment of " + std::to_string(bytes) + " bytes: " + problem);
  }
  void* base = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    close(fd);
    throw std::bad_alloc();
  }
  Header* header = new (base) Header();
  header->size = size;
  header->slot_bytes = slot_bytes;
  header->magic = kMagic;
  munmap(base, sizeof(Header));
  return fd;
}

Collective::Collective(int fd, int rank, int size, int64_t slot_bytes, int spin_us, int timeout_ms)
    : rank_(rank),
      size_(size),
      slot_bytes_(page_up(slot_bytes)),
      spin_us_(std::max(spin_us, 0)),
      chooses_spin_(spin_us < 0),
      timeout_ms_(timeout_ms) {
  check_sizes(size, slot_bytes);
  require(rank >= 0 && rank < size, "a rank is out of range");
  require(timeout_ms >= 1, "timeout_ms is out of range");
  mapped_bytes_ = static_cast<size_t>(kHeaderBytes + 2 * size * slot_bytes_);
  struct stat file = {};
  require(fstat(fd, &file) == 0 && static_cast<size_t>(file.st_size) == mapped_bytes_, "the segment has another size");
  void* base = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  header_ = static_cast<Header*>(base);
  if (header_->magic != kMagic || header_->size != size || header_->slot_bytes != slot_bytes_) {
    munmap(base, mapped_bytes_);
    throw std::invalid_argument("the segment was made for another group");
  }
  slots_ = static_cast<uint8_t*>(base) + kHeaderBytes;
  publish_cpus();
}

Collective::~Collective() { munmap(header_, mapped_bytes_); }

uint32_t Collective::round() const { return header_->word.load(std::memory_order_acquire) & kRoundMask; }

uint8_t* Collective::slot(int rank, uint32_t round) const {
  return slots_ + (int64_t{round & 1} * size_ + rank) * slot_bytes_;
}

void Collective::publish_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) header_->cpus[rank_][cpu / 64] |= uint64_t{1} << cpu % 64;
  }
}

// A rank that spins where another one waits for its CPU only keeps it from coming.
void Collective::choose_spin() {
  int num_cpus = 0;
  for (int word = 0; word < kCpuWords; ++word) {
    uint64_t any = 0;
    for (int rank = 0; rank < size_; ++rank) any |= header_->cpus[rank][word].load(std::memory_order_relaxed);
    num_cpus += __builtin_popcountll(any);
  }
  spin_us_.store(num_cpus >= size_ ? kSpinUs : 0, std::memory_order_relaxed);
  chooses_spin_.store(false, std::memory_order_relaxed);
}

bool Collective::meet(uint32_t round, bool arrives) {
  std::atomic<uint32_t>& word = header_->word;
  if (arrives && header_->num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    header_->num_arrived.store(0, std::memory_order_relaxed);
    // A lost group stays at the meeting it was lost at, so that everybody agrees on which that was.
    uint32_t expected = round;
    word.compare_exchange_strong(expected, (round + 1) & kRoundMask, std::memory_order_seq_cst);
    if (header_->num_sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(&word);
  }
  if (round > 0 && chooses_spin_.load(std::memory_order_relaxed)) choose_spin();  // every rank has been here by now
  const int64_t spin_us = spin_us_.load(std::memory_order_relaxed);
  int64_t start = 0;
  uint32_t seen = word.load(std::memory_order_acquire);
  for (uint32_t spins = 0; seen == round; seen = word.load(std::memory_order_acquire)) {
    if (spin_us == 0) break;
    _mm_pause();
    if (++spins % 64 != 0) continue;  // reading the clock is slower than a pause
    const int64_t now = now_us();
    if (start == 0) start = now;
    if (now - start >= spin_us) break;
  }
  if (seen != round) return (seen & kRoundMask) != round;
  if (start == 0) start = now_us();
  header_->num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  while ((seen = word.load(std::memory_order_seq_cst)) == round) {
    const int64_t left = start + timeout_ms_ * 1000 - now_us();
    if (left <= 0) {
      give_up(kTimedOut);
      continue;  // the others may have come just now
    }
    futex_wait(&word, round, left);
  }
  header_->num_sleepers.fetch_sub(1, std::memory_order_relaxed);
  return (seen & kRoundMask) != round;
}

void Collective::announce(uint32_t round, uint64_t what) {
  header_->announced[round & 1][rank_].store(what, std::memory_order_release);
}

bool Collective::all_announced(uint32_t round, uint64_t what) {
  for (int rank = 0; rank < size_; ++rank) {
    if (header_->announced[round & 1][rank].load(std::memory_order_acquire) == what) continue;
    give_up(kDiffered);
    return false;
  }
  return true;
}

void Collective::abort() { give_up(kAborted); }

void Collective::give_up(int reason) {
  int32_t none = 0;
  if (header_->reason.compare_exchange_strong(none, reason)) header_->culprit.store(rank_);
  header_->word.fetch_or(kLost, std::memory_order_seq_cst);
  futex_wake_all(&header_->word);
}

bool Collective::lost() const { return (header_->word.load(std::memory_order_acquire) & kLost) != 0; }

std::string Collective::loss() const {
  const std::string rank = "rank " + std::to_string(header_->culprit.load());
  switch (header_->reason.load()) {
    case kTimedOut: return rank + " waited " + std::to_string(timeout_ms_) + " ms for the others";
    case kDiffered: return rank + " was given another step than the others";
    default: return "the group was ended";
  }
}

void Collective::barrier() {
  if (!meet(round(), true)) throw GroupLost(loss());
}

void Collective::all_reduce(float* rows, int64_t num_rows, int64_t columns) {
  const int64_t total = num_rows * columns, piece = slot_bytes_ / static_cast<int64_t>(sizeof(float));
  for (int64_t first = 0; first < total; first += piece) {
    const uint32_t meeting = round();
    const int64_t n = std::min(piece, total - first);
    std::memcpy(slot(rank_, meeting), rows + first, static_cast<size_t>(n) * sizeof(float));
    announce(meeting, static_cast<uint64_t>(total));
    if (!meet(meeting, true) || !all_announced(meeting, static_cast<uint64_t>(total))) throw GroupLost(loss());
    add_slots(*this, meeting, 0, n, false, rows + first);
  }
}

void Collective::gather(const float* rows, int64_t num_rows, const int64_t* bounds, float* out) {
  int64_t widest = 1;
  for (int rank = 0; rank < size_; ++rank) {
    require(bounds[rank] >= 0 && bounds[rank] < bounds[rank + 1], "the columns' bounds do not ascend");
    widest = std::max(widest, bounds[rank + 1] - bounds[rank]);
  }
  const int64_t rows_at_once = slot_bytes_ / (widest * static_cast<int64_t>(sizeof(float)));
  require(rows_at_once >= 1, "a row does not fit the segment");
  const int64_t own = bounds[rank_ + 1] - bounds[rank_], columns = bounds[size_];
  const uint64_t what = static_cast<uint64_t>(num_rows) << 32 ^ static_cast<uint64_t>(columns);
  for (int64_t first = 0; first < num_rows; first += rows_at_once) {
    const uint32_t meeting = round();
    const int64_t n = std::min(rows_at_once, num_rows - first);
    std::memcpy(slot(rank_, meeting), rows + first * own, static_cast<size_t>(n * own) * sizeof(float));
    announce(meeting, what);
    if (!meet(meeting, true) || !all_announced(meeting, what)) throw GroupLost(loss());
    if (rank_ != 0) continue;
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t width = bounds[rank + 1] - bounds[rank];
      const float* from = slot_as<float>(rank, meeting);
      for (int64_t row = 0; row < n; ++row) {
        std::memcpy(out + (first + row) * columns + bounds[rank], from + row * width,
                    static_cast<size_t>(width) * sizeof(float));
      }
    }
  }
}

void add_slots(const Collective& collective, uint32_t round, int64_t offset, int64_t n, bool onto, float* out) {
  constexpr int64_t kBlock = 64;  // stays in registers from the first rank to the last
  for (int64_t first = 0; first < n; first += kBlock) {
    float sums[kBlock];
    const int64_t count = std::min(kBlock, n - first);
    const float* own = collective.slot_as<float>(0, round) + offset + first;
    std::memcpy(sums, own, static_cast<size_t>(count) * sizeof(float));
    for (int rank = 1; rank < collective.size(); ++rank) {
      const float* theirs = collective.slot_as<float>(rank, round) + offset + first;
      for (int64_t i = 0; i < count; ++i) sums[i] += theirs[i];
    }
    float* to = out + first;
    if (onto) {
      for (int64_t i = 0; i < count; ++i) to[i] += sums[i];
    } else {
      std::memcpy(to, sums, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

}  // namespace twopool
