// A unit of work as kernels see it: its lines, what each may see, where their queries and keys lie.
// Included by attention.cpp.
#pragma once
#include "attention_state.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Keys of a partition.
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

struct Unit {
  int64_t lines, group;
  int64_t head_begin, head_end;
  const int32_t* blocks;  // of one row: of all members, as far as the unit reads
  const int32_t* tokens;  // [lines], of the step
  const int32_t* begins;  // [lines], positions seen: begins .. ends
  const int32_t* ends;
  const uint8_t* places;  // [lines], of the query heads that share a KV head

  int64_t query_head(const AttentionJob&, int64_t head, int64_t line) const { return head * group + places[line]; }
  int64_t query_at(const AttentionJob& job, int64_t head, int64_t line) const {
    return tokens[line] * job.query_stride + query_head(job, head, line) * job.head_dim;
  }
  // The elements of the key at `position`, a multiple of KEY_TILE; so many keys follow one another.
  int64_t cache_at(const AttentionJob& job, int64_t head, int64_t position) const {
    return int64_t(blocks[position / job.block_size]) * job.block_stride +
           (head * job.block_size + position % job.block_size) * job.head_dim;
  }
  int64_t scale_at(const AttentionJob& job, int64_t head, int64_t position) const {
    return int64_t(blocks[position / job.block_size]) * job.scale_stride + head * job.block_size +
           position % job.block_size;
  }
  // What lines from `line` see between them of the partition that starts at `base`. Lines of later tokens see neither
  // less behind nor less ahead; those of several members see all of it.
  Range seen(int64_t line, int64_t count, int64_t base) const {
    const int64_t begin = begins[line] - base, end = ends[line + count - 1] - base;
    return {most(0, begin), least(PARTITION, end)};
  }
};

// e4m3: 4 bits of exponent with a bias of 7, 3 of mantissa, no infinity (Micikevicius et al., 2022).
OCTAVO_INLINE float fp8_value(uint8_t x) {
  const uint32_t bits = (uint32_t(x & 0x7f) << 20) + ((127 - 7) << 23);
  float normal;
  std::memcpy(&normal, &bits, 4);
  const float small = float(x & 7) * 0x1p-9f, size = x & 0x78 ? normal : small;
  return x & 0x80 ? -size : size;
}

#if defined(__AVX512F__)
// Lane i: all lanes of v[i], two at a time by `Two`.
template <class Two>
OCTAVO_INLINE F across(const F* v) {
  F u[4];
  for (int j = 0; j < 4; ++j) {
    const F* x = v + 4 * j;
    const F a = Two::of(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const F b = Two::of(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    u[j] = Two::of(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const F a = Two::of(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const F b = Two::of(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return Two::of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

struct Sum {
  OCTAVO_INLINE F of(F a, F b) { return add(a, b); }
};
struct Highest {
  OCTAVO_INLINE F of(F a, F b) { return max(a, b); }
};
#endif

// Lane i: the sum of v[i].
OCTAVO_INLINE F sums(const F* v) {
#if defined(__AVX512F__)
  return across<Sum>(v);
#elif defined(__AVX2__)
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  return v[0];
#endif
}

OCTAVO_INLINE F tanh(F x) { return sub(all(1.f), div(all(2.f), add(exp(add(x, x)), all(1.f)))); }

// True when a score is more than a multiple of its product.
OCTAVO_INLINE bool bends(const AttentionJob& job) { return job.softcap > 0.f || job.slopes; }

// Products with the keys from `position` on to scores times log2 e.
OCTAVO_INLINE F bend(const AttentionJob& job, const Unit& unit, F x, int64_t line, int64_t head, int64_t position) {
  if (job.softcap > 0.f) x = mul(tanh(mul(x, all(job.scale / job.softcap))), all(job.softcap * LOG2_E));
  else x = mul(x, all(job.scale * LOG2_E));
  if (job.slopes) {
    alignas(64) float far[W];
    for (int w = 0; w < W; ++w) far[w] = float(position + w + 1 - unit.ends[line]);
    x = fma(load(far), all(job.slopes[unit.query_head(job, head, line)] * LOG2_E), x);
  }
  return x;
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
