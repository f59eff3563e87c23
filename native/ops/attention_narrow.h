// Few lines against a partition, with AMX tiles: keys as they lie in the cache, values packed a step at a time.
// Bits are those of PairKernel's way for many lines. Included by attention_pairs.h.
#pragma once
#if defined(OCTAVO_LEVEL_AMX)

namespace octavo {
namespace OCTAVO_LEVEL {

// Lines are columns here: 4 of them where that is enough, or 16.
template <Type KV>
struct Narrow {
  static constexpr bool paired = true;
  static constexpr bool SCALED = KV != Type::bf16;
  static constexpr int64_t SIZE = SCALED ? 1 : 2;
  static constexpr int64_t SLICE = 64;  // features whose sums are in tiles at once
  const AttentionJob& job;
  const Unit& unit;
  int64_t dim, wide, steps, columns;
  bool as_they_lie;
  char* queries;  // [heads, steps, 16 pairs, columns] of pairs
  char* turned;   // [PARTITION, columns] scores
  char* packed;   // [2, SLICE / 16 panels, PANEL]: values of one step, and of the next
  char* scores;   // [lines, PARTITION] of float; weights in place, bf16
  char* staged;   // 4 times 16 keys [16, wide]
  State part;
  Scales<KV> scales;
  TileShapes for_scores, for_values;

  static int64_t scratch_floats(const AttentionJob& job) {
    const int64_t wide = round_up(job.head_dim, 32);
    return job.kv_heads * wide * 16 / 2 + 2 * PARTITION * 16 + 2 * SLICE / 16 * PANEL / 4 + 4 * 16 * wide / 2 +
           16 * (wide + 2);
  }

  Narrow(const AttentionJob& j, const Unit& u, float* scratch) : job(j), unit(u), dim(j.head_dim) {
    wide = round_up(dim, 32);
    steps = wide / STEP;
    columns = unit.lines <= 4 ? 4 : 16;
    as_they_lie = KV == Type::bf16 && dim == wide;
    queries = (char*)scratch;
    turned = queries + job.kv_heads * wide * 16 * 2;
    packed = turned + PARTITION * 16 * 4;
    scores = packed + 2 * SLICE / 16 * PANEL;
    staged = scores + PARTITION * 16 * 4;
    float* given = (float*)(staged + 4 * 16 * wide * 2);
    part = {given, given + 16 * wide, given + 16 * wide + 16};
    const int64_t pairs = wide / 2;
    for (int64_t h = unit.head_begin; h < unit.head_end; ++h) {
      uint32_t* to = (uint32_t*)queries + (h - unit.head_begin) * pairs * columns;
      std::memset(to, 0, size_t(pairs * columns * 4));
      for (int64_t i = 0; i < unit.lines; ++i) {
        const uint16_t* from = (const uint16_t*)job.query + unit.query_at(job, h, i);
        for (int64_t p = 0; p < dim / 2; ++p) std::memcpy(to + p * columns + i, from + 2 * p, 4);
      }
    }
    for (int t = 0; t < 4; ++t) for_scores.set(t, 16, columns * 4);
    for (int t = 4; t < 6; ++t) for_scores.set(t, 16, 64);
    for (int t = 6; t < 8; ++t) for_scores.set(t, 16, columns * 4);
    for (int t = 0; t < 5; ++t) for_values.set(t, unit.lines, 64);
    for (int t = 5; t < 8; ++t) for_values.set(t, 16, 64);
  }

  // `next`: the partition that is read after this one, brought nearer meanwhile; below 0: none.
  void run(int64_t head, int64_t partition, State into, int64_t next_head, int64_t next) {
    const int64_t base = partition * PARTITION;
    const Range all = unit.seen(0, unit.lines, base);
    if (all.empty()) return;
    scales.take(job, unit, head, base, all);
    score(head, base, all);
    const Range tiles{all.begin / STEP * 2, (all.end + STEP - 1) / STEP * 2};
    if (columns == 4) turn_4(tiles);
    else turn_16(tiles);
    Softmax softmax{job, unit, 0, unit.lines, head, base, all, {scores, 64, 64}, PARTITION * 4, part,
                    SCALED ? scales.keys : nullptr, SCALED ? scales.values : nullptr, {}};
    softmax.find_highest();
    for (int64_t i = 0; i < unit.lines; ++i) softmax.weigh(i);
    softmax.add_up();
    for_values.use();
    for (int64_t slice = 0; slice < wide; slice += SLICE) add_values(head, base, all, slice, next_head, next);
    merge(into, part, unit.lines, wide, wide);
  }

 private:
  void score(int64_t head, int64_t base, Range all) {
    const char* q = queries + (head - unit.head_begin) * wide / 2 * columns * 4;
    const int64_t q_step = 16 * columns * 4, columns_bytes = columns * 4;
    for_scores.use();
    const int64_t end = (all.end + 15) / 16, tile_bytes = 16 * columns_bytes;
    for (int64_t t = all.begin / 16; t < end; t += 4) {
      const int64_t n = least(4, end - t);
      const char *key[4], *value[4];
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = unit.cache_at(job, head, base + (t + i) * 16);
        value[i] = (const char*)job.values + at * SIZE;
        key[i] = (const char*)job.keys + at * SIZE;
        if (!as_they_lie) key[i] = stage(head, base + (t + i) * 16, i);
      }
      for (int64_t i = n; i < 4; ++i) {  // computed and not read
        key[i] = key[n - 1];
        value[i] = value[n - 1];
      }
      const int64_t stride = as_they_lie ? dim * 2 : wide * 2;
      fence();
      OCTAVO_TILE_ZERO(0);
      OCTAVO_TILE_ZERO(1);
      OCTAVO_TILE_ZERO(2);
      OCTAVO_TILE_ZERO(3);
      const int64_t part = 16 * dim * SIZE / steps;  // of 16 values, which are read next
      for (int64_t s = 0; s < steps; ++s) {
        OCTAVO_TILE_LOAD(6, q + s * q_step, columns_bytes);
        OCTAVO_TILE_LOAD(4, key[0] + s * 64, stride);
        OCTAVO_TILE_DOT(0, 4, 6);
        bring(value[0] + s * part, part);
        OCTAVO_TILE_LOAD(5, key[1] + s * 64, stride);
        OCTAVO_TILE_DOT(1, 5, 6);
        bring(value[1] + s * part, part);
        OCTAVO_TILE_LOAD(4, key[2] + s * 64, stride);
        OCTAVO_TILE_DOT(2, 4, 6);
        bring(value[2] + s * part, part);
        OCTAVO_TILE_LOAD(5, key[3] + s * 64, stride);
        OCTAVO_TILE_DOT(3, 5, 6);
        bring(value[3] + s * part, part);
      }
      char* to = turned + t * tile_bytes;
      OCTAVO_TILE_STORE(0, to, columns_bytes);
      if (n > 1) OCTAVO_TILE_STORE(1, to + tile_bytes, columns_bytes);
      if (n > 2) OCTAVO_TILE_STORE(2, to + 2 * tile_bytes, columns_bytes);
      if (n > 3) OCTAVO_TILE_STORE(3, to + 3 * tile_bytes, columns_bytes);
    }
  }

  // 16 keys as bf16, their rows filled up with zeros, in the given one of four places.
  const char* stage(int64_t head, int64_t position, int64_t place) {
    const int64_t at = unit.cache_at(job, head, position);
    const char* from = (const char*)job.keys + at * SIZE;
    char* to = staged + place * 16 * wide * 2;
    for (int64_t k = 0; k < 16; ++k)
      for (int64_t s = 0; s < steps; ++s)
        _mm512_store_si512(to + k * wide * 2 + s * 64,
                           row_of_32<KV>(from + (k * dim + s * STEP) * SIZE, features_of(dim, s)));
    return to;
  }

  // [16 keys, 4 lines] to [4 lines, 16 keys], for each tile.
  void turn_4(Range tiles) {
    const __m512i by_line = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      __m512i x[4];
      for (int i = 0; i < 4; ++i)
        x[i] = _mm512_permutexvar_epi32(by_line, _mm512_load_si512(turned + t * 256 + i * 64));
      const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
      const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
      char* to = scores + t * 64;
      _mm512_store_si512(to, _mm512_shuffle_i32x4(a, b, 0x88));
      _mm512_store_si512(to + PARTITION * 4, _mm512_shuffle_i32x4(a, b, 0xdd));
      _mm512_store_si512(to + PARTITION * 8, _mm512_shuffle_i32x4(c, d, 0x88));
      _mm512_store_si512(to + PARTITION * 12, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
  }

  void turn_16(Range tiles) {
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(turned + (t * 16 + i) * 64);
      turn(rows, scores + t * 64, PARTITION * 4);
    }
  }

  void add_values(int64_t head, int64_t base, Range all, int64_t slice, int64_t next_head, int64_t next) {
    const int64_t width = least(SLICE, wide - slice), panels = width / 16;
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    OCTAVO_TILE_ZERO(2);
    OCTAVO_TILE_ZERO(3);
    const int64_t last = (all.end + STEP - 1) / STEP;
    pack_step(head, base, all, slice, all.begin / STEP, next_head, next);
    for (int64_t s = all.begin / STEP; s < last; ++s) {
      // A step ahead: a tile's load waits until what was stored there has left the processor's store buffer.
      if (s + 1 < last) pack_step(head, base, all, slice, s + 1, next_head, next);
      const char* to = place_of(s);
      fence();
      OCTAVO_TILE_LOAD(4, scores + s * 64, PARTITION * 4);
      OCTAVO_TILE_LOAD(5, to, 64);
      OCTAVO_TILE_LOAD(6, to + PANEL, 64);
      OCTAVO_TILE_DOT(0, 4, 5);
      OCTAVO_TILE_DOT(1, 4, 6);
      if (panels > 2) {
        OCTAVO_TILE_LOAD(7, to + 2 * PANEL, 64);
        OCTAVO_TILE_LOAD(5, to + 3 * PANEL, 64);
        OCTAVO_TILE_DOT(2, 4, 7);
        OCTAVO_TILE_DOT(3, 4, 5);
      }
    }
    float* sums = part.sums + slice;
    OCTAVO_TILE_STORE(0, sums, wide * 4);
    OCTAVO_TILE_STORE(1, sums + 16, wide * 4);
    if (panels > 2) {
      OCTAVO_TILE_STORE(2, sums + 32, wide * 4);
      OCTAVO_TILE_STORE(3, sums + 48, wide * 4);
    }
  }

  char* place_of(int64_t step) const { return packed + step % 2 * (SLICE / 16) * PANEL; }

  // Values of a step; meanwhile keys of the same step of what is read next are brought nearer.
  void pack_step(int64_t head, int64_t base, Range all, int64_t slice, int64_t step, int64_t next_head, int64_t next) {
    const int64_t width = least(SLICE, wide - slice), position = next * PARTITION + step * STEP;
    if (next >= 0 && position + 16 < unit.ends[unit.lines - 1]) {
      const char* soon[2] = {(const char*)job.keys + unit.cache_at(job, next_head, position) * SIZE,
                             (const char*)job.keys + unit.cache_at(job, next_head, position + 16) * SIZE};
      pack_values<KV>(job, unit, head, base, all, step, slice, width, place_of(step), PANEL, soon);
    } else {
      pack_values<KV>(job, unit, head, base, all, step, slice, width, place_of(step), PANEL, nullptr);
    }
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
