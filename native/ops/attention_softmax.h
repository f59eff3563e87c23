// The softmax of a partition, on products that a kernel left in memory; weights take their place, rounded to bf16.
// Included by attention_pairs.h.
#pragma once
#include "attention_panels.h"

#if defined(__AVX512BF16__)

namespace octavo {
namespace OCTAVO_LEVEL {

// 2^x for what is rounded to bf16 at once: to within 9e-5; x at most a little above 0. A polynomial of degree 3 on [0, 1).
OCTAVO_INLINE __m512 rough_exp2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.0770670548081398f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.22764497995376587f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6951168179512024f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, x);
}

// One line's scores: 16 keys every `tile_bytes` from `at`; weights take their place, 32 keys every `step_bytes`.
struct Scores {
  char* at;
  int64_t tile_bytes, step_bytes;
};

// Products to what the softmax is over, where that is more than a factor. `scales`: of keys, or null.
OCTAVO_INLINE void bend_all(const AttentionJob& job, const Unit& unit, Scores s, const float* scales, Range seen,
                            int64_t line, int64_t head, int64_t base) {
  if (scales)
    for (int64_t t = seen.begin / 16; t * 16 < seen.end; ++t) {
      float* x = (float*)(s.at + t * s.tile_bytes);
      store(x, mul(load(x), load(scales + t * 16)));
    }
  if (!bends(job)) return;
  for (int64_t t = seen.begin / 16; t * 16 < seen.end; ++t) {
    float* x = (float*)(s.at + t * s.tile_bytes);
    store(x, bend(job, unit, load(x), line, head, base + t * 16));
  }
}

// Highest of a line's products that it sees, 16 of them side by side.
OCTAVO_INLINE __m512 highest_of(Scores s, Range seen) {
  const __m512 lowest = _mm512_set1_ps(LOWEST);
  if (seen.empty()) return lowest;
  const int64_t begin = (seen.begin + 15) / 16, end = seen.end / 16;
  __m512 top[4] = {lowest, lowest, lowest, lowest};
  if (seen.begin % 16)
    top[0] = _mm512_mask_loadu_ps(lowest, lanes_in(seen, seen.begin / 16 * 16), s.at + seen.begin / 16 * s.tile_bytes);
  if (seen.end % 16 && (seen.end / 16 != seen.begin / 16 || seen.begin % 16 == 0))
    top[1] = _mm512_mask_loadu_ps(lowest, lanes_in(seen, seen.end / 16 * 16), s.at + seen.end / 16 * s.tile_bytes);
  const char* at = s.at + begin * s.tile_bytes;
  int64_t t = begin;
  for (; t + 4 <= end; t += 4, at += 4 * s.tile_bytes)
    for (int i = 0; i < 4; ++i) top[i] = _mm512_max_ps(top[i], _mm512_load_ps(at + i * s.tile_bytes));
  for (; t < end; ++t, at += s.tile_bytes) top[0] = _mm512_max_ps(top[0], _mm512_load_ps(at));
  return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

// Products to weights, rounded to bf16: exp2(factor * product - highest), times the scales of values if there are any.
// Steps of `all` that the line does not see get zeros. Returns sums of the weights, without scales, side by side.
OCTAVO_INLINE __m512 weights_of(Scores s, const float* scales, Range seen, Range all, float factor, float highest) {
  const int64_t first_step = all.begin / STEP, last_step = (all.end + STEP - 1) / STEP;
  const int64_t inner_begin = seen.empty() ? last_step : (seen.begin + STEP - 1) / STEP;
  const int64_t inner_end = seen.empty() ? last_step : seen.end / STEP;
  const __m512 by = _mm512_set1_ps(factor), less = _mm512_set1_ps(-highest);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  const auto put = [&](__m512 low, __m512 high, int64_t step) {
    __m512bh p = _mm512_cvtne2ps_pbh(high, low);
    sum = _mm512_dpbf16_ps(sum, p, ones);
    if (scales) {
      const float* by = scales + step * STEP;
      p = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, _mm512_load_ps(by + 16)), _mm512_mul_ps(low, _mm512_load_ps(by)));
    }
    _mm512_store_si512(s.at + step * s.step_bytes, (__m512i)p);
  };
  const auto edge = [&](int64_t step) {
    __m512 x[2];
    for (int64_t i = 0; i < 2; ++i) {
      const __mmask16 n = lanes_in(seen, step * STEP + i * 16);
      x[i] = _mm512_maskz_loadu_ps(n, s.at + (2 * step + i) * s.tile_bytes);
      x[i] = _mm512_maskz_mov_ps(n, rough_exp2(_mm512_maskz_fmadd_ps(n, x[i], by, less)));
    }
    put(x[0], x[1], step);
  };
  int64_t t = first_step;
  for (; t < last_step && t < inner_begin; ++t) edge(t);
  const char* from = s.at + 2 * t * s.tile_bytes;
  for (; t < inner_end; ++t, from += 2 * s.tile_bytes) {
    const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(from), by, less);
    const __m512 y = _mm512_fmadd_ps(_mm512_load_ps(from + s.tile_bytes), by, less);
    put(rough_exp2(x), rough_exp2(y), t);
  }
  for (; t < last_step; ++t) edge(t);
  return sum;
}

// The softmax of up to 16 lines in a partition: lines every `line_bytes`. `all`: what any of them sees.
struct Softmax {
  const AttentionJob& job;
  const Unit& unit;
  int64_t line, count, head, base;
  Range all;
  Scores scores;  // of the first line
  int64_t line_bytes;
  State part;  // of the first line
  const float *key_scales, *value_scales;  // of the partition; null: none
  alignas(64) __m512 many[16];

  Scores of(int64_t i) const { return {scores.at + i * line_bytes, scores.tile_bytes, scores.step_bytes}; }
  float factor() const { return bends(job) ? 1.f : job.scale * LOG2_E; }
  void find_highest() {
    for (int64_t i = 0; i < count; ++i) {
      const Range seen = unit.seen(line + i, 1, base);
      bend_all(job, unit, of(i), key_scales, seen, line + i, head, base);
      many[i] = highest_of(of(i), seen);
    }
    for (int64_t i = count; i < 16; ++i) many[i] = _mm512_setzero_ps();
    // Nothing seen: lowest, whatever the factor.
    const __m512 top = across<Highest>(many), scaled = _mm512_mul_ps(top, _mm512_set1_ps(factor()));
    const __mmask16 none = _mm512_cmp_ps_mask(top, _mm512_set1_ps(LOWEST), _CMP_EQ_OQ);
    _mm512_storeu_ps(part.highest, _mm512_mask_mov_ps(scaled, none, _mm512_set1_ps(LOWEST)));
  }
  inline void weigh(int64_t i) {
    many[i] = weights_of(of(i), value_scales, unit.seen(line + i, 1, base), all, factor(), part.highest[i]);
  }
  void add_up() {
    for (int64_t i = count; i < 16; ++i) many[i] = _mm512_setzero_ps();
    _mm512_storeu_ps(part.weights, sums(many));
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
