#include "model.h"

#include <algorithm>
#include <stdexcept>

namespace twopool {
namespace {

constexpr int64_t kMatrixAlignment = 4096;
constexpr int64_t kMaxCount = int64_t{1} << 31;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

bool is_count(int64_t value) { return value >= 1 && value < kMaxCount; }

void check_shape(const ModelShape& s) {
  require(is_count(s.vocab_size) && is_count(s.hidden_size) && is_count(s.intermediate_size), "a size is out of range");
  require(s.vocab_rows >= 1 && s.vocab_rows <= s.vocab_size, "the vocabulary's rows are out of range");
  require(s.num_layers >= 1 && s.num_heads >= 1 && s.num_kv_heads >= 1, "a count is out of range");
  require(s.num_heads % s.num_kv_heads == 0, "num_heads is no multiple of num_kv_heads");
  require(s.head_dim >= 2 && s.head_dim % 2 == 0 && s.head_dim <= kMaxHeadDim, "head_dim must be even and at most 256");
  require(is_count(s.qkv_size()), "a size is out of range");
  require(s.windows.size() == static_cast<size_t>(s.num_layers), "one window a layer is needed");
  for (int64_t window : s.windows) require(window >= 0, "a window is negative");
}

PackedMatrix empty_matrix(int64_t num_outputs, int64_t num_columns, int64_t inner) {
  PackedMatrix matrix;
  matrix.num_outputs = num_outputs;
  matrix.num_panels = round_up(num_columns, kPanelCols) / kPanelCols;
  matrix.inner = inner;
  matrix.padded_inner = round_up(inner, kInnerUnit);
  return matrix;
}

}  // namespace

Model::Model(const ModelShape& shape, Isa isa) : shape_(shape), isa_(isa), ops_(op_table(isa, shape.dtype)) {
  check_shape(shape_);
  const int64_t hidden = shape_.hidden_size, inner = shape_.intermediate_size;
  layers_.resize(static_cast<size_t>(shape_.num_layers));
  head_ = empty_matrix(shape_.vocab_rows, shape_.vocab_rows, hidden);
  std::vector<PackedMatrix*> all = {&head_};
  for (LayerWeights& layer : layers_) {
    layer.qkv = empty_matrix(shape_.qkv_size(), shape_.qkv_size(), hidden);
    layer.output = empty_matrix(hidden, hidden, shape_.query_size());
    layer.gate_up = empty_matrix(2 * inner, 2 * round_up(inner, 16), hidden);
    layer.down = empty_matrix(hidden, hidden, inner);
    for (PackedMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) all.push_back(matrix);
  }
  const auto num_bytes = [this](const PackedMatrix& m) {
    return round_up(m.num_panels * kPanelCols * m.padded_inner * element_bytes(shape_.dtype), kMatrixAlignment);
  };
  int64_t total = 0;
  for (const PackedMatrix* matrix : all) total += num_bytes(*matrix);
  memory_.reserve(static_cast<size_t>(total));
  uint8_t* next = memory_.as<uint8_t>();
  for (PackedMatrix* matrix : all) {
    matrix->panels = next;
    next += num_bytes(*matrix);
  }
}

void Model::use_packed(const uint8_t* data) {
  std::vector<PackedMatrix*> all = {&head_};
  for (LayerWeights& layer : layers_) {
    for (PackedMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) all.push_back(matrix);
  }
  for (PackedMatrix* matrix : all) {
    require(matrix->num_filled == 0, "the matrices were set already");
    // Never written from here on: set_matrix refuses a matrix that is full.
    if (data != nullptr) matrix->panels = const_cast<uint8_t*>(data) + (matrix->panels - memory_.as<uint8_t>());
    matrix->num_filled = matrix->num_outputs;
  }
  if (data != nullptr) memory_ = HugeBuffer();
}

void Model::check_layer(int layer) const { require(layer >= 0 && layer < shape_.num_layers, "no such layer"); }

PackedMatrix& Model::matrix(int layer, MatrixKind kind) {
  if (kind == MatrixKind::kHead) return head_;
  check_layer(layer);
  LayerWeights& weights = layers_[static_cast<size_t>(layer)];
  switch (kind) {
    case MatrixKind::kQkv: return weights.qkv;
    case MatrixKind::kOutput: return weights.output;
    case MatrixKind::kGateUp: return weights.gate_up;
    case MatrixKind::kDown: return weights.down;
    case MatrixKind::kHead: break;
  }
  throw std::invalid_argument("no such matrix");
}

void Model::set_matrix(int layer, MatrixKind kind, OutputRange range, const void* rows, int64_t num_rows, int64_t inner,
                       ThreadPool* pool) {
  PackedMatrix& target = matrix(layer, kind);
  require(rows != nullptr && num_rows >= 1 && range.first >= 0 && inner == target.inner, "a matrix of another shape");
  require(range.column(num_rows - 1) < target.num_panels * kPanelCols, "more rows than the matrix has outputs");
  require(target.num_filled + num_rows <= target.num_outputs, "the matrix was set already");
  const int64_t element = element_bytes(shape_.dtype);
  const int64_t panel_bytes = kPanelCols * target.padded_inner * element;
  const uint8_t* source = static_cast<const uint8_t*>(rows);
  constexpr int64_t kRowsATask = 64;
  const auto pack = [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsATask);
    for (int64_t row = task * kRowsATask; row < end; ++row) {
      const int64_t column = range.column(row);
      ops_.pack_row(source + row * inner * element, inner, target.panels + column / kPanelCols * panel_bytes,
                    static_cast<int>(column % kPanelCols));
    }
  };
  const int64_t num_tasks = (num_rows + kRowsATask - 1) / kRowsATask;
  pool->run([&](int thread) { pool->for_each(thread, num_tasks, pack); });
  target.num_filled += num_rows;
}

void Model::set_bias(int layer, MatrixKind kind, OutputRange range, const float* values, int64_t n) {
  PackedMatrix& target = matrix(layer, kind);
  const int64_t num_columns = target.num_panels * kPanelCols;
  require(values != nullptr && n >= 1 && range.first >= 0 && range.column(n - 1) < num_columns, "a bias of another size");
  target.bias.resize(static_cast<size_t>(num_columns), 0.0f);
  for (int64_t i = 0; i < n; ++i) target.bias[static_cast<size_t>(range.column(i))] = values[i];
}

void Model::set_vector(int layer, VectorKind kind, const float* values, int64_t n) {
  const bool is_head = kind == VectorKind::kQueryNorm || kind == VectorKind::kKeyNorm;
  require(values != nullptr && n == (is_head ? shape_.head_dim : shape_.hidden_size), "a norm of another size");
  if (kind == VectorKind::kFinalNorm) {
    final_norm_.assign(values, values + n);
    return;
  }
  check_layer(layer);
  LayerWeights& weights = layers_[static_cast<size_t>(layer)];
  switch (kind) {
    case VectorKind::kInputNorm: weights.input_norm.assign(values, values + n); return;
    case VectorKind::kPostAttentionNorm: weights.post_attention_norm.assign(values, values + n); return;
    case VectorKind::kQueryNorm: weights.query_norm.assign(values, values + n); return;
    case VectorKind::kKeyNorm: weights.key_norm.assign(values, values + n); return;
    case VectorKind::kFinalNorm: break;
  }
  throw std::invalid_argument("no such vector");
}

void Model::check_complete() const {
  require(embedding_ != nullptr, "the embedding was not set");
  require(!final_norm_.empty(), "the final norm was not set");
  require(head_.num_filled == head_.num_outputs, "the head was not set");
  for (const LayerWeights& layer : layers_) {
    require(!layer.input_norm.empty() && !layer.post_attention_norm.empty(), "a layer's norm was not set");
    require(layer.query_norm.empty() == layer.key_norm.empty(), "a layer has one norm of queries and keys only");
    for (const PackedMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      require(matrix->num_filled == matrix->num_outputs, "a layer's matrix was not set");
    }
  }
}

}  // namespace twopool
