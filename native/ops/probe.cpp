// See octavo/probe.h.
#include "octavo/probe.h"

#include "octavo/parallel.h"
#include "octavo/tiles.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t LINE = 64, READ_AHEAD = 4096;

// One thread's part: whole cache lines, from front to back, fetched ahead into the second cache.
OCTAVO_INLINE uint64_t read_lines(const char* from, int64_t lines) {
  uint64_t all = 0;
#if defined(__AVX512F__)
  __m512i seen[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 4 <= lines; i += 4, from += 4 * LINE)
    for (int l = 0; l < 4; ++l) {
      __builtin_prefetch(from + READ_AHEAD + l * LINE, 0, 2);
      seen[l] = _mm512_xor_si512(seen[l], _mm512_loadu_si512(from + l * LINE));
    }
  for (; i < lines; ++i, from += LINE) seen[0] = _mm512_xor_si512(seen[0], _mm512_loadu_si512(from));
  uint64_t words[8];
  for (const __m512i& s : seen) {
    _mm512_storeu_si512(words, s);
    for (uint64_t w : words) all ^= w;
  }
#else
  uint64_t seen[8] = {0};
  for (int64_t i = 0; i < lines; ++i, from += LINE) {
    __builtin_prefetch(from + READ_AHEAD, 0, 2);
    uint64_t words[8];
    std::memcpy(words, from, 64);
    for (int w = 0; w < 8; ++w) seen[w] ^= words[w];
  }
  for (uint64_t w : seen) all ^= w;
#endif
  return all;
}

static uint64_t read(const void* memory, int64_t num_bytes) {
  uint64_t all = 0;
  parallel(num_bytes / LINE, 1024, [&](int64_t begin, int64_t end, int) {
    const uint64_t mine = read_lines(static_cast<const char*>(memory) + begin * LINE, end - begin);
    __atomic_fetch_xor(&all, mine, __ATOMIC_RELAXED);
  });
  return all;
}

// body() in every thread; `each` operations by it in one thread.
template <class Body>
static double in_all_threads(double each, const Body& body) {
  const int64_t threads = omp_get_max_threads();
  parallel(threads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) body();
  });
  return each * double(threads);
}

// Operands that differ from one product to the next, as they do in a matrix: a processor may lower its clock for them.
struct Operands {
  alignas(64) uint8_t bytes[8192];
  explicit Operands(bool floats) {
    uint32_t x = 1;
    for (int i = 0; i < 8192; i += 2) {
      x = x * 1664525u + 1013904223u;
      const uint16_t half = uint16_t(x >> 16);
      const uint16_t item = floats ? uint16_t((half & 0x807f) | 0x3f80) : half;  // bf16: 1 to 2, either sign
      std::memcpy(bytes + i, &item, 2);
    }
  }
};

#if defined(OCTAVO_LEVEL_AMX)

// Blocks of 2 x 2 tiles, the operands from the first cache.
template <bool INT8>
static double multiply_tiles(int64_t rounds) {
  return in_all_threads(double(rounds) * 4 * 16 * 16 * (INT8 ? 64 : 32) * 2, [&] {
    const Operands operands(!INT8);
    shape_tiles(16, 16);
    fence();
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    OCTAVO_TILE_ZERO(2);
    OCTAVO_TILE_ZERO(3);
    for (int64_t i = 0; i < rounds; ++i) {
      const uint8_t* at = operands.bytes + i % 2 * 4096;
      OCTAVO_TILE_LOAD(6, at, 64);
      OCTAVO_TILE_LOAD(4, at + 1024, 64);
      OCTAVO_TILE_LOAD(7, at + 2048, 64);
      OCTAVO_TILE_LOAD(5, at + 3072, 64);
      if (INT8) {
        OCTAVO_TILE_DOT_U8S8(0, 4, 6);
        OCTAVO_TILE_DOT_U8S8(1, 4, 7);
        OCTAVO_TILE_DOT_U8S8(2, 5, 6);
        OCTAVO_TILE_DOT_U8S8(3, 5, 7);
      } else {
        OCTAVO_TILE_DOT(0, 4, 6);
        OCTAVO_TILE_DOT(1, 4, 7);
        OCTAVO_TILE_DOT(2, 5, 6);
        OCTAVO_TILE_DOT(3, 5, 7);
      }
    }
    release_tiles();
  });
}
static double multiply_bf16(int64_t rounds) { return multiply_tiles<false>(rounds); }
static double multiply_int8(int64_t rounds) { return multiply_tiles<true>(rounds); }

#elif defined(__AVX2__)

#if defined(__AVX512F__)
constexpr int SUMS = 24, SEVERAL = 3;
using I = __m512i;
OCTAVO_INLINE I operand(const Operands& all, int i) { return _mm512_load_si512(all.bytes + i * 64); }
OCTAVO_INLINE F floats(I x) { return _mm512_castsi512_ps(x); }
#define OCTAVO_KEEP(x) asm volatile("" : "+v"(x))
#else
constexpr int SUMS = 10, SEVERAL = 2;
using I = __m256i;
OCTAVO_INLINE I operand(const Operands& all, int i) { return _mm256_load_si256((const __m256i*)(all.bytes + i * 64)); }
OCTAVO_INLINE F floats(I x) { return _mm256_castsi256_ps(x); }
#define OCTAVO_KEEP(x) asm volatile("" : "+x"(x))
#endif

OCTAVO_INLINE void multiply_add(F& sum, I a, I b) {
#if defined(__AVX512BF16__)
  sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  sum = fma(floats(a), floats(b), sum);  // widened bf16: the product is float32's
#endif
}
OCTAVO_INLINE void multiply_add(I& sum, I a, I b) {
#if defined(__AVX512F__)
  sum = _mm512_dpbusd_epi32(sum, a, b);
#else
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

// Many sums in registers, so that none waits for itself.
template <class T>
static double multiply_vectors(int64_t rounds, bool floats, double each) {
  return in_all_threads(double(rounds) * SUMS * each, [&] {
    const Operands operands(floats);
    T sums[SUMS];
    std::memset(sums, 0, sizeof(sums));
    I a[SEVERAL], b[SEVERAL];
    for (int i = 0; i < SEVERAL; ++i) {
      a[i] = operand(operands, i);
      b[i] = operand(operands, SEVERAL + i);
    }
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 3
      for (int s = 0; s < SEVERAL; ++s) OCTAVO_KEEP(a[s]);  // or products would be computed once for all rounds
#pragma GCC unroll 24
      for (int s = 0; s < SUMS; ++s) multiply_add(sums[s], a[s % SEVERAL], b[s / SEVERAL % SEVERAL]);
    }
#pragma GCC unroll 24
    for (int s = 0; s < SUMS; ++s) OCTAVO_KEEP(sums[s]);
  });
}
#if defined(__AVX512BF16__)
constexpr double EACH_FLOAT = W * 4;
#else
constexpr double EACH_FLOAT = W * 2;
#endif
static double multiply_bf16(int64_t rounds) { return multiply_vectors<F>(rounds, true, EACH_FLOAT); }
static double multiply_int8(int64_t rounds) { return multiply_vectors<I>(rounds, false, double(sizeof(I)) * 2); }

#else

template <class T>
static double multiply_plain(int64_t rounds) {
  constexpr int SUMS = 16;
  return in_all_threads(double(rounds) * SUMS * 2, [&] {
    T sums[SUMS] = {0};
    volatile T one = 1;
    const T a = one, b = one;
    for (int64_t i = 0; i < rounds; ++i) {
      for (int s = 0; s < SUMS; ++s) sums[s] = T(sums[s] + a * b);
      asm volatile("" : : "r"(sums) : "memory");
    }
  });
}
static double multiply_bf16(int64_t rounds) { return multiply_plain<float>(rounds); }
static double multiply_int8(int64_t rounds) { return multiply_plain<int32_t>(rounds); }

#endif

extern const ProbeTable probe_table;
const ProbeTable probe_table = {read, multiply_bf16, multiply_int8};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
