// Vectors of float32 at the level being compiled, and what kernels need of them.
//
// Promises: the same source gives each level its own code; no operation's bits depend on alignment or on how many
// elements are left over (a tail is computed like a full vector whose missing lanes are zero).
// Include it in ops/*.cpp only. Everything is static inside the level's namespace, so that the linker can never take one
// level's copy for another's. For the same reason ops/*.cpp use no containers of the standard library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "octavo/types.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_LEVEL {

OCTAVO_INLINE float to_float(bf16 x) {
  uint32_t wide = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
OCTAVO_INLINE float to_float(float x) { return x; }

// Round to nearest even; NaN stays NaN.
OCTAVO_INLINE bf16 to_bf16(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  if ((b & 0x7fffffffu) > 0x7f800000u) return {uint16_t((b >> 16) | 0x40)};
  return {uint16_t((b + 0x7fffu + ((b >> 16) & 1)) >> 16)};
}
OCTAVO_INLINE void put(float* to, float x) { *to = x; }
OCTAVO_INLINE void put(bf16* to, float x) { *to = to_bf16(x); }

#if defined(__AVX512F__)

constexpr int W = 16;  // floats in a vector
using F = __m512;
using Left = __mmask16;  // which lanes are in play

OCTAVO_INLINE Left first(int64_t n) { return n >= 16 ? Left(0xffff) : Left((1u << (n < 0 ? 0 : n)) - 1); }
OCTAVO_INLINE F zero() { return _mm512_setzero_ps(); }
OCTAVO_INLINE F all(float x) { return _mm512_set1_ps(x); }
OCTAVO_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
OCTAVO_INLINE F load(const float* p, Left n) { return _mm512_maskz_loadu_ps(n, p); }
OCTAVO_INLINE F widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
OCTAVO_INLINE F load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
OCTAVO_INLINE F load(const bf16* p, Left n) { return widen(_mm256_maskz_loadu_epi16(n, p)); }
OCTAVO_INLINE __m256i narrow(F x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i b = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd), 16);
  __m512i nan = _mm512_or_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan));
#endif
}
OCTAVO_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
OCTAVO_INLINE void store(float* p, F x, Left n) { _mm512_mask_storeu_ps(p, n, x); }
OCTAVO_INLINE void store(bf16* p, F x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
OCTAVO_INLINE void store(bf16* p, F x, Left n) { _mm256_mask_storeu_epi16(p, n, narrow(x)); }
OCTAVO_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
OCTAVO_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
OCTAVO_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
OCTAVO_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
OCTAVO_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
OCTAVO_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
OCTAVO_INLINE F pick(Left n, F yes, F no) { return _mm512_mask_blend_ps(n, no, yes); }
OCTAVO_INLINE F round_even(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE F times_two_to(F x, F whole) { return _mm512_scalef_ps(x, whole); }
OCTAVO_INLINE float sum(F x) { return _mm512_reduce_add_ps(x); }
OCTAVO_INLINE float highest(F x) { return _mm512_reduce_max_ps(x); }

#elif defined(__AVX2__)

constexpr int W = 8;
using F = __m256;
using Left = int;  // how many lanes are in play

OCTAVO_INLINE Left first(int64_t n) { return n >= 8 ? 8 : n < 0 ? 0 : int(n); }
OCTAVO_INLINE __m256i lanes(Left n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
OCTAVO_INLINE F zero() { return _mm256_setzero_ps(); }
OCTAVO_INLINE F all(float x) { return _mm256_set1_ps(x); }
OCTAVO_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
OCTAVO_INLINE F load(const float* p, Left n) { return _mm256_maskload_ps(p, lanes(n)); }
OCTAVO_INLINE F widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
OCTAVO_INLINE F load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
OCTAVO_INLINE F load(const bf16* p, Left n) {
  uint16_t room[8] = {0};
  std::memcpy(room, p, size_t(n) * 2);
  return widen(_mm_loadu_si128((const __m128i*)room));
}
OCTAVO_INLINE __m128i narrow(F x) {
  __m256i b = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i nan = _mm256_or_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(0x40));
  up = _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}
OCTAVO_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
OCTAVO_INLINE void store(float* p, F x, Left n) { _mm256_maskstore_ps(p, lanes(n), x); }
OCTAVO_INLINE void store(bf16* p, F x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
OCTAVO_INLINE void store(bf16* p, F x, Left n) {
  uint16_t room[8];
  _mm_storeu_si128((__m128i*)room, narrow(x));
  std::memcpy(p, room, size_t(n) * 2);
}
OCTAVO_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
OCTAVO_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
OCTAVO_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
OCTAVO_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
OCTAVO_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
OCTAVO_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
OCTAVO_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
OCTAVO_INLINE F pick(Left n, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(lanes(n))); }
OCTAVO_INLINE F round_even(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE F times_two_to(F x, F whole) {  // whole is clamped so that 2^whole is a normal number
  __m256i e = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(whole, all(127.f)), all(-126.f)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23)));
}
OCTAVO_INLINE float sum(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
OCTAVO_INLINE float highest(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

#else  // one float at a time, for any processor

constexpr int W = 1;
using F = float;
using Left = int;

OCTAVO_INLINE Left first(int64_t n) { return n >= 1; }
OCTAVO_INLINE F zero() { return 0.f; }
OCTAVO_INLINE F all(float x) { return x; }
template <class T>
OCTAVO_INLINE F load(const T* p) { return to_float(*p); }
template <class T>
OCTAVO_INLINE F load(const T* p, Left n) { return n ? to_float(*p) : 0.f; }
template <class T>
OCTAVO_INLINE void store(T* p, F x) { put(p, x); }
template <class T>
OCTAVO_INLINE void store(T* p, F x, Left n) { if (n) put(p, x); }
OCTAVO_INLINE F add(F a, F b) { return a + b; }
OCTAVO_INLINE F sub(F a, F b) { return a - b; }
OCTAVO_INLINE F mul(F a, F b) { return a * b; }
OCTAVO_INLINE F div(F a, F b) { return a / b; }
OCTAVO_INLINE F fma(F a, F b, F c) { return a * b + c; }  // two roundings: fmaf is a slow call on the baseline
OCTAVO_INLINE F max(F a, F b) { return a > b ? a : b; }
OCTAVO_INLINE F min(F a, F b) { return a < b ? a : b; }
OCTAVO_INLINE F pick(Left n, F yes, F no) { return n ? yes : no; }
OCTAVO_INLINE F round_even(F x) { return std::nearbyint(x); }
OCTAVO_INLINE F times_two_to(F x, F whole) { return std::ldexp(x, int(whole)); }
OCTAVO_INLINE float sum(F x) { return x; }
OCTAVO_INLINE float highest(F x) { return x; }

#endif

// e^x to within 2 units in the last place for x in [-87, 88]; 0 below, large above; NaN counts as -87.
// Cody and Waite's reduction, and a polynomial of degree 6 on [-ln2/2, ln2/2].
OCTAVO_INLINE F exp(F x) {
  x = min(max(x, all(-87.33654f)), all(88.37626f));
  F n = round_even(mul(x, all(1.44269504088896341f)));
  F r = fma(n, all(-0.693145751953125f), x);
  r = fma(n, all(-1.42860682030941723e-6f), r);
  F p = all(1.3981999507e-3f);
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, all(1.f)));
  return times_two_to(p, n);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
