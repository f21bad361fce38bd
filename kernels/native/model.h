// A decoder's weights, packed once for the products of a step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "ops.h"
#include "thread_pool.h"

namespace twopool {

// Of one rank, where several hold a model together: everything but vocab_size and hidden_size is then its own part.
struct ModelShape {
  int64_t vocab_size, hidden_size, intermediate_size;
  int64_t vocab_rows;  // of the embedding and the head
  int num_layers, num_heads, num_kv_heads, head_dim;
  float eps, attention_scale;
  Activation activation;
  Dtype dtype;
  std::vector<int64_t> windows;  // one a layer, 0: none

  int64_t query_size() const { return int64_t{num_heads} * head_dim; }
  int64_t qkv_size() const { return (int64_t{num_heads} + 2 * int64_t{num_kv_heads}) * head_dim; }
};

enum class MatrixKind { kQkv, kOutput, kGateUp, kDown, kHead };
enum class VectorKind { kInputNorm, kPostAttentionNorm, kQueryNorm, kKeyNorm, kFinalNorm };

struct PackedMatrix {
  uint8_t* panels = nullptr;
  int64_t num_panels = 0;
  int64_t inner = 0;        // inputs, and what they are padded to
  int64_t padded_inner = 0;
  int64_t num_outputs = 0;
  int64_t num_filled = 0;   // outputs set so far
  std::vector<float> bias;  // [num_panels * kPanelCols] or empty
};

struct LayerWeights {
  std::vector<float> input_norm, post_attention_norm, query_norm, key_norm;
  PackedMatrix qkv, output, gate_up, down;
};

// Where a run of a matrix's outputs goes: one after the other from `first` on, or, for gates and ups, by 16 in turns.
struct OutputRange {
  int64_t first;
  bool interleaved;

  int64_t column(int64_t row) const { return interleaved ? first + row / 16 * 32 + row % 16 : first + row; }
};

class Model {
 public:
  // Throws std::invalid_argument for a shape that cannot be served.
  Model(const ModelShape& shape, Isa isa);

  const ModelShape& shape() const { return shape_; }
  const OpTable& ops() const { return ops_; }
  Isa isa() const { return isa_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const PackedMatrix& head() const { return head_; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const uint8_t* embedding() const { return embedding_; }

  // rows: [num_rows][inner] elements; throws std::invalid_argument when that does not fit the matrix.
  void set_matrix(int layer, MatrixKind kind, OutputRange range, const void* rows, int64_t num_rows, int64_t inner,
                  ThreadPool* pool);
  void set_bias(int layer, MatrixKind kind, OutputRange range, const float* values, int64_t n);
  void set_vector(int layer, VectorKind kind, const float* values, int64_t n);
  // [vocab_rows][hidden_size] elements, which the caller keeps alive.
  void set_embedding(const void* rows) { embedding_ = static_cast<const uint8_t*>(rows); }

  // The memory of all panels: what another model of this shape and instruction set packed may be copied into it.
  const HugeBuffer& packed() const { return memory_; }
  // All matrices are packed: in `data`, which the caller keeps alive, laid out as `packed()`, or, if null, in that.
  void use_packed(const uint8_t* data);

  // Throws std::invalid_argument naming a weight that was not set.
  void check_complete() const;

 private:
  PackedMatrix& matrix(int layer, MatrixKind kind);
  void check_layer(int layer) const;

  ModelShape shape_;
  Isa isa_;
  const OpTable& ops_;
  std::vector<LayerWeights> layers_;
  PackedMatrix head_;
  std::vector<float> final_norm_;
  const uint8_t* embedding_ = nullptr;
  HugeBuffer memory_;  // all panels
};

}  // namespace twopool
