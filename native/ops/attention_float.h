// Partitions in float32, for every level and type: products over a vector of features at a time, no packing.
// Included by attention.cpp.
#pragma once
#include "attention_unit.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Lanes begin .. end of yes, the others of no.
OCTAVO_INLINE F within(int64_t begin, int64_t end, F yes, F no) {
  return pick(first(end), pick(first(begin), no, yes), no);
}

// T: float or bf16 as they lie in the cache; other types are widened to float first.
template <class T>
struct FloatKernel {
  static constexpr int MOST_AT_ONCE = 4;
  static constexpr bool paired = false;
  static constexpr int64_t FEW = 0;
  using ForFew = FloatKernel;
  const AttentionJob& job;
  const Unit& unit;
  int64_t dim, wide;
  float* queries;  // [heads, lines, wide]
  float* scores;   // [4, PARTITION]
  float* given;    // [4, wide]
  float* staged;   // [2, PARTITION, dim]
  State part;

  static int64_t scratch_floats(const AttentionJob& job) {
    const int64_t wide = round_up(job.head_dim, 32);
    const bool widened = job.kv_type != Type::f32 && job.kv_type != Type::bf16;
    return job.most_lines * wide + 4 * PARTITION + 4 * wide + 64 + (widened ? 2 * PARTITION * job.head_dim : 0);
  }

  FloatKernel(const AttentionJob& j, const Unit& u, float* scratch) : job(j), unit(u), dim(j.head_dim) {
    wide = round_up(dim, 32);
    queries = scratch;
    scores = queries + job.most_lines * wide;
    given = scores + 4 * PARTITION;
    part = {given, given + 4 * wide, given + 4 * wide + 32};
    staged = given + 4 * wide + 64;
    const int64_t heads = unit.head_end - unit.head_begin;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < unit.lines; ++i) {
        float* to = queries + (h * unit.lines + i) * wide;
        const int64_t at = unit.query_at(job, unit.head_begin + h, i);
        for (int64_t d = 0; d < wide; d += W) {
          const Left n = first(dim - d);
          store(to + d, job.type == Type::bf16 ? load((const bf16*)job.query + at + d, n)
                                               : load((const float*)job.query + at + d, n));
        }
      }
  }

  // The lines' states of one partition, merged into `into`.
  void run(int64_t head, int64_t partition, State into, int64_t, int64_t) {
    const int64_t base = partition * PARTITION;
    const Range all_seen = unit.seen(0, unit.lines, base);
    if (all_seen.empty()) return;
    const T *keys[PARTITION / KEY_TILE], *values[PARTITION / KEY_TILE];
    for (int64_t t = all_seen.begin / KEY_TILE; t * KEY_TILE < all_seen.end; ++t)
      place(head, base, t, keys[t], values[t]);
    const float* q = queries + (head - unit.head_begin) * unit.lines * wide;
    for (int64_t i = 0; i < unit.lines; i += MOST_AT_ONCE) {
      const int64_t n = least(MOST_AT_ONCE, unit.lines - i);
      const Range seen = unit.seen(i, n, base);
      if (seen.empty()) continue;
      if (n == 4) some<4>(q, i, head, base, seen, keys, values);
      else if (n == 3) some<3>(q, i, head, base, seen, keys, values);
      else if (n == 2) some<2>(q, i, head, base, seen, keys, values);
      else some<1>(q, i, head, base, seen, keys, values);
      merge(into.from(i, wide), part, n, wide, wide);
    }
  }

 private:
  void place(int64_t head, int64_t base, int64_t tile, const T*& key, const T*& value) {
    const int64_t at = unit.cache_at(job, head, base + tile * KEY_TILE);
    if (job.kv_type == Type::f32 || job.kv_type == Type::bf16) {
      key = (const T*)job.keys + at;
      value = (const T*)job.values + at;
      return;
    }
    float* k = staged + tile * KEY_TILE * dim;
    float* v = k + PARTITION * dim;
    const int64_t scale_at = unit.scale_at(job, head, base + tile * KEY_TILE);
    for (int64_t i = 0; i < KEY_TILE; ++i) {
      widen((const uint8_t*)job.keys + at + i * dim, job.key_scales[scale_at + i], k + i * dim);
      widen((const uint8_t*)job.values + at + i * dim, job.value_scales[scale_at + i], v + i * dim);
    }
    key = (const T*)k;  // T is float for these types
    value = (const T*)v;
  }

  void widen(const uint8_t* from, float scale, float* to) const {
    if (job.kv_type == Type::s8)
      for (int64_t d = 0; d < dim; ++d) to[d] = float(int8_t(from[d])) * scale;
    else
      for (int64_t d = 0; d < dim; ++d) to[d] = fp8_value(from[d]) * scale;
  }

  template <int N>
  void some(const float* q, int64_t line, int64_t head, int64_t base, Range seen, const T* const* keys,
            const T* const* values) {
    for (int64_t k = seen.begin / W * W; k < seen.end; k += W) {
      F dots[N][W];
      for (int64_t w = 0; w < W; ++w) {
        const T* key = keys[(k + w) / KEY_TILE] + (k + w) % KEY_TILE * dim;
        F acc[N];
        for (int n = 0; n < N; ++n) acc[n] = zero();
        for (int64_t d = 0; d < dim; d += W) {
          const F x = dim - d >= W ? load(key + d) : load(key + d, first(dim - d));
          for (int n = 0; n < N; ++n) acc[n] = fma(load(q + (line + n) * wide + d), x, acc[n]);
        }
        for (int n = 0; n < N; ++n) dots[n][w] = acc[n];
      }
      for (int n = 0; n < N; ++n) store(scores + n * PARTITION + k, sums(dots[n]));
    }
    for (int n = 0; n < N; ++n) weigh(line + n, n, head, base, seen);
    add_values<N>(seen, values);
  }

  // Scores of line `line` to weights; its highest score and its sum of weights to slot n.
  void weigh(int64_t line, int n, int64_t head, int64_t base, Range all_seen) {
    const Range seen = unit.seen(line, 1, base);
    float* s = scores + n * PARTITION;
    part.highest[n] = LOWEST;
    part.weights[n] = 0.f;
    F top = all(LOWEST);
    const int64_t from = all_seen.begin / W * W;
    for (int64_t k = from; k < all_seen.end; k += W) {
      const F x = within(seen.begin - k, seen.end - k, bend(job, unit, load(s + k), line, head, base + k), all(LOWEST));
      store(s + k, x);
      top = max(top, x);
    }
    const float m = highest(top);
    if (seen.empty()) {
      for (int64_t k = from; k < all_seen.end; k += W) store(s + k, zero());
      return;
    }
    F total = zero();
    for (int64_t k = from; k < all_seen.end; k += W) {
      const F p = within(seen.begin - k, seen.end - k, exp2(sub(load(s + k), all(m))), zero());
      store(s + k, p);
      total = add(total, p);
    }
    part.highest[n] = m;
    part.weights[n] = sum(total);
  }

  template <int N>
  void add_values(Range seen, const T* const* values) {
    constexpr int D = 4;
    for (int64_t d = 0; d < wide; d += D * W) {
      F acc[N][D];
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < D; ++i) acc[n][i] = zero();
      const bool whole = d + D * W <= dim;
      for (int64_t k = seen.begin; k < seen.end; ++k) {
        const T* value = values[k / KEY_TILE] + k % KEY_TILE * dim + d;
        for (int i = 0; i < D; ++i) {
          const F x = whole ? load(value + i * W) : load(value + i * W, first(dim - d - i * W));
          for (int n = 0; n < N; ++n) acc[n][i] = fma(all(scores[n * PARTITION + k]), x, acc[n][i]);
        }
      }
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < D && d + i * W < wide; ++i) store(given + n * wide + d + i * W, acc[n][i]);
    }
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
