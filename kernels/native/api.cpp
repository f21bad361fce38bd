// The functions Python calls (kernels/native_step.py, kernels/collectives.py). They return 0, or with a message in
// twopool_last_error() 1, or 2 when the ranks of a group can no longer compute together.
// A model belongs to one thread at a time.

#include <sched.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch.h"
#include "collective.h"
#include "cpu_features.h"
#include "memory.h"
#include "model.h"
#include "step.h"
#include "thread_pool.h"

#define TWOPOOL_API extern "C" __attribute__((visibility("default")))

namespace twopool {
namespace {

constexpr int kAbiVersion = 6;
constexpr int kFailed = 1, kGroupLost = 2;
constexpr int kMaxThreads = 1024;
thread_local std::string last_error;

struct Handle {
  Handle(const ModelShape& shape, Isa isa, int num_threads, std::vector<int> cpus)
      : model(shape, isa), pool(num_threads, std::move(cpus)), runner(model, &pool) {}

  Model model;
  ThreadPool pool;
  StepRunner runner;
};

template <typename Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const GroupLost& error) {
    last_error = error.what();
    return kGroupLost;
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return kFailed;
}

template <typename Enum>
Enum checked(int value, Enum last) {
  if (value < 0 || value > static_cast<int>(last)) throw std::invalid_argument("a kind is out of range");
  return static_cast<Enum>(value);
}

std::vector<int> checked_cpus(const int* cpus, int num_threads) {
  if (cpus == nullptr) return {};
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) throw std::invalid_argument("the CPUs cannot be told");
  for (int i = 0; i < num_threads; ++i) {
    if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE || !CPU_ISSET(static_cast<size_t>(cpus[i]), &allowed)) {
      throw std::invalid_argument("CPU " + std::to_string(cpus[i]) + " is not one this process may run on");
    }
  }
  return std::vector<int>(cpus, cpus + num_threads);
}

}  // namespace

const OpTable& op_table(Isa isa, Dtype dtype) {
  switch (isa) {
    case Isa::kAvx2: return avx2::op_table(dtype);
    case Isa::kAvx512: return avx512::op_table(dtype);
    case Isa::kAvx512Bf16: return avx512_bf16::op_table(dtype);
    case Isa::kAmxBf16: return amx_bf16::op_table(dtype);
  }
  throw std::invalid_argument("no such instruction set");
}

}  // namespace twopool

using twopool::Handle;
using CollectiveHandle = std::shared_ptr<twopool::Collective>;

// Mirrored in kernels/native_step.py.
struct TwopoolModelArgs {
  int64_t vocab_size, hidden_size, intermediate_size, vocab_rows;
  int32_t num_layers, num_heads, num_kv_heads, head_dim;
  float eps, attention_scale;
  int32_t activation, dtype, isa, num_threads;
  const int64_t* windows;  // [num_layers]
  const int32_t* cpus;     // [num_threads] or null
};

TWOPOOL_API int twopool_abi_version() { return twopool::kAbiVersion; }

TWOPOOL_API const char* twopool_last_error() { return twopool::last_error.c_str(); }

// 1 if this CPU can run the instruction set of that number, 0 if not, in order of preference from 0 on; negative: no such.
TWOPOOL_API int twopool_isa_supported(int isa) {
  if (isa < 0 || isa >= twopool::kNumIsas) return -1;
  return twopool::isa_supported(static_cast<twopool::Isa>(isa)) ? 1 : 0;
}

TWOPOOL_API const char* twopool_isa_name(int isa) {
  if (isa < 0 || isa >= twopool::kNumIsas) return "none";
  return twopool::isa_name(static_cast<twopool::Isa>(isa));
}

// Copy n runs of `length` bytes: run source_index[i] of `source` becomes run target_index[i] of `target`.
TWOPOOL_API void twopool_copy_runs(char* target, int64_t target_stride, const int32_t* target_index,
                                   const char* source, int64_t source_stride, const int32_t* source_index,
                                   int64_t length, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(target + target_index[i] * target_stride, source + source_index[i] * source_stride,
                static_cast<size_t>(length));
  }
}

TWOPOOL_API void twopool_advise_huge_pages(void* data, int64_t num_bytes) {
  if (data != nullptr && num_bytes > 0) twopool::advise_huge_pages(data, static_cast<size_t>(num_bytes));
}

TWOPOOL_API int twopool_model_create(const TwopoolModelArgs* args, Handle** out) {
  return twopool::guarded([&] {
    if (args->num_threads < 1 || args->num_threads > twopool::kMaxThreads) {
      throw std::invalid_argument("num_threads must be from 1 to 1024");
    }
    if (args->num_layers < 1) throw std::invalid_argument("num_layers must be positive");
    twopool::ModelShape shape = {};
    shape.vocab_size = args->vocab_size;
    shape.hidden_size = args->hidden_size;
    shape.intermediate_size = args->intermediate_size;
    shape.vocab_rows = args->vocab_rows;
    shape.num_layers = args->num_layers;
    shape.num_heads = args->num_heads;
    shape.num_kv_heads = args->num_kv_heads;
    shape.head_dim = args->head_dim;
    shape.eps = args->eps;
    shape.attention_scale = args->attention_scale;
    shape.activation = twopool::checked(args->activation, twopool::Activation::kGeluTanh);
    shape.dtype = twopool::checked(args->dtype, twopool::Dtype::kBfloat16);
    shape.windows.assign(args->windows, args->windows + args->num_layers);
    const twopool::Isa isa = twopool::checked(args->isa, twopool::Isa::kAmxBf16);
    if (!twopool::isa_supported(isa)) throw std::invalid_argument("this CPU lacks the instruction set asked for");
    *out = new Handle(shape, isa, args->num_threads, twopool::checked_cpus(args->cpus, args->num_threads));
  });
}

// vocab_bounds: [ranks + 1]. The step keeps the collective alive.
TWOPOOL_API int twopool_model_join(Handle* handle, const CollectiveHandle* ranks, const int64_t* vocab_bounds) {
  return twopool::guarded([&] {
    handle->runner.join(*ranks, std::vector<int64_t>(vocab_bounds, vocab_bounds + (*ranks)->size() + 1));
  });
}

TWOPOOL_API void twopool_model_destroy(Handle* handle) { delete handle; }

TWOPOOL_API int twopool_set_matrix(Handle* handle, int layer, int kind, int64_t first, int interleaved,
                                   const void* rows, int64_t num_rows, int64_t inner) {
  return twopool::guarded([&] {
    handle->model.set_matrix(layer, twopool::checked(kind, twopool::MatrixKind::kHead), {first, interleaved != 0}, rows,
                             num_rows, inner, &handle->pool);
  });
}

TWOPOOL_API int twopool_set_bias(Handle* handle, int layer, int kind, int64_t first, int interleaved,
                                 const float* values, int64_t n) {
  return twopool::guarded([&] {
    handle->model.set_bias(layer, twopool::checked(kind, twopool::MatrixKind::kHead), {first, interleaved != 0}, values,
                           n);
  });
}

TWOPOOL_API int twopool_set_vector(Handle* handle, int layer, int kind, const float* values, int64_t n) {
  return twopool::guarded(
      [&] { handle->model.set_vector(layer, twopool::checked(kind, twopool::VectorKind::kFinalNorm), values, n); });
}

TWOPOOL_API void twopool_set_embedding(Handle* handle, const void* rows) { handle->model.set_embedding(rows); }

TWOPOOL_API int64_t twopool_packed_bytes(const Handle* handle) {
  return static_cast<int64_t>(handle->model.packed().size());
}

TWOPOOL_API void* twopool_packed_data(Handle* handle) { return handle->model.packed().as<void>(); }

TWOPOOL_API int twopool_use_packed(Handle* handle, const void* data) {
  return twopool::guarded([&] { handle->model.use_packed(static_cast<const uint8_t*>(data)); });
}

TWOPOOL_API int twopool_check_complete(Handle* handle) {
  return twopool::guarded([&] { handle->model.check_complete(); });
}

TWOPOOL_API int twopool_step(Handle* handle, const twopool::StepBatch* batch) {
  return twopool::guarded([&] { handle->runner.run(*batch); });
}

TWOPOOL_API int twopool_segment_create(int size, int64_t max_bytes, int32_t* fd) {
  return twopool::guarded([&] { *fd = twopool::Collective::create_segment(size, max_bytes); });
}

TWOPOOL_API int twopool_collective_open(int fd, int rank, int size, int64_t max_bytes, int spin_us, int timeout_ms,
                                        CollectiveHandle** out) {
  return twopool::guarded([&] {
    *out = new CollectiveHandle(
        std::make_shared<twopool::Collective>(fd, rank, size, max_bytes, spin_us, timeout_ms));
  });
}

TWOPOOL_API void twopool_collective_close(CollectiveHandle* ranks) { delete ranks; }

TWOPOOL_API void twopool_collective_abort(CollectiveHandle* ranks) { (*ranks)->abort(); }

TWOPOOL_API int64_t twopool_collective_spin_us(const CollectiveHandle* ranks) { return (*ranks)->spin_us(); }

TWOPOOL_API int twopool_collective_barrier(CollectiveHandle* ranks) {
  return twopool::guarded([&] { (*ranks)->barrier(); });
}

TWOPOOL_API int twopool_collective_all_reduce(CollectiveHandle* ranks, float* rows, int64_t num_rows, int64_t columns) {
  return twopool::guarded([&] { (*ranks)->all_reduce(rows, num_rows, columns); });
}

TWOPOOL_API int twopool_collective_gather(CollectiveHandle* ranks, const float* rows, int64_t num_rows,
                                          const int64_t* bounds, float* out) {
  return twopool::guarded([&] { (*ranks)->gather(rows, num_rows, bounds, out); });
}
