#include "attention_plan.h"

#include <algorithm>

namespace twopool {
namespace {

constexpr int64_t kTasksAThread = 4;
// What a layer's K and V may take of the last cache between the products before it and its attention.
constexpr int64_t kMaxReadBytes = int64_t{12} << 20;

}  // namespace

AttentionPlan::AttentionPlan(const ModelShape& shape, const StepBatch& batch, int64_t window, int num_threads) {
  int64_t first_token = 0;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    add_sequence(shape, batch, s, first_token, window);
    first_token += batch.query_lens[s];
  }
  if (num_threads > 1 && static_cast<int64_t>(tasks_.size()) < kTasksAThread * num_threads) cut_by_split(shape.head_dim);
  const auto cost = [](const AttentionTask& task) { return (task.end_split - task.first_split) * (task.num_rows + 8); };
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
  list_reads(shape, batch, window, num_threads);
}

void AttentionPlan::list_reads(const ModelShape& shape, const StepBatch& batch, int64_t window, int num_threads) {
  reads_.resize(static_cast<size_t>(num_threads));
  if (batch.num_rows > kTaskRows) return;  // the products of many rows need the caches for themselves
  const int64_t run_bytes = 2 * batch.block_size * shape.head_dim * element_bytes(shape.dtype);
  const int64_t head_bytes = run_bytes * shape.num_layers;
  const int64_t num_tasks = static_cast<int64_t>(tasks_.size());
  for (int thread = 0; thread < num_threads; ++thread) {
    std::vector<int64_t>& reads = reads_[static_cast<size_t>(thread)];
    for (int64_t i = num_tasks * thread / num_threads; i < num_tasks * (thread + 1) / num_threads; ++i) {
      const AttentionTask& task = tasks_[static_cast<size_t>(i)];
      const int64_t seen = window == 0 ? 0 : std::max<int64_t>(0, task.first_position - window + 1);
      const int64_t first = std::max(task.first_split * kSplitKeys, seen) / batch.block_size;
      const int64_t end = std::min(task.end_split * kSplitKeys, task.context_len - 1);
      for (int64_t block = first; block * batch.block_size < end; ++block) {
        reads.push_back((int64_t{task.blocks[block]} * shape.num_kv_heads + task.kv_head) * head_bytes);
      }
    }
    if (static_cast<int64_t>(reads.size()) * run_bytes > kMaxReadBytes / num_threads) reads.clear();
  }
}

void AttentionPlan::add_sequence(const ModelShape& shape, const StepBatch& batch, int64_t sequence, int64_t first_token,
                                 int64_t window) {
  const int group = shape.num_heads / shape.num_kv_heads;
  const int64_t num_rows = int64_t{batch.query_lens[sequence]} * group, context_len = batch.context_lens[sequence];
  const int64_t first_position = context_len - batch.query_lens[sequence];
  if (num_rows > kQueryRows) one_task_a_head_ = false;
  for (int64_t row = 0; row < num_rows; row += kQueryRows) {
    AttentionTask task = {};
    task.first_token = first_token;
    task.first_position = first_position;
    task.context_len = context_len;
    task.blocks = batch.block_tables + sequence * batch.max_blocks;
    task.first_row = static_cast<int>(row);
    task.num_rows = static_cast<int>(std::min<int64_t>(kQueryRows, num_rows - row));
    const int64_t first = first_position + row / group, last = first_position + (row + task.num_rows - 1) / group;
    task.first_split = window == 0 ? 0 : std::max<int64_t>(0, first - window + 1) / kSplitKeys;
    task.end_split = last / kSplitKeys + 1;
    task.group_splits = 1;
    for (task.kv_head = 0; task.kv_head < shape.num_kv_heads; ++task.kv_head) tasks_.push_back(task);
  }
}

void AttentionPlan::cut_by_split(int head_dim) {
  int64_t num_partials = 0;
  for (const AttentionTask& task : tasks_) num_partials += task.end_split - task.first_split;
  if (num_partials == static_cast<int64_t>(tasks_.size())) return;  // one split each
  one_task_a_head_ = false;
  const int64_t padded = round_up(head_dim, kInnerUnit), values = kQueryRows * padded;
  const int64_t partial_floats = values + 2 * kQueryRows;
  memory_.reserve(static_cast<size_t>(num_partials * partial_floats) * sizeof(float));
  for (float* next = memory_.as<float>(); num_partials > 0; --num_partials, next += partial_floats) {
    partials_.push_back({next, next + values, next + values + kQueryRows});
  }
  num_done_ = std::make_unique<std::atomic<int>[]>(tasks_.size());
  std::vector<AttentionTask> cut;
  PartialSums* partials = partials_.data();
  for (size_t group = 0; group < tasks_.size(); ++group) {
    AttentionTask task = tasks_[group];
    const int64_t first = task.first_split, end = task.end_split;
    num_done_[group].store(0, std::memory_order_relaxed);
    task.partials = partials;
    task.num_done = &num_done_[group];
    task.group_splits = static_cast<int>(end - first);
    for (int64_t split = first; split < end; ++split) {
      task.first_split = split;
      task.end_split = split + 1;
      task.partial_index = static_cast<int>(split - first);
      cut.push_back(task);
    }
    partials += task.group_splits;
  }
  tasks_ = std::move(cut);
}

}  // namespace twopool
