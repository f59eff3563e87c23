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

#if defined(OCTAVO_LEVEL_AMX)

template <bool INT8>
static double multiply_tiles(int64_t rounds) {
  return in_all_threads(double(rounds) * 4 * 16 * 16 * (INT8 ? 64 : 32) * 2, [&] {
    shape_tiles(16, 16);
    alignas(64) static const char zeros[1024] = {0};
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    OCTAVO_TILE_ZERO(2);
    OCTAVO_TILE_ZERO(3);
    OCTAVO_TILE_LOAD(4, zeros, 64);
    OCTAVO_TILE_LOAD(5, zeros, 64);
    OCTAVO_TILE_LOAD(6, zeros, 64);
    OCTAVO_TILE_LOAD(7, zeros, 64);
    for (int64_t i = 0; i < rounds; ++i) {
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
constexpr int SUMS = 24;
using I = __m512i;
OCTAVO_INLINE I some_bytes() { return _mm512_set1_epi32(0x01010101); }
#define OCTAVO_KEEP(x) asm volatile("" : "+v"(x))
#else
constexpr int SUMS = 12;
using I = __m256i;
OCTAVO_INLINE I some_bytes() { return _mm256_set1_epi32(0x01010101); }
#define OCTAVO_KEEP(x) asm volatile("" : "+x"(x))
#endif

static double multiply_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
  constexpr int EACH = 64;
#else
  constexpr int EACH = 2 * W;  // widened bf16: the product is float32's
#endif
  return in_all_threads(double(rounds) * SUMS * EACH, [&] {
    F sums[SUMS], a = all(0.f), b = all(0.f);
    for (F& s : sums) s = zero();
    OCTAVO_KEEP(a);
    OCTAVO_KEEP(b);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
      for (int s = 0; s < SUMS; ++s) {
#if defined(__AVX512BF16__)
        sums[s] = _mm512_dpbf16_ps(sums[s], (__m512bh)a, (__m512bh)b);
#else
        sums[s] = fma(a, b, sums[s]);
#endif
      }
#pragma GCC unroll 24
    for (int s = 0; s < SUMS; ++s) OCTAVO_KEEP(sums[s]);
  });
}

static double multiply_int8(int64_t rounds) {
  return in_all_threads(double(rounds) * SUMS * double(sizeof(I)) * 2, [&] {
    I sums[SUMS], a = some_bytes(), b = some_bytes();
    for (I& s : sums) s = I{};
    OCTAVO_KEEP(a);
    OCTAVO_KEEP(b);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 24
      for (int s = 0; s < SUMS; ++s) {
#if defined(__AVX512F__)
        sums[s] = _mm512_dpbusd_epi32(sums[s], a, b);
#else
        OCTAVO_KEEP(a);  // or the products would be computed once
        sums[s] = _mm256_add_epi32(sums[s], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
      }
#pragma GCC unroll 24
    for (int s = 0; s < SUMS; ++s) OCTAVO_KEEP(sums[s]);
  });
}

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
