// A step as one program: every layer walked in a single parallel region.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "batch.h"
#include "collective.h"
#include "memory.h"
#include "model.h"
#include "thread_pool.h"

namespace twopool {

class StepRunner {
 public:
  StepRunner(const Model& model, ThreadPool* pool) : model_(model), shape_(model.shape()), ops_(model.ops()), pool_(*pool) {}

  // From now on the model is one rank's part. vocab_bounds [size + 1]: rank r has the tokens from [r] up to [r + 1].
  // Throws std::invalid_argument.
  void join(std::shared_ptr<Collective> ranks, std::vector<int64_t> vocab_bounds);

  // Writes the rows' K and V into the pool and, on rank 0, the wanted logits. Throws std::invalid_argument,
  // std::bad_alloc and GroupLost.
  void run(const StepBatch& batch);

 private:
  // Rows of elements or floats with their distance.
  struct Rows {
    HugeBuffer memory;
    int64_t stride = 0;  // elements

    void reserve(int64_t num_rows, int64_t width, int64_t element);
  };

  struct ProductTasks;

  void reserve(int64_t num_rows);
  void walk(int thread);
  void embed(int thread);
  // -> the rows, normalised, for this thread to multiply.
  const Rows& normalise(const std::vector<float>& weight, int64_t num_rows, int thread);
  void normalise_row(const std::vector<float>& weight, int64_t row, const Rows& out);
  // after: the matrix of the next product, null: this is the last one.
  void multiply(int thread, const PackedMatrix& matrix, const Rows& rows, int64_t num_rows, Epilogue epilogue, void* out,
                int64_t out_stride, int64_t num_cols, const PackedMatrix* after, int64_t first_row = 0);
  // Those that meet the other ranks return false when the group is lost, on every thread alike.
  bool embed_among_ranks(int thread);
  bool add_product(int thread, const PackedMatrix& matrix, const Rows& rows, int64_t num_rows, const PackedMatrix* after);
  bool write_logits(int thread, const Rows& last_hidden, int64_t num_rows);
  void rotate(int layer, int thread);
  void rotate_heads(int layer, int64_t row, int first_kv_head, int num_kv_heads);
  void attend(int layer, int thread, bool rotates);
  void read_ahead(int layer, int thread);
  void gather_wanted(int thread);
  template <typename Body>
  void for_rows(int thread, int64_t num_rows, const Body& body);

  uint8_t* pool_layer(int64_t block, int layer) const;
  int64_t kv_head_stride() const { return shape_.num_layers * 2 * batch_->block_size * shape_.head_dim; }

  const Model& model_;
  const ModelShape& shape_;
  const OpTable& ops_;
  ThreadPool& pool_;
  std::shared_ptr<Collective> ranks_;  // null: the model is whole
  std::vector<int64_t> vocab_bounds_;
  uint64_t digest_ = 0;
  const StepBatch* batch_ = nullptr;
  std::vector<RowPlace> places_;  // of the batch
  bool writes_are_private_ = false;
  std::map<int64_t, AttentionPlan> plans_;  // by window
  Rows residual_;  // float [rows][hidden_size]
  Rows normed_;    // T [rows][hidden_size]
  std::vector<Rows> own_normed_;  // of few rows every thread has its own
  Rows qkv_;       // float [rows][qkv_size]
  Rows queries_;   // T [rows][query_size]
  Rows attended_;  // T [rows][query_size]
  Rows gated_;     // T [rows][intermediate_size]
  Rows wanted_residual_, wanted_attended_;  // the rows whose logits are wanted
  std::vector<HugeBuffer> scratch_;         // one a thread
  std::vector<ReadAhead> ahead_;            // one a thread
};

}  // namespace twopool
