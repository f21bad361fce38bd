#include "step.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

namespace twopool {
namespace {

constexpr int64_t kRowsATask = 4;      // of cheap operations
constexpr int64_t kMaxPanelsATask = 4;
constexpr int64_t kGemmTasksAThread = 8;
// So few rows are normalised by every thread for itself: that is quicker than to wait for one another.
constexpr int64_t kFewRows = 16;
constexpr int64_t kCacheWays = 1024;   // bytes: strides of a multiple of it crowd a few sets of the cache
constexpr int64_t kFloat = sizeof(float);

}  // namespace

void StepRunner::Rows::reserve(int64_t num_rows, int64_t width, int64_t element) {
  stride = round_up(width, kInnerUnit);
  if (stride * element % kCacheWays == 0) stride += kInnerUnit;
  memory.reserve(static_cast<size_t>(round_up(num_rows, kRowUnit) * stride * element));
}

void StepRunner::reserve(int64_t num_rows) {
  const int64_t element = element_bytes(shape_.dtype);
  residual_.reserve(num_rows, shape_.hidden_size, kFloat);
  normed_.reserve(num_rows, shape_.hidden_size, element);
  own_normed_.resize(static_cast<size_t>(pool_.num_threads()));
  for (Rows& rows : own_normed_) rows.reserve(kFewRows, shape_.hidden_size, element);
  qkv_.reserve(num_rows, shape_.qkv_size(), kFloat);
  attended_.reserve(num_rows, shape_.query_size(), element);
  gated_.reserve(num_rows, shape_.intermediate_size, element);
  queries_.stride = shape_.query_size();
  queries_.memory.reserve(static_cast<size_t>(num_rows * queries_.stride * element));
  wanted_residual_.reserve(batch_->num_logit_rows, shape_.hidden_size, kFloat);
  wanted_attended_.reserve(batch_->num_logit_rows, shape_.query_size(), element);
  scratch_.resize(static_cast<size_t>(pool_.num_threads()));
  ahead_.resize(static_cast<size_t>(pool_.num_threads()));
  for (HugeBuffer& scratch : scratch_) scratch.reserve(ops_.attention_scratch_bytes(shape_.head_dim));
}

void StepRunner::join(std::shared_ptr<Collective> ranks, std::vector<int64_t> vocab_bounds) {
  int64_t widest = 0;
  for (int rank = 0; rank < ranks->size(); ++rank) {
    const size_t r = static_cast<size_t>(rank);
    const int64_t width = vocab_bounds[r + 1] - vocab_bounds[r];
    if (width < 1) throw std::invalid_argument("a rank has no tokens");
    widest = std::max(widest, width);
  }
  const size_t own = static_cast<size_t>(ranks->rank());
  if (vocab_bounds.front() != 0 || vocab_bounds.back() != shape_.vocab_size ||
      vocab_bounds[own + 1] - vocab_bounds[own] != shape_.vocab_rows) {
    throw std::invalid_argument("the ranks' tokens are not the vocabulary");
  }
  if (ranks->slot_bytes() < kRowUnit * widest * kFloat) {
    throw std::invalid_argument("the ranks' segment is too small for this vocabulary");
  }
  ranks_ = std::move(ranks);
  vocab_bounds_ = std::move(vocab_bounds);
}

void StepRunner::run(const StepBatch& batch) {
  check_batch(shape_, batch);
  batch_ = &batch;
  if (batch.num_rows == 0) return;
  place_rows(batch, &places_);
  writes_are_private_ = writes_are_private(batch, places_);
  reserve(std::max(batch.num_rows, batch.num_logit_rows));
  plans_.clear();
  for (int64_t window : std::set<int64_t>(shape_.windows.begin(), shape_.windows.end())) {
    plans_.try_emplace(window, shape_, batch, window, pool_.num_threads());
  }
  if (ranks_ != nullptr) {
    if (batch.num_rows * residual_.stride * kFloat > ranks_->slot_bytes()) {
      throw std::invalid_argument("the batch has more rows than the ranks' segment was made for");
    }
    digest_ = batch_digest(batch) + static_cast<uint64_t>(model_.isa());  // sums of another order are another step
  }
  pool_.run([this](int thread) { walk(thread); });
  if (ranks_ != nullptr && ranks_->lost()) throw GroupLost(ranks_->loss());
}

void StepRunner::walk(int thread) {
  const int64_t num_rows = batch_->num_rows, num_wanted = batch_->num_logit_rows;
  if (ranks_ == nullptr) {
    embed(thread);
  } else if (!embed_among_ranks(thread)) {
    return;
  }
  for (int l = 0; l < shape_.num_layers; ++l) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(l)];
    const bool last = l + 1 == shape_.num_layers;
    if (l == 0) read_ahead(l, thread);
    const Rows& attention_input = normalise(layer.input_norm, num_rows, thread);
    multiply(thread, layer.qkv, attention_input, num_rows, Epilogue::kStore, qkv_.memory.as<void>(), qkv_.stride,
             shape_.qkv_size(), &layer.output);
    const AttentionPlan& plan = plans_.at(shape_.windows[static_cast<size_t>(l)]);
    const bool rotates_by_task = writes_are_private_ && plan.one_task_a_head();  // saves a barrier
    const bool ends_here = last && num_wanted == 0;  // the cache is filled, nothing else is asked for
    const uint32_t round = ranks_ == nullptr ? 0 : ranks_->round();
    if (!rotates_by_task || ends_here) rotate(l, thread);
    if (ends_here) {  // rank 0's return says that K and V are written: on every rank, then
      if (ranks_ != nullptr) ranks_->meet(round, thread == 0);
      return;
    }
    attend(l, thread, rotates_by_task);
    if (!last) read_ahead(l + 1, thread);
    if (last) gather_wanted(thread);
    const int64_t rows = last ? num_wanted : num_rows;
    if (!add_product(thread, layer.output, attended_, rows, &layer.gate_up)) return;
    // To be here every thread of every rank has left attend, and with it everything that writes this layer's K and V.
    if (thread == 0 && batch_->layers_done != nullptr) __atomic_store_n(batch_->layers_done, l + 1, __ATOMIC_RELEASE);
    const Rows& mlp_input = normalise(layer.post_attention_norm, rows, thread);
    multiply(thread, layer.gate_up, mlp_input, rows, Epilogue::kGated, gated_.memory.as<void>(), gated_.stride,
             layer.gate_up.num_panels * kPanelCols, &layer.down);
    const PackedMatrix& after = last ? model_.head() : model_.layers()[static_cast<size_t>(l) + 1].qkv;
    if (!add_product(thread, layer.down, gated_, rows, &after)) return;
  }
  write_logits(thread, normalise(model_.final_norm(), num_wanted, thread), num_wanted);
}

// Every rank has the rows of some tokens. The first meeting of a step, so the ranks see here that it is the same one.
bool StepRunner::embed_among_ranks(int thread) {
  const uint32_t round = ranks_->round();
  const int64_t first = vocab_bounds_[static_cast<size_t>(ranks_->rank())], row_elements = residual_.stride;
  const int64_t row_bytes = shape_.hidden_size * element_bytes(shape_.dtype);
  if (thread == 0) ranks_->announce(round, digest_);
  for_rows(thread, batch_->num_rows, [&](int64_t row) {
    const int64_t place = batch_->token_ids[row] - first;
    if (place < 0 || place >= shape_.vocab_rows) return;
    ops_.embed(model_.embedding() + place * row_bytes, shape_.hidden_size,
               ranks_->slot_as<float>(ranks_->rank(), round) + row * row_elements);
  });
  if (!ranks_->meet(round, thread == 0) || !ranks_->all_announced(round, digest_)) return false;
  for_rows(thread, batch_->num_rows, [&](int64_t row) {
    const auto end = std::upper_bound(vocab_bounds_.begin(), vocab_bounds_.end(), batch_->token_ids[row]);
    const int owner = static_cast<int>(end - vocab_bounds_.begin()) - 1;
    std::memcpy(residual_.memory.as<float>() + row * row_elements,
                ranks_->slot_as<float>(owner, round) + row * row_elements,
                static_cast<size_t>(shape_.hidden_size * kFloat));
  });
  return true;
}

// Adds a projection to the residual stream, the sum over the ranks where each has a part of the inputs.
bool StepRunner::add_product(int thread, const PackedMatrix& matrix, const Rows& rows, int64_t num_rows,
                             const PackedMatrix* after) {
  float* residual = residual_.memory.as<float>();
  const int64_t stride = residual_.stride, hidden = shape_.hidden_size;
  if (ranks_ == nullptr) {
    multiply(thread, matrix, rows, num_rows, Epilogue::kAdd, residual, stride, hidden, after);
    return true;
  }
  const uint32_t round = ranks_->round();
  multiply(thread, matrix, rows, num_rows, Epilogue::kStore, ranks_->slot(ranks_->rank(), round), stride, hidden,
           after);
  if (!ranks_->meet(round, thread == 0)) return false;
  for_rows(thread, num_rows, [&](int64_t row) {
    add_slots(*ranks_, round, row * stride, hidden, true, residual + row * stride);
  });
  return true;
}

bool StepRunner::write_logits(int thread, const Rows& last_hidden, int64_t num_rows) {
  const int64_t vocab_size = shape_.vocab_size;
  if (ranks_ == nullptr) {
    multiply(thread, model_.head(), last_hidden, num_rows, Epilogue::kStore, batch_->logits, vocab_size, vocab_size,
             nullptr);
    return true;
  }
  const int own = ranks_->rank();
  const auto width = [this](int rank) {
    return vocab_bounds_[static_cast<size_t>(rank) + 1] - vocab_bounds_[static_cast<size_t>(rank)];
  };
  int64_t widest = 0;
  for (int rank = 0; rank < ranks_->size(); ++rank) widest = std::max(widest, width(rank));
  const int64_t rows_at_once = ranks_->slot_bytes() / (widest * kFloat) / kRowUnit * kRowUnit;
  for (int64_t first = 0; first < num_rows; first += rows_at_once) {
    const uint32_t round = ranks_->round();
    const int64_t count = std::min(rows_at_once, num_rows - first);
    float* out = own == 0 ? batch_->logits + first * vocab_size : ranks_->slot_as<float>(own, round);
    multiply(thread, model_.head(), last_hidden, count, Epilogue::kStore, out, own == 0 ? vocab_size : width(own),
             width(own), nullptr, first);
    if (!ranks_->meet(round, thread == 0)) return false;
    if (own != 0) continue;
    for_rows(thread, count, [&](int64_t row) {
      for (int rank = 1; rank < ranks_->size(); ++rank) {
        std::memcpy(out + row * vocab_size + vocab_bounds_[static_cast<size_t>(rank)],
                    ranks_->slot_as<float>(rank, round) + row * width(rank),
                    static_cast<size_t>(width(rank) * kFloat));
      }
    });
  }
  return true;
}

template <typename Body>
void StepRunner::for_rows(int thread, int64_t num_rows, const Body& body) {
  pool_.for_each(thread, (num_rows + kRowsATask - 1) / kRowsATask, [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsATask);
    for (int64_t row = task * kRowsATask; row < end; ++row) body(row);
  });
}

void StepRunner::embed(int thread) {
  const int64_t row_bytes = shape_.hidden_size * element_bytes(shape_.dtype);
  for_rows(thread, batch_->num_rows, [&](int64_t row) {
    ops_.embed(model_.embedding() + batch_->token_ids[row] * row_bytes, shape_.hidden_size,
               residual_.memory.as<float>() + row * residual_.stride);
  });
}

const StepRunner::Rows& StepRunner::normalise(const std::vector<float>& weight, int64_t num_rows, int thread) {
  if (num_rows <= kFewRows) {
    const Rows& own = own_normed_[static_cast<size_t>(thread)];
    for (int64_t row = 0; row < num_rows; ++row) normalise_row(weight, row, own);
    return own;
  }
  for_rows(thread, num_rows, [&](int64_t row) { normalise_row(weight, row, normed_); });
  return normed_;
}

void StepRunner::normalise_row(const std::vector<float>& weight, int64_t row, const Rows& out) {
  ops_.norm({residual_.memory.as<float>() + row * residual_.stride, weight.data(),
             static_cast<int>(shape_.hidden_size), shape_.eps,
             out.memory.as<uint8_t>() + row * out.stride * element_bytes(shape_.dtype)});
}

// Neighbouring tasks share their rows, which stay in the cache, while the weights stream by.
struct StepRunner::ProductTasks {
  int64_t num_groups, panels_a_task, count;

  ProductTasks(const PackedMatrix& matrix, int64_t num_rows, int num_threads) {
    const int64_t num_blocks = (num_rows + kTaskRows - 1) / kTaskRows;
    const int64_t wanted = num_blocks * matrix.num_panels / (num_threads * kGemmTasksAThread);
    panels_a_task = std::clamp<int64_t>(wanted, 1, kMaxPanelsATask);
    num_groups = (matrix.num_panels + panels_a_task - 1) / panels_a_task;
    count = num_blocks * num_groups;
  }
  int64_t row(int64_t index) const { return index / num_groups * kTaskRows; }
  int64_t panel(int64_t index) const { return index % num_groups * panels_a_task; }
};

void StepRunner::multiply(int thread, const PackedMatrix& matrix, const Rows& rows, int64_t num_rows, Epilogue epilogue,
                          void* out, int64_t out_stride, int64_t num_cols, const PackedMatrix* after,
                          int64_t first_row) {
  const int64_t element = element_bytes(shape_.dtype), out_element = epilogue == Epilogue::kGated ? element : 4;
  const int64_t out_panel = epilogue == Epilogue::kGated ? kPanelCols / 2 : kPanelCols;
  const int num_threads = pool_.num_threads();
  const ProductTasks tasks(matrix, num_rows, num_threads);
  const auto panel_at = [element](const PackedMatrix& of, int64_t panel) {
    return of.panels + panel * kPanelCols * of.padded_inner * element;
  };
  pool_.for_each(thread, tasks.count, [&](int64_t index) {
    const int64_t row = tasks.row(index), panel = tasks.panel(index), panels_a_task = tasks.panels_a_task;
    GemmTask task = {};
    task.rows = rows.memory.as<uint8_t>() + (first_row + row) * rows.stride * element;
    task.row_stride = rows.stride;
    task.num_rows = static_cast<int>(std::min<int64_t>(kTaskRows, num_rows - row));
    task.panels = panel_at(matrix, panel);
    task.num_panels = static_cast<int>(std::min(panels_a_task, matrix.num_panels - panel));
    task.inner = matrix.padded_inner;
    task.bias = matrix.bias.empty() ? nullptr : matrix.bias.data() + panel * kPanelCols;
    task.epilogue = epilogue;
    task.activation = shape_.activation;
    task.out = static_cast<uint8_t*>(out) + (row * out_stride + panel * out_panel) * out_element;
    task.out_stride = out_stride;
    task.num_cols = num_cols - panel * kPanelCols;
    if (index + 1 != pool_.first_task(thread + 1, tasks.count)) {
      task.next_panel = panel_at(matrix, tasks.panel(index + 1));
      task.next_inner = matrix.padded_inner;
    } else if (after != nullptr) {
      const ProductTasks then(*after, num_rows, num_threads);
      task.next_panel = panel_at(*after, then.panel(pool_.first_task(thread, then.count)));
      task.next_inner = after->padded_inner;
    }
    task.ahead = &ahead_[static_cast<size_t>(thread)];
    ops_.gemm(task);
  });
}

uint8_t* StepRunner::pool_layer(int64_t block, int layer) const {
  const int64_t layer_elements = 2 * batch_->block_size * shape_.head_dim;
  const int64_t offset = block * shape_.num_kv_heads * kv_head_stride() + layer * layer_elements;
  return static_cast<uint8_t*>(batch_->kv_pool) + offset * element_bytes(shape_.dtype);
}

void StepRunner::rotate(int layer, int thread) {
  for_rows(thread, batch_->num_rows, [&](int64_t row) { rotate_heads(layer, row, 0, shape_.num_kv_heads); });
}

// The KV heads from first_kv_head on, and the query heads that share them.
void StepRunner::rotate_heads(int layer, int64_t row, int first_kv_head, int num_kv_heads) {
  const LayerWeights& weights = model_.layers()[static_cast<size_t>(layer)];
  const int64_t element = element_bytes(shape_.dtype), head_dim = shape_.head_dim;
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const RowPlace& place = places_[static_cast<size_t>(row)];
  const int64_t query = int64_t{first_kv_head} * group * head_dim, kv = first_kv_head * head_dim;
  float* qkv = qkv_.memory.as<float>() + row * qkv_.stride;
  RotateTask task = {};
  task.query_rows = qkv + query;
  task.key_rows = qkv + shape_.num_heads * head_dim + kv;
  task.value_rows = qkv + (shape_.num_heads + shape_.num_kv_heads) * head_dim + kv;
  task.cos = batch_->cos + place.position * (head_dim / 2);
  task.sin = batch_->sin + place.position * (head_dim / 2);
  task.q_norm = weights.query_norm.empty() ? nullptr : weights.query_norm.data();
  task.k_norm = weights.key_norm.empty() ? nullptr : weights.key_norm.data();
  task.eps = shape_.eps;
  task.num_heads = num_kv_heads * group;
  task.num_kv_heads = num_kv_heads;
  task.head_dim = shape_.head_dim;
  task.queries = queries_.memory.as<uint8_t>() + (row * queries_.stride + query) * element;
  uint8_t* keys = pool_layer(place.block, layer) + (first_kv_head * kv_head_stride() + place.offset * head_dim) * element;
  task.keys = keys;
  task.values = keys + batch_->block_size * head_dim * element;
  task.kv_head_stride = kv_head_stride();
  ops_.rotate(task);
}

void StepRunner::attend(int layer, int thread, bool rotates) {
  AttentionLayer shared = {};
  shared.queries = queries_.memory.as<void>();
  shared.out = attended_.memory.as<void>();
  shared.out_stride = attended_.stride;
  shared.pool = pool_layer(0, layer);
  shared.block_stride = shape_.num_kv_heads * kv_head_stride();
  shared.kv_head_stride = kv_head_stride();
  shared.block_size = static_cast<int>(batch_->block_size);
  shared.num_heads = shape_.num_heads;
  shared.num_kv_heads = shape_.num_kv_heads;
  shared.head_dim = shape_.head_dim;
  shared.scale = shape_.attention_scale;
  shared.window = shape_.windows[static_cast<size_t>(layer)];
  const std::vector<AttentionTask>& tasks = plans_.at(shared.window).tasks();
  void* scratch = scratch_[static_cast<size_t>(thread)].as<void>();
  ReadAhead& ahead = ahead_[static_cast<size_t>(thread)];
  ahead.run = ahead.end_run;  // what is left of this layer is read now
  pool_.for_each(thread, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const AttentionTask& task = tasks[static_cast<size_t>(i)];
    if (rotates) {
      const int64_t num_tokens = task.context_len - task.first_position;
      for (int64_t t = 0; t < num_tokens; ++t) rotate_heads(layer, task.first_token + t, task.kv_head, 1);
    }
    const size_t after = static_cast<size_t>(i) + 1;
    ops_.attend(shared, task, after < tasks.size() ? &tasks[after] : nullptr, scratch);
  });
}

// The products up to this layer's attention fetch what it is going to read.
void StepRunner::read_ahead(int layer, int thread) {
  const std::vector<int64_t>& runs = plans_.at(shape_.windows[static_cast<size_t>(layer)]).reads(thread);
  ReadAhead& ahead = ahead_[static_cast<size_t>(thread)];
  ahead.base = reinterpret_cast<const char*>(pool_layer(0, layer));
  ahead.run = runs.data();
  ahead.end_run = ahead.run + runs.size();
  ahead.run_bytes = 2 * batch_->block_size * shape_.head_dim * element_bytes(shape_.dtype);
  ahead.offset = 0;
}

// After the last layer's attention only the wanted rows go on.
void StepRunner::gather_wanted(int thread) {
  const size_t residual_bytes = static_cast<size_t>(residual_.stride) * sizeof(float);
  const size_t attended_bytes = static_cast<size_t>(attended_.stride * element_bytes(shape_.dtype));
  const auto copy = [](const Rows& from, const Rows& to, int64_t source, int64_t target, size_t row_bytes) {
    std::memcpy(to.memory.as<uint8_t>() + static_cast<size_t>(target) * row_bytes,
                from.memory.as<uint8_t>() + static_cast<size_t>(source) * row_bytes, row_bytes);
  };
  for_rows(thread, batch_->num_logit_rows, [&](int64_t i) {
    copy(residual_, wanted_residual_, batch_->logit_rows[i], i, residual_bytes);
    copy(attended_, wanted_attended_, batch_->logit_rows[i], i, attended_bytes);
  });
  // A second pass, as a row may be wanted in another's place.
  for_rows(thread, batch_->num_logit_rows, [&](int64_t i) {
    copy(wanted_residual_, residual_, i, i, residual_bytes);
    copy(wanted_attended_, attended_, i, i, attended_bytes);
  });
}

}  // namespace twopool
