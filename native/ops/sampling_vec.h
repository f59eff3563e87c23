// What choosing tokens needs of vectors beyond octavo/vec.h: comparisons as bits (lane 0 lowest), packing of the lanes
// that a comparison picked, sums in float64. Included by ops/sampling.cpp only.
#pragma once
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

using Bits = uint32_t;  // a bit a lane

#if defined(__AVX512F__)

OCTAVO_INLINE Bits at_least(F x, F t) { return _mm512_cmp_ps_mask(x, t, _CMP_GE_OQ); }
OCTAVO_INLINE Bits above(F x, F t) { return _mm512_cmp_ps_mask(x, t, _CMP_GT_OQ); }
OCTAVO_INLINE Bits equal(F x, F t) { return _mm512_cmp_ps_mask(x, t, _CMP_EQ_OQ); }
OCTAVO_INLINE Bits unordered(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q); }
OCTAVO_INLINE F where(Bits m, F yes, F no) { return _mm512_mask_mov_ps(no, __mmask16(m), yes); }
OCTAVO_INLINE int ones(Bits m) { return __builtin_popcount(m); }
OCTAVO_INLINE int lowest(Bits m) { return __builtin_ctz(m); }

struct D {  // W doubles
  __m512d low, high;
};
OCTAVO_INLINE D no_mass() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
OCTAVO_INLINE D wide(F x) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}
OCTAVO_INLINE D plus(D a, D b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
OCTAVO_INLINE D plus(D a, Bits m, D b) {
  return {_mm512_mask_add_pd(a.low, __mmask8(m), a.low, b.low),
          _mm512_mask_add_pd(a.high, __mmask8(m >> 8), a.high, b.high)};
}
OCTAVO_INLINE double total(D a) { return _mm512_reduce_add_pd(_mm512_add_pd(a.low, a.high)); }

// Writes the picked lanes one after another (W elements are written, ones(m) are meant).
OCTAVO_INLINE void pack(float* to, Bits m, F x) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(__mmask16(m), x)); }
OCTAVO_INLINE void pack(int32_t* to, Bits m, const int32_t* from) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(m), _mm512_loadu_si512(from)));
}
OCTAVO_INLINE void pack_places(int32_t* to, Bits m, int64_t base) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i place = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(base)));
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(m), place));
}

#else

#if defined(__AVX2__)

OCTAVO_INLINE Bits bits(__m256 x) { return Bits(_mm256_movemask_ps(x)); }
OCTAVO_INLINE Bits at_least(F x, F t) { return bits(_mm256_cmp_ps(x, t, _CMP_GE_OQ)); }
OCTAVO_INLINE Bits above(F x, F t) { return bits(_mm256_cmp_ps(x, t, _CMP_GT_OQ)); }
OCTAVO_INLINE Bits equal(F x, F t) { return bits(_mm256_cmp_ps(x, t, _CMP_EQ_OQ)); }
OCTAVO_INLINE Bits unordered(F x, F y) { return bits(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)); }
OCTAVO_INLINE F where(Bits m, F yes, F no) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(m)), lane), lane);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(on));
}
OCTAVO_INLINE int ones(Bits m) { return __builtin_popcount(m); }

struct D {
  __m256d low, high;
};
OCTAVO_INLINE D no_mass() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
OCTAVO_INLINE D wide(F x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
OCTAVO_INLINE D plus(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
OCTAVO_INLINE D plus(D a, Bits m, D b) {
  const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8), all = _mm256_set1_epi64x(int64_t(m));
  const __m256i low = _mm256_cmpeq_epi64(_mm256_and_si256(all, lane), lane), lane4 = _mm256_slli_epi64(lane, 4);
  const __m256i high = _mm256_cmpeq_epi64(_mm256_and_si256(all, lane4), lane4);
  return {_mm256_add_pd(a.low, _mm256_and_pd(_mm256_castsi256_pd(low), b.low)),
          _mm256_add_pd(a.high, _mm256_and_pd(_mm256_castsi256_pd(high), b.high))};
}
OCTAVO_INLINE double total(D a) {
  const __m256d both = _mm256_add_pd(a.low, a.high);
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

#else

OCTAVO_INLINE Bits at_least(F x, F t) { return x >= t; }
OCTAVO_INLINE Bits above(F x, F t) { return x > t; }
OCTAVO_INLINE Bits equal(F x, F t) { return x == t; }
OCTAVO_INLINE Bits unordered(F x, F y) { return x != x || y != y; }
OCTAVO_INLINE F where(Bits m, F yes, F no) { return m ? yes : no; }
OCTAVO_INLINE int ones(Bits m) { return int(m); }

using D = double;
OCTAVO_INLINE D no_mass() { return 0.; }
OCTAVO_INLINE D wide(F x) { return double(x); }
OCTAVO_INLINE D plus(D a, D b) { return a + b; }
OCTAVO_INLINE D plus(D a, Bits m, D b) { return m ? a + b : a; }
OCTAVO_INLINE double total(D a) { return a; }

#endif

OCTAVO_INLINE int lowest(Bits m) { return __builtin_ctz(m); }
OCTAVO_INLINE void pack(float* to, Bits m, F x) {
  alignas(32) float lane[W];
  store(lane, x);
  for (; m; m &= m - 1) *to++ = lane[lowest(m)];
}
OCTAVO_INLINE void pack(int32_t* to, Bits m, const int32_t* from) {
  int32_t lane[W];
  std::memcpy(lane, from, sizeof(lane));
  for (; m; m &= m - 1) *to++ = lane[lowest(m)];
}
OCTAVO_INLINE void pack_places(int32_t* to, Bits m, int64_t base) {
  for (; m; m &= m - 1) *to++ = int32_t(base) + lowest(m);
}

#endif

constexpr Bits EVERY = W == 32 ? ~Bits(0) : (Bits(1) << W) - 1;
OCTAVO_INLINE Bits first_bits(int64_t n) { return n >= W ? EVERY : (Bits(1) << n) - 1; }
// Lanes beyond n count as minus infinity.
template <class T>
OCTAVO_INLINE F load_or_least(const T* p, int64_t n) {
  return n >= W ? load(p) : pick(first(n), load(p, first(n)), all(-INFINITY));
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
