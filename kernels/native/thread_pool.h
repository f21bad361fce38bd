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
  void wait_while(uint32_t old, int num_spins);
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

  // Within a region, by every thread: takes tasks 0 .. count-1 as threads become free, then meets the others.
  // Which thread runs a task must not matter to its result.
  template <typename Task>
  void for_each(int64_t count, const Task& task) {
    for (int64_t i; (i = next_task_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    barrier();
  }

 private:
  void worker(int thread);
  void barrier();
  void pin(int thread) const;

  const int num_threads_;
  const std::vector<int> cpus_;
  const std::function<void(int)>* region_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) WaitWord barrier_round_;
  alignas(64) WaitWord region_round_;
  std::vector<std::thread> threads_;
};

}  // namespace twopool
