#include "cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace twopool {
namespace {

constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureTileData = 18;

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf out;
  __get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx);
  return out;
}

bool bit(uint32_t word, int number) { return (word >> number) & 1; }

// The register states that the operating system saves on a context switch.
uint64_t saved_states() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool saves(uint64_t states) { return (saved_states() & states) == states; }

bool has_avx2() {
  const Leaf one = cpuid(1, 0), seven = cpuid(7, 0);
  return bit(one.ecx, 12) && bit(one.ecx, 28) && bit(seven.ebx, 5) && saves(0x6);
}

bool has_avx512() {
  const Leaf seven = cpuid(7, 0);
  const bool foundation = bit(seven.ebx, 16), dq = bit(seven.ebx, 17), bw = bit(seven.ebx, 30), vl = bit(seven.ebx, 31);
  return has_avx2() && foundation && dq && bw && vl && saves(0xE6);
}

bool has_avx512_bf16() { return has_avx512() && bit(cpuid(7, 1).eax, 5); }

bool has_amx_bf16() {
  const Leaf seven = cpuid(7, 0);
  if (!has_avx512_bf16() || !bit(seven.edx, 22) || !bit(seven.edx, 24) || !saves(0x60000)) return false;
  // Linux hands out tile registers on request only; the permission holds for every thread made later, too.
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAmxBf16: return "amx_bf16";
  }
  return "none";
}

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return has_avx2();
    case Isa::kAvx512: return has_avx512();
    case Isa::kAvx512Bf16: return has_avx512_bf16();
    case Isa::kAmxBf16: return has_amx_bf16();
  }
  return false;
}

bool best_isa(Isa* best) {
  for (int number = kNumIsas - 1; number >= 0; --number) {
    const Isa isa = static_cast<Isa>(number);
    if (isa_supported(isa)) {
      *best = isa;
      return true;
    }
  }
  return false;
}

}  // namespace twopool
