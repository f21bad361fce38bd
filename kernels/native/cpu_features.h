// What the processor and the operating system let us use.
#pragma once

namespace twopool {

// In order of preference: a later one is faster where it is there.
enum class Isa { kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };
constexpr int kNumIsas = 4;

const char* isa_name(Isa isa);

// Whether this process may execute the instructions of `isa`. The first call for AMX asks the kernel for tile registers.
bool isa_supported(Isa isa);

// Sets `best`; false where not even AVX2 is there.
bool best_isa(Isa* best);

}  // namespace twopool
