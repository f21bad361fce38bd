// The operations of a step, as the program sees them: plain arguments and a table of functions for each instruction set
// and element type. Every function computes a row in an order that depends on the row alone.
//
// Elements ("T") are float or bfloat16; sums, the residual stream and everything between two matrix products are float.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu_features.h"

namespace twopool {

enum class Dtype { kFloat32, kBfloat16 };
enum class Activation { kSilu, kGelu, kGeluTanh };

struct bfloat16 {
  uint16_t bits;
};

// A weight lies in panels of kPanelCols outputs: [inner / depth][kPanelCols][depth], depth 2 for bfloat16 (what the dot
// product instructions take) and 1 for float. `inner` is padded with zeros to a multiple of kInnerUnit.
constexpr int kPanelCols = 32;
constexpr int kInnerUnit = 32;
constexpr int kLanes = 16;
// Rows of activations that one task multiplies by one panel.
constexpr int kTaskRows = 96;
// Matrix tiles read whole groups of this many rows: buffers of activations end on such a border.
constexpr int kRowUnit = 32;
// Inner elements after which a product of many rows goes on with the next rows, so that the panel stays in the cache.
constexpr int kInnerBlock = 1536;

// Attention walks the keys in tiles, and starts its running sums anew at each split; both are aligned to positions, so
// that the order of summation depends on a query's position alone. Splits are combined in their order.
constexpr int kTileKeys = 128;
constexpr int kSplitKeys = 512;
// Query rows (tokens x the heads that share a KV head) of one attention task.
constexpr int kQueryRows = 96;
constexpr int kMaxHeadDim = 256;

static constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

enum class Epilogue {
  kStore,     // out = product + bias
  kAdd,       // out += product + bias
  kGated,     // elements = activation(gate) * up; a panel holds 16 gates, then their 16 ups
};

// Memory that is to be read soon: products fetch it into the caches line by line while they compute.
struct ReadAhead {
  const char* base;        // runs start at base + *run
  const int64_t* run;      // the one in hand, bytes
  const int64_t* end_run;  // run == end_run: nothing to fetch
  int64_t run_bytes;
  int64_t offset;          // of the next line in its run, bytes
};

// What a product fetches while it computes: the weights it will want next, and a share of `ahead`.
struct Fetches {
  const char* weights;     // the next line of them
  const char* end_weights;
  int weight_lines;        // fetched every kInnerUnit inner elements
  ReadAhead* ahead;        // or null
};

// One task of a matrix product: `num_rows` rows by `num_panels` panels.
struct GemmTask {
  const void* rows;        // T [num_rows][row_stride]
  int64_t row_stride;      // elements
  int num_rows;            // at most kTaskRows
  const void* panels;      // T, the first panel
  int num_panels;
  int64_t inner;           // padded
  const float* bias;       // [num_panels * kPanelCols] or null
  Epilogue epilogue;
  Activation activation;
  void* out;               // float [num_rows][out_stride], for kGated T; at the first panel's first column
  int64_t out_stride;      // elements
  int64_t num_cols;        // columns that exist from there on; the padding beyond is not written
  const void* next_panel;  // T, what this thread multiplies by after these
  int64_t next_inner;      // of it, padded; 0: none
  ReadAhead* ahead;        // what this thread may fetch meanwhile, or null
};

struct NormTask {
  const float* x;          // [n]
  const float* weight;     // [n]
  int n;
  float eps;
  void* out;               // T [n]
};

// Rotary embedding of some heads of one token, and their way out: queries to attention, K and V into the pool.
struct RotateTask {
  float* query_rows;       // [num_heads][head_dim], overwritten
  float* key_rows;         // [num_kv_heads][head_dim], overwritten
  const float* value_rows; // [num_kv_heads][head_dim]
  const float* cos;        // [head_dim / 2]
  const float* sin;        // [head_dim / 2]
  const float* q_norm;     // [head_dim] or null
  const float* k_norm;
  float eps;
  int num_heads, num_kv_heads, head_dim;
  void* queries;           // T [num_heads][head_dim]
  void* keys;              // T [head_dim] of KV head 0
  void* values;
  int64_t kv_head_stride;  // elements from a KV head to the next
};

// What the attention tasks of one layer share.
struct AttentionLayer {
  const void* queries;     // T [num_tokens][num_heads * head_dim]
  void* out;               // T [num_tokens][out_stride]
  int64_t out_stride;
  const void* pool;        // T, at this layer of block 0, KV head 0
  int64_t block_stride;    // elements
  int64_t kv_head_stride;
  int block_size;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int64_t window;          // a position sees itself and the window - 1 before it; 0: all
};

// Where a split of the keys leaves its sums when it was computed alone; [rows][head_dim padded] and two numbers a row.
struct PartialSums {
  float* values;
  float* maxima;
  float* sums;
};

struct AttentionTask {
  int64_t first_token;     // of the sequence, in the batch
  int64_t first_position;  // its position
  int64_t context_len;     // positions of the sequence that hold K and V
  const int32_t* blocks;   // the sequence's block table
  int kv_head;
  int first_row, num_rows; // of the sequence's rows; row r is token r / group, head r % group of the KV head
  int64_t first_split, end_split;
  // Tasks that share their rows and have one split each form a group; its last to finish combines.
  PartialSums* partials;   // [group_splits], null: this task has all splits of its rows
  std::atomic<int>* num_done;
  int partial_index, group_splits;
};

struct OpTable {
  void (*pack_row)(const void* row, int64_t n, void* panel, int column);
  void (*embed)(const void* row, int64_t n, float* out);
  void (*norm)(const NormTask&);
  void (*gemm)(const GemmTask&);
  void (*rotate)(const RotateTask&);
  // next: null, or the task that follows on this thread.
  void (*attend)(const AttentionLayer&, const AttentionTask&, const AttentionTask* next, void* scratch);
  size_t (*attention_scratch_bytes)(int head_dim);
};

const OpTable& op_table(Isa isa, Dtype dtype);

namespace avx2 {
const OpTable& op_table(Dtype dtype);
}
namespace avx512 {
const OpTable& op_table(Dtype dtype);
}
namespace avx512_bf16 {
const OpTable& op_table(Dtype dtype);
}
namespace amx_bf16 {
const OpTable& op_table(Dtype dtype);
}

inline int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace twopool
