// Which attention tasks a step has: the same for every layer with the same window.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "batch.h"
#include "memory.h"
#include "ops.h"

namespace twopool {

class AttentionPlan {
 public:
  // Tasks are cut finer when there are too few to keep `num_threads` busy; that does not alter a bit of their results.
  AttentionPlan(const ModelShape& shape, const StepBatch& batch, int64_t window, int num_threads);

  const std::vector<AttentionTask>& tasks() const { return tasks_; }  // the longest first

  // Where a thread's share of the tasks finds K and V: the offsets in bytes, within a layer of the pool, of runs that
  // hold both for one block and KV head, in the order of the tasks. Empty when the caches would not hold them all.
  const std::vector<int64_t>& reads(int thread) const { return reads_[static_cast<size_t>(thread)]; }

  // Whether each sequence has one task a KV head: then it may also rotate that head and write its K and V.
  bool one_task_a_head() const { return one_task_a_head_; }

 private:
  void add_sequence(const ModelShape& shape, const StepBatch& batch, int64_t sequence, int64_t first_token,
                    int64_t window);
  void cut_by_split(int head_dim);

  void list_reads(const ModelShape& shape, const StepBatch& batch, int64_t window, int num_threads);

  std::vector<AttentionTask> tasks_;
  std::vector<std::vector<int64_t>> reads_;
  bool one_task_a_head_ = true;
  std::vector<PartialSums> partials_;
  std::unique_ptr<std::atomic<int>[]> num_done_;
  HugeBuffer memory_;
};

}  // namespace twopool
