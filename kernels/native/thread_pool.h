// A small pool whose threads run one parallel region at a time and sleep in between.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace twopool {

// A word that threads wait on: they spin briefly, then sleep in the kernel. Spinning long would rob the other
// hyperthread of the core, or a neighbour who has work.
class WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  void wait_while(uint32_t old, uint64_t num_cycles);  // of spinning
  void advance();  // adds one and wakes every waiter

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_sleepers_{0};
};

class ThreadPool {
 public:
  // The caller of run() is thread 0; num_threads - 1 more are started. `cpus`: empty, or one CPU for each thread.
  ThreadPool(int num_threads, std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs region(thread) on every thread and returns when all are through. One caller at a time.
  void run(const std::function<void(int)>& region);

  // A thread's own run of tasks starts at first_task(thread) and ends before first_task(thread + 1).
  int64_t first_task(int thread, int64_t count) const { return count * thread / num_threads_; }

  // Within a region, by every thread: runs tasks 0 .. count-1, then meets the others. A thread walks a run of its own,
  // so that memory is read in order and the same weights by the same core in each step, then helps those that are not
  // through. Which thread runs a task must not matter to its result.
  template <typename Task>
  void for_each(int thread, int64_t count, const Task& task) {
    for (int i = 0; i < num_threads_; ++i) {
      const int owner = (thread + i) % num_threads_;
      const int64_t first = first_task(owner, count), end = first_task(owner + 1, count);
      std::atomic<int64_t>& num_taken = runs_[static_cast<size_t>(owner)].num_taken;
      for (int64_t next; (next = first + num_taken.fetch_add(1, std::memory_order_relaxed)) < end;) task(next);
    }
    barrier();
  }

 private:
  struct alignas(64) Run {
    std::atomic<int64_t> num_taken{0};
  };

  void stop();
  void worker(int thread);
  void barrier();
  void reset_runs();
  void pin(int thread) const;

  const int num_threads_;
  const std::vector<int> cpus_;
  const std::function<void(int)>* region_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::vector<Run> runs_;  // one a thread
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) WaitWord barrier_round_;
  alignas(64) WaitWord region_round_;
  std::vector<std::thread> threads_;
};

}  // namespace twopool
