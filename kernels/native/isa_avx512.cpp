// Compiled with the compiler flags of its instruction set (see setup.py); everything but op_table() is private to it.
#include <immintrin.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ops.h"

namespace twopool {
namespace avx512 {
namespace {

#include "simd_avx512.inc"
#include "dot.inc"
#include "microkernel.inc"
#include "elementwise.inc"
#include "gemm.inc"
#include "attention_few_rows.inc"
#include "attention.inc"
#include "op_table.inc"

}  // namespace

const OpTable& op_table(Dtype dtype) { return dtype == Dtype::kFloat32 ? kTable<float> : kTable<bfloat16>; }

}  // namespace avx512
}  // namespace twopool
