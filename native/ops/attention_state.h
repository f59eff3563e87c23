// States of lines: what partitions give, how they are merged, and what an answer is made of. Included by attention.cpp.
#pragma once
#include "octavo/attention.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOWEST = -1e30f;  // score of nothing: finite, so that no difference is NaN

OCTAVO_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// 2^x to within 2 units in the last place for x in [-126, 126], clamped to there; exactly 1 for 0. The polynomial is the
// minimax one of degree 6 on [-1/2, 1/2] with a constant of 1.
OCTAVO_INLINE F exp2(F x) {
  x = min(max(x, all(-126.f)), all(126.f));
  const F n = round_even(x), r = sub(x, n);
  F p = all(1.5353361959569156e-4f);
  p = fma(p, r, all(1.3398875016719103e-3f));
  p = fma(p, r, all(9.61843691766262e-3f));
  p = fma(p, r, all(5.5503323674201965e-2f));
  p = fma(p, r, all(2.4022647738456726e-1f));
  p = fma(p, r, all(6.931471824645996e-1f));
  return times_two_to(fma(p, r, all(1.f)), n);
}

// Lines' states in memory: sums of weighted values [lines, wide], highest scores (times log2 e), sums of weights.
struct State {
  float* sums;
  float* highest;
  float* weights;
  static State at(float* base, int64_t lines, int64_t wide) {
    float* after = base + lines * wide;
    return {base, after, after + round_up(lines, 16)};
  }
  State from(int64_t line, int64_t wide) const { return {sums + line * wide, highest + line, weights + line}; }
};

static void clear(State s, int64_t lines, int64_t wide) {
  for (int64_t i = 0; i < lines * wide; i += W) store(s.sums + i, zero());
  for (int64_t i = 0; i < lines; ++i) {
    s.highest[i] = LOWEST;
    s.weights[i] = 0.f;
  }
}

// The state of what came before and of what comes next, into the first. Merging into a cleared state copies it exactly.
static void merge(State into, State next, int64_t lines, int64_t wide, int64_t next_stride) {
  for (int64_t i = 0; i < lines; i += W) {
    const Left n = first(lines - i);
    const F mine = load(into.highest + i, n), other = load(next.highest + i, n), top = max(mine, other);
    alignas(64) float keep[W], gain[W];
    const F keep_v = exp2(sub(mine, top)), gain_v = exp2(sub(other, top));
    store(keep, keep_v);
    store(gain, gain_v);
    store(into.highest + i, top, n);
    store(into.weights + i, fma(load(next.weights + i, n), gain_v, mul(load(into.weights + i, n), keep_v)), n);
    const int64_t count = least(lines - i, W);
    for (int64_t line = 0; line < count; ++line) {
      float* to = into.sums + (i + line) * wide;
      const float* from = next.sums + (i + line) * next_stride;
      const F a = all(keep[line]), b = all(gain[line]);
      for (int64_t d = 0; d < wide; d += W) store(to + d, fma(load(from + d), b, mul(load(to + d), a)));
    }
  }
}

// Sums of a line in the order of its features. Kernels on pairs hold 32 features as 0-3, 8-11, 16-19, 24-27 and then the
// others: what interleaving rows of 16-bit values within 128-bit lanes gives.
template <class T>
OCTAVO_INLINE void give(const float* sums, T* out, int64_t dim, F factor, bool paired) {
#if defined(__AVX512F__)
  if (paired) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t d = 0; d < dim; d += 32) {
      const F a = load(sums + d), b = load(sums + d + 16);
      store(out + d, mul(_mm512_permutex2var_ps(a, low, b), factor), first(dim - d));
      if (d + 16 < dim) store(out + d + 16, mul(_mm512_permutex2var_ps(a, high, b), factor), first(dim - d - 16));
    }
    return;
  }
#endif
  (void)paired;
  for (int64_t d = 0; d < dim; d += W) store(out + d, mul(load(sums + d), factor), first(dim - d));
}

// One over a line's sum of weights, that of a sink included. `sink`: its score times log2 e, or null.
OCTAVO_INLINE float share(float highest, float weights, const float* sink) {
  if (sink) {
    alignas(64) float extra[W];
    store(extra, exp2(all(*sink * LOG2_E - highest)));
    weights += extra[0];
  }
  return weights > 0.f ? 1.f / weights : 0.f;
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
