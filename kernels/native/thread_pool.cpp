#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <utility>

namespace twopool {
namespace {

// In cycles of the time stamp counter, 2 to 3 a nanosecond. Within a step the others are rarely more than one task away:
// some tens of microseconds. Between steps Python draws tokens, for longer than it is decent to spin.
constexpr uint64_t kBarrierCycles = 150'000;
constexpr uint64_t kIdleCycles = 10'000;

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

// The CPU state that changes results: denormals are zero in every thread of a step, as the bf16 instructions have it.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const unsigned saved_;
};

}  // namespace

void WaitWord::wait_while(uint32_t old, uint64_t num_cycles) {
  const uint64_t start = __rdtsc();
  while (__rdtsc() - start < num_cycles) {
    if (load() != old) return;
    _mm_pause();
  }
  num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old) futex(&value_, FUTEX_WAIT_PRIVATE, old);
  num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void WaitWord::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_seq_cst) > 0) futex(&value_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

ThreadPool::ThreadPool(int num_threads, std::vector<int> cpus)
    : num_threads_(num_threads), cpus_(std::move(cpus)), runs_(static_cast<size_t>(num_threads)) {
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { worker(thread); });
  } catch (...) {  // a limit on threads: those that did start must end before the pool does
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_.store(true);
  region_round_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& region) {
  static thread_local const ThreadPool* pinned_for = nullptr;
  if (!cpus_.empty() && pinned_for != this) {
    pin(0);
    pinned_for = this;
  }
  const FlushDenormals flush;
  region_ = &region;
  region_round_.advance();
  region(0);
  barrier();
}

void ThreadPool::worker(int thread) {
  pin(thread);
  const FlushDenormals flush;
  uint32_t round = 0;
  while (true) {
    region_round_.wait_while(round, kIdleCycles);
    ++round;  // the caller cannot start another region before this thread has finished this one
    if (stopping_.load()) return;
    (*region_)(thread);
    barrier();
  }
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) {
    reset_runs();
    return;
  }
  const uint32_t round = barrier_round_.load();
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    num_arrived_.store(0, std::memory_order_relaxed);
    reset_runs();
    barrier_round_.advance();
  } else {
    barrier_round_.wait_while(round, kBarrierCycles);
  }
}

void ThreadPool::reset_runs() {
  for (Run& run : runs_) run.num_taken.store(0, std::memory_order_relaxed);
}

void ThreadPool::pin(int thread) const {
  if (cpus_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpus_[static_cast<size_t>(thread)]), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // checked when the pool was asked for
}

}  // namespace twopool
