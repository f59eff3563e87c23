// Partitions with products of bf16 pairs. What all lines of a unit share is packed once (attention_panels.h).
//
// With tiles, few lines take keys as they lie (attention_narrow.h): S^T = K Q^T gives the bits of S = Q K^T, since every
// product and sum of it is the same.
// Included by attention.cpp.
#pragma once
#include "attention_panels.h"
#include "attention_softmax.h"

#if defined(__AVX512BF16__)

#include "attention_narrow.h"

namespace octavo {
namespace OCTAVO_LEVEL {

template <Type KV>
struct PairKernel {
  static constexpr bool paired = true;
#if defined(OCTAVO_LEVEL_AMX)
  static constexpr int64_t FEW = 16;
  using ForFew = Narrow<KV>;
#else
  static constexpr int64_t FEW = 0;
  using ForFew = PairKernel;
#endif
  static constexpr bool SCALED = KV != Type::bf16;
  static constexpr int64_t SIZE = SCALED ? 1 : 2;
  static constexpr int64_t VALUE_PANEL = PARTITION / STEP * PANEL + 64;  // bytes; a power of two would crowd the cache
  const AttentionJob& job;
  const Unit& unit;
  int64_t dim, wide, steps, tiles;  // steps of features, tiles of LINES
  char* queries;  // [heads, tiles, steps, LINES, 64 bytes]
  char* keys;     // [16 panels, steps, PANEL]
  char* values;   // [wide / 16 panels, VALUE_PANEL]
  char* scores;   // [PARTITION / 16, LINES, 64 bytes], weights in place: [PARTITION / 32, 2 * LINES, 64 bytes]
  State part;
  Scales<KV> scales;

  static int64_t scratch_floats(const AttentionJob& job) {
    const int64_t wide = round_up(job.head_dim, 32), steps = wide / STEP;
    return (job.most_lines * wide * 2 + PARTITION / 16 * steps * PANEL + wide / 16 * VALUE_PANEL) / 4 +
           PARTITION * LINES + LINES * (wide + 2);
  }

  PairKernel(const AttentionJob& j, const Unit& u, float* scratch) : job(j), unit(u), dim(j.head_dim) {
    wide = round_up(dim, 32);
    steps = wide / STEP;
    tiles = (unit.lines + LINES - 1) / LINES;
    queries = (char*)scratch;
    keys = queries + job.most_lines * wide * 2;
    values = keys + PARTITION / 16 * steps * PANEL;
    scores = values + wide / 16 * VALUE_PANEL;
    float* given = (float*)(scores + PARTITION * LINES * 4);
    part = {given, given + LINES * wide, given + LINES * wide + LINES};
    for (int64_t h = unit.head_begin; h < unit.head_end; ++h)
      for (int64_t i = 0; i < unit.lines; ++i) {
        char* to = query_tile(h, i / LINES) + i % LINES * 64;
        const bf16* from = (const bf16*)job.query + unit.query_at(job, h, i);
        for (int64_t s = 0; s < steps; ++s)
          _mm512_store_si512(to + s * LINES * 64, _mm512_maskz_loadu_epi16(features(s), from + s * STEP));
      }
#if defined(OCTAVO_LEVEL_AMX)
    whole_tiles();
#endif
  }

  // The lines' states of one partition, merged into `into`.
  void run(int64_t head, int64_t partition, State into, int64_t, int64_t) {
    const int64_t base = partition * PARTITION;
    const Range all = unit.seen(0, unit.lines, base);
    if (all.empty()) return;
    pack(head, base, all);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t line = t * LINES, n = least(LINES, unit.lines - line);
      const Range seen = unit.seen(line, n, base);
      if (seen.empty()) continue;
      const int64_t first_tile = seen.begin / STEP * 2, last_tile = (seen.end + STEP - 1) / STEP * 2;
      char* s = scores + first_tile * LINES * 64;
      multiply({query_tile(head, t), LINES * 64, keys + first_tile * steps * PANEL, steps * PANEL, last_tile - first_tile,
                steps, (float*)s, LINES * 16, 16}, n);
      for (int64_t i = 0; i < n; i += 16) {
        Softmax some{job, unit, line + i, least(16, n - i), head, base, seen, {scores + i * 64, LINES * 64, 2 * LINES * 64},
                     64, part.from(i, wide), SCALED ? scales.keys : nullptr, SCALED ? scales.values : nullptr, {}};
        some.find_highest();
        for (int64_t each = 0; each < some.count; ++each) some.weigh(each);
        some.add_up();
      }
      multiply({s, 2 * LINES * 64, values + first_tile / 2 * PANEL, VALUE_PANEL, wide / 16, (last_tile - first_tile) / 2,
                part.sums, 16, wide}, n);
      merge(into.from(line, wide), part, n, wide, wide);
    }
  }

 private:
  char* query_tile(int64_t head, int64_t tile) const {
    return queries + ((head - unit.head_begin) * tiles + tile) * steps * LINES * 64;
  }
  __mmask32 features(int64_t step) const { return features_of(dim, step); }

  // Keys and values that `all` spans, to panels. Steps are whole: values out of the range count as zero.
  void pack(int64_t head, int64_t base, Range all) {
    scales.take(job, unit, head, base, all);
    for (int64_t t = all.begin / 16; t * 16 < all.end; ++t) {
      const int64_t at = unit.cache_at(job, head, base + t * 16);
      const char* from = (const char*)job.keys + at * SIZE;
      for (int64_t s = 0; s < steps; ++s) {
        __m512i rows[16];
        const __mmask32 n = features(s);
        if (n == 0xffffffffu)
          for (int64_t k = 0; k < 16; ++k) rows[k] = row_of_32<KV>(from + (k * dim + s * STEP) * SIZE, 0xffffffffu);
        else
          for (int64_t k = 0; k < 16; ++k) rows[k] = row_of_32<KV>(from + (k * dim + s * STEP) * SIZE, n);
        turn(rows, keys + (t * steps + s) * PANEL);
      }
    }
    for (int64_t s = all.begin / STEP; s * STEP < all.end; ++s)
      pack_values<KV>(job, unit, head, base, all, s, 0, wide, values + s * PANEL, VALUE_PANEL, nullptr);
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
