// The machine's own limits, for the benchmark to stand beside: what a loop over registers computes, what a loop over
// memory reads and copies. Compiled on demand by bench_limits.py for the CPU at hand.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// The t-th CPU this process may use, for one thread alone: unpinned, the kernel often puts two short threads on one.
void pin(int t) {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  int seen = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all) || seen++ != t % CPU_COUNT(&all)) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

// Runs body(thread) on every thread at once; the seconds of the slowest.
template <typename Body>
double together(int num_threads, const Body& body) {
  std::atomic<int> waiting{num_threads};
  std::vector<double> seconds(static_cast<size_t>(num_threads));
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      pin(t);
      waiting.fetch_sub(1);
      while (waiting.load() > 0) sched_yield();
      const auto start = Clock::now();
      body(t);
      seconds[static_cast<size_t>(t)] = std::chrono::duration<double>(Clock::now() - start).count();
    });
  }
  for (std::thread& thread : threads) thread.join();
  double slowest = 0;
  for (double one : seconds) slowest = one > slowest ? one : slowest;
  return slowest;
}

volatile float sink_float;
volatile uint64_t sink_word;

// Twelve independent chains: enough to hide the latency of a product and sum. Each starts from a value the compiler does
// not know: it would compute equal chains once and count them twelve times.
constexpr int kChains = 12;

template <typename Vector>
void hide(Vector (&sums)[kChains]) {
  for (Vector& sum : sums) asm volatile("" : "+v"(sum));
}

#if defined(__AVX512BF16__)
constexpr double kFlopsAStep = kChains * 64.0;
void multiply(int64_t steps) {
  __m512 sums[kChains] = {};
  hide(sums);
  __m512i word = _mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+v"(word));
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], (__m512bh)word, (__m512bh)word);
  }
  for (__m512 sum : sums) sink_float = _mm512_reduce_add_ps(sum);
}
const char kKind[] = "AVX-512 bf16";
#elif defined(__AVX512F__)
constexpr double kFlopsAStep = kChains * 32.0;
void multiply(int64_t steps) {
  __m512 sums[kChains] = {}, word = _mm512_set1_ps(0.5f);
  hide(sums);
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+v"(word));
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_fmadd_ps(word, word, sums[c]);
  }
  for (__m512 sum : sums) sink_float = _mm512_reduce_add_ps(sum);
}
const char kKind[] = "AVX-512 fp32";
#else
constexpr double kFlopsAStep = kChains * 16.0;
void multiply(int64_t steps) {
  __m256 sums[kChains] = {}, word = _mm256_set1_ps(0.5f);
  hide(sums);
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+x"(word));
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = _mm256_fmadd_ps(word, word, sums[c]);
  }
  for (__m256 sum : sums) sink_float = sum[0];
}
const char kKind[] = "AVX2 fp32";
#endif

#if defined(__AMX_BF16__)
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t num_rows[16];
};

void multiply_tiles(int64_t steps) {
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.num_rows[tile] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  _tile_zero(4), _tile_zero(5), _tile_zero(6), _tile_zero(7);
  for (int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

uint64_t* allocate(size_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  memset(memory, 1, num_bytes);
  return static_cast<uint64_t*>(memory);
}

void read_all(const uint64_t* data, size_t num_bytes) {
  const __m256i* vectors = reinterpret_cast<const __m256i*>(data);
  __m256i sums[8] = {};
  for (size_t i = 0; i < num_bytes / 32; i += 8) {
    _mm_prefetch(reinterpret_cast<const char*>(vectors + i) + 4096, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(vectors + i) + 4160, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(vectors + i) + 4224, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(vectors + i) + 4288, _MM_HINT_T0);
    for (int k = 0; k < 8; ++k) sums[k] = _mm256_xor_si256(sums[k], _mm256_load_si256(vectors + i + k));
  }
  for (int k = 1; k < 8; ++k) sums[0] = _mm256_xor_si256(sums[0], sums[k]);
  sink_word = static_cast<uint64_t>(_mm256_extract_epi64(sums[0], 0));
}

}  // namespace

extern "C" {

const char* limits_kind() { return kKind; }

// Operations a second (a product and a sum are two).
double limits_flops(int num_threads, int64_t steps) {
  return kFlopsAStep * steps * num_threads / together(num_threads, [&](int) { multiply(steps); });
}

// The same on AMX tiles; 0 where this was compiled for a CPU that has none.
double limits_tile_flops(int num_threads, int64_t steps) {
#if defined(__AMX_BF16__)
  return 4.0 * 16 * 16 * 32 * 2 * steps * num_threads / together(num_threads, [&](int) { multiply_tiles(steps); });
#else
  (void)num_threads, (void)steps;
  return 0;
#endif
}

// Bytes a second read (copies: read plus written) by num_threads, each of its own num_bytes, a multiple of 2 MiB.
// -1 when there is no such memory.
double limits_read(int num_threads, int64_t num_bytes) {
  const size_t share = static_cast<size_t>(num_bytes), all = share * static_cast<size_t>(num_threads);
  uint64_t* data = allocate(all + 8192);
  if (data == nullptr) return -1;
  const double seconds = together(num_threads, [&](int t) { read_all(data + t * share / 8, share); });
  munmap(data, all + 8192);
  return all / seconds;
}

double limits_copy(int num_threads, int64_t num_bytes) {
  const size_t share = static_cast<size_t>(num_bytes), all = share * static_cast<size_t>(num_threads);
  uint64_t *source = allocate(all), *target = allocate(all);
  if (source == nullptr || target == nullptr) return -1;
  const double seconds =
      together(num_threads, [&](int t) { memcpy(target + t * share / 8, source + t * share / 8, share); });
  munmap(source, all);
  munmap(target, all);
  return 2.0 * all / seconds;
}

}  // extern "C"
