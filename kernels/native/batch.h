// The arguments of one step, whether they may be trusted, and what follows from them.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace twopool {

// What Python hands over; arrays as models/batch.py's HostBatch has them. Mirrored in kernels/native_step.py.
struct StepBatch {
  int64_t num_rows, num_sequences, num_logit_rows;
  const int32_t* token_ids;      // [num_rows]
  const int32_t* query_lens;     // [num_sequences]
  const int32_t* context_lens;   // [num_sequences]
  const int32_t* block_tables;   // [num_sequences][max_blocks]
  int64_t max_blocks;
  const int32_t* logit_rows;     // [num_logit_rows]
  const float* cos;              // [rope_rows][head_dim / 2]
  const float* sin;
  int64_t rope_rows;
  void* kv_pool;                 // [num_blocks][num_kv_heads][num_layers][2][block_size][head_dim]
  int64_t num_blocks, block_size;
  float* logits;                 // [num_logit_rows][vocab_size]; not looked at on ranks above 0
  int32_t* layers_done;          // null, or where to say while the step runs how many layers' K and V are in the pool
};

// A number that ranks which were given the same step have in common, and others as good as never.
uint64_t batch_digest(const StepBatch& batch);

// Throws std::invalid_argument for anything that would read or write out of bounds.
void check_batch(const ModelShape& shape, const StepBatch& batch);

// Where a row stands in its sequence, and where its K and V go.
struct RowPlace {
  int64_t position, block, offset;
};

// [num_rows], of a batch that was checked.
void place_rows(const StepBatch& batch, std::vector<RowPlace>* places);

// Whether no sequence reads a block that another one writes in this step: then a sequence needs to wait for its own K and
// V only.
bool writes_are_private(const StepBatch& batch, const std::vector<RowPlace>& places);

}  // namespace twopool
