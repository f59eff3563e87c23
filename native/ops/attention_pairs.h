// Partitions with products of bf16 pairs: AVX-512 BF16, or AMX tiles where the level has them.
//
// Keys lie as rows of features in the cache; the products want them in panels: 16 columns, and for each pair of the
// inner dimension one value of each column, pairs side by side. Values are interleaved row with row, which is cheap, and
// leaves features in the order that `give` (attention_state.h) undoes. What all lines of a unit share is packed once.
// With tiles, few lines take keys as they lie: S^T = K Q^T gives the bits of S = Q K^T, since every product and sum of
// it is the same (octavo/attention.h).
// Included by attention.cpp.
#pragma once
#include "attention_unit.h"
#include "octavo/tiles.h"

#if defined(__AVX512BF16__)

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t STEP = 32;        // of the inner dimension in one product: 16 pairs
constexpr int64_t LINES = 32;       // computed together
constexpr int64_t PANEL = 16 * 64;  // bytes of 16 columns and one step

// 32 elements as bf16; those out of `n` are zero.
template <Type KV>
OCTAVO_INLINE __m512i row_of_32(const char* p, __mmask32 n, float scale) {
  if (KV == Type::bf16) return _mm512_maskz_loadu_epi16(n, p);
  const __m256i bytes = _mm256_maskz_loadu_epi8(n, p);
  __m512 low, high;
  if (KV == Type::s8) {
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  } else {  // e4m3 is half precision with another bias
    const __m512i w = _mm512_cvtepu8_epi16(bytes);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x80)), 8);
    const __m512i half = _mm512_or_si512(sign, _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x7f)), 7));
    low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    scale *= 256.f;
  }
  const __m512 by = _mm512_set1_ps(scale);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, by), _mm512_mul_ps(low, by));
}

// 16 rows of 16 dwords to 16 columns.
OCTAVO_INLINE void turn(const __m512i* r, char* out, int64_t stride = 64) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i x0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), x1 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const __m512i y0 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
    const __m512i y1 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    _mm512_store_si512(out + c * stride, _mm512_shuffle_i32x4(x0, y0, 0x88));
    _mm512_store_si512(out + (4 + c) * stride, _mm512_shuffle_i32x4(x1, y1, 0x88));
    _mm512_store_si512(out + (8 + c) * stride, _mm512_shuffle_i32x4(x0, y0, 0xdd));
    _mm512_store_si512(out + (12 + c) * stride, _mm512_shuffle_i32x4(x1, y1, 0xdd));
  }
}

// c[line][column] = sum over steps of a[line] b[column]. `a`: rows of 64 bytes a step; `b`: panels of a step's pairs.
struct Product {
  const char* a;
  int64_t a_step;  // bytes
  const char* b;
  int64_t b_panel;  // bytes
  int64_t panels, steps;
  float* c;
  int64_t c_panel, c_line;  // floats
};

#if defined(OCTAVO_LEVEL_AMX)

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {0};
  uint16_t row_bytes[16] = {0};
  uint8_t rows[16] = {0};
  void set(int tile, int64_t height, int64_t bytes) {
    rows[tile] = uint8_t(height);
    row_bytes[tile] = uint16_t(bytes);
  }
  void use() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

OCTAVO_INLINE void whole_tiles() {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.set(t, 16, 64);
  shapes.use();
}

// 16 or 32 lines; a multiple of 2 panels.
static void multiply(const Product& p, int64_t lines) {
  const int64_t c_bytes = p.c_line * 4;
  fence();
  if (lines > 16) {
    for (int64_t n = 0; n < p.panels; n += 2) {
      OCTAVO_TILE_ZERO(0);
      OCTAVO_TILE_ZERO(1);
      OCTAVO_TILE_ZERO(2);
      OCTAVO_TILE_ZERO(3);
      const char *a = p.a, *b = p.b + n * p.b_panel;
      for (int64_t s = 0; s < p.steps; ++s, a += p.a_step, b += PANEL) {
        OCTAVO_TILE_LOAD(4, a, 64);
        OCTAVO_TILE_LOAD(6, b, 64);
        OCTAVO_TILE_LOAD(5, a + 1024, 64);
        OCTAVO_TILE_LOAD(7, b + p.b_panel, 64);
        OCTAVO_TILE_DOT(0, 4, 6);
        OCTAVO_TILE_DOT(1, 4, 7);
        OCTAVO_TILE_DOT(2, 5, 6);
        OCTAVO_TILE_DOT(3, 5, 7);
      }
      float* c = p.c + n * p.c_panel;
      OCTAVO_TILE_STORE(0, c, c_bytes);
      OCTAVO_TILE_STORE(1, c + p.c_panel, c_bytes);
      OCTAVO_TILE_STORE(2, c + 16 * p.c_line, c_bytes);
      OCTAVO_TILE_STORE(3, c + 16 * p.c_line + p.c_panel, c_bytes);
    }
    return;
  }
  for (int64_t n = 0; n < p.panels; n += 2) {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    const char *a = p.a, *b = p.b + n * p.b_panel;
    for (int64_t s = 0; s < p.steps; ++s, a += p.a_step, b += PANEL) {
      OCTAVO_TILE_LOAD(4, a, 64);
      OCTAVO_TILE_LOAD(6, b, 64);
      OCTAVO_TILE_LOAD(7, b + p.b_panel, 64);
      OCTAVO_TILE_DOT(0, 4, 6);
      OCTAVO_TILE_DOT(1, 4, 7);
    }
    float* c = p.c + n * p.c_panel;
    OCTAVO_TILE_STORE(0, c, c_bytes);
    OCTAVO_TILE_STORE(1, c + p.c_panel, c_bytes);
  }
}

#else

template <int N>
OCTAVO_INLINE void multiply_some(const Product& p, int64_t line) {
  for (int64_t n = 0; n < p.panels; n += 2) {
    __m512 acc[N][2];
    for (int i = 0; i < N; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    const char *a = p.a + line * 64, *b = p.b + n * p.b_panel;
    for (int64_t s = 0; s < p.steps; ++s, a += p.a_step)
      for (int64_t pair = 0; pair < 16; ++pair, b += 64) {
        const __m512bh b0 = (__m512bh)_mm512_load_si512(b), b1 = (__m512bh)_mm512_load_si512(b + p.b_panel);
        for (int i = 0; i < N; ++i) {
          int32_t two;
          std::memcpy(&two, a + i * 64 + pair * 4, 4);
          const __m512bh x = (__m512bh)_mm512_set1_epi32(two);
          acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
          acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
      }
    for (int i = 0; i < N; ++i) {
      float* c = p.c + n * p.c_panel + (line + i) * p.c_line;
      _mm512_storeu_ps(c, acc[i][0]);
      _mm512_storeu_ps(c + p.c_panel, acc[i][1]);
    }
  }
}

static void multiply(const Product& p, int64_t lines) {
  int64_t i = 0;
  for (; i + 8 <= lines; i += 8) multiply_some<8>(p, i);
  for (; i + 4 <= lines; i += 4) multiply_some<4>(p, i);
  for (; i + 2 <= lines; i += 2) multiply_some<2>(p, i);
  for (; i < lines; ++i) multiply_some<1>(p, i);
}

#endif

// Lanes of the 16 keys from `key` that lie in the range.
OCTAVO_INLINE __mmask16 lanes_in(Range seen, int64_t key) {
  return __mmask16(first(seen.end - key) & ~first(seen.begin - key));
}

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

// Products to what the softmax is over, where that is more than a factor.
OCTAVO_INLINE void bend_all(const AttentionJob& job, const Unit& unit, Scores s, Range seen, int64_t line, int64_t head,
                             int64_t base) {
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

// Products to weights, rounded to bf16: exp2(factor * product - highest). Steps of `all` that the line does not see get
// zeros. Returns sums of the weights side by side.
OCTAVO_INLINE __m512 weights_of(Scores s, Range seen, Range all, float factor, float highest) {
  const int64_t first_step = all.begin / STEP, last_step = (all.end + STEP - 1) / STEP;
  const int64_t inner_begin = seen.empty() ? last_step : (seen.begin + STEP - 1) / STEP;
  const int64_t inner_end = seen.empty() ? last_step : seen.end / STEP;
  const __m512 by = _mm512_set1_ps(factor), less = _mm512_set1_ps(-highest);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  const auto edge = [&](int64_t step) {
    __m512 x[2];
    for (int64_t i = 0; i < 2; ++i) {
      const __mmask16 n = lanes_in(seen, step * STEP + i * 16);
      x[i] = _mm512_maskz_loadu_ps(n, s.at + (2 * step + i) * s.tile_bytes);
      x[i] = _mm512_maskz_mov_ps(n, rough_exp2(_mm512_maskz_fmadd_ps(n, x[i], by, less)));
    }
    const __m512bh p = _mm512_cvtne2ps_pbh(x[1], x[0]);
    sum = _mm512_dpbf16_ps(sum, p, ones);
    _mm512_store_si512(s.at + step * s.step_bytes, (__m512i)p);
  };
  int64_t t = first_step;
  for (; t < last_step && t < inner_begin; ++t) edge(t);
  const char* from = s.at + 2 * t * s.tile_bytes;
  char* to = s.at + t * s.step_bytes;
  for (; t < inner_end; ++t, from += 2 * s.tile_bytes, to += s.step_bytes) {
    const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(from), by, less);
    const __m512 y = _mm512_fmadd_ps(_mm512_load_ps(from + s.tile_bytes), by, less);
    const __m512bh p = _mm512_cvtne2ps_pbh(rough_exp2(y), rough_exp2(x));
    sum = _mm512_dpbf16_ps(sum, p, ones);
    _mm512_store_si512(to, (__m512i)p);
  }
  for (; t < last_step; ++t) edge(t);
  return sum;
}

// Lane i: the highest lane of v[i].
OCTAVO_INLINE F tops(const F* v) {
  F u[4];
  for (int j = 0; j < 4; ++j) {
    const F* x = v + 4 * j;
    const F a = max(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const F b = max(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    u[j] = max(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const F a = max(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const F b = max(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return max(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
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
  alignas(64) __m512 many[16];

  Scores of(int64_t i) const { return {scores.at + i * line_bytes, scores.tile_bytes, scores.step_bytes}; }
  float factor() const { return bends(job) ? 1.f : job.scale * LOG2_E; }
  void find_highest() {
    for (int64_t i = 0; i < count; ++i) {
      const Range seen = unit.seen(line + i, 1, base);
      bend_all(job, unit, of(i), seen, line + i, head, base);
      many[i] = highest_of(of(i), seen);
    }
    for (int64_t i = count; i < 16; ++i) many[i] = _mm512_setzero_ps();
    // Nothing seen: lowest, whatever the factor.
    const __m512 top = tops(many), scaled = _mm512_mul_ps(top, _mm512_set1_ps(factor()));
    const __mmask16 none = _mm512_cmp_ps_mask(top, _mm512_set1_ps(LOWEST), _CMP_EQ_OQ);
    _mm512_storeu_ps(part.highest, _mm512_mask_mov_ps(scaled, none, _mm512_set1_ps(LOWEST)));
  }
  inline void weigh(int64_t i) {
    many[i] = weights_of(of(i), unit.seen(line + i, 1, base), all, factor(), part.highest[i]);
  }
  void add_up() {
    for (int64_t i = count; i < 16; ++i) many[i] = _mm512_setzero_ps();
    _mm512_storeu_ps(part.weights, sums(many));
  }
};

// The features of a step that are there.
OCTAVO_INLINE __mmask32 features_of(int64_t dim, int64_t step) {
  const int64_t left = dim - step * STEP;
  return left >= STEP ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
}

// Values of keys 32 * step .. 32 * step + 31, features from `slice`, to panels; those that `all` leaves out are zero.
template <Type KV>
OCTAVO_INLINE void pack_values(const AttentionJob& job, const Unit& unit, int64_t head, int64_t base, Range all,
                               int64_t step, int64_t slice, int64_t width, char* to, int64_t panel) {
  constexpr int64_t SIZE = KV == Type::bf16 ? 2 : 1;
  const int64_t dim = job.head_dim;
  for (int64_t tile = step * STEP; tile < step * STEP + STEP; tile += 16, to += 8 * 64) {
    if (tile >= all.end || tile + 16 <= all.begin) {
      for (int64_t n = 0; n < width / 16; ++n)
        for (int64_t pair = 0; pair < 8; ++pair) _mm512_store_si512(to + n * panel + pair * 64, _mm512_setzero_si512());
      continue;
    }
    const char* from = (const char*)job.values + unit.cache_at(job, head, base + tile) * SIZE;
    const float* scales = KV == Type::bf16 ? nullptr : job.value_scales + unit.scale_at(job, head, base + tile);
    const bool whole = tile >= all.begin && tile + 16 <= all.end;
    for (int64_t f = 0; f < width; f += STEP) {
      const __mmask32 n = features_of(dim, (slice + f) / STEP);
      char* at = to + f / 16 * panel;
      const char* row = from + (slice + f) * SIZE;
      if (KV == Type::bf16 && whole && n == 0xffffffffu) {
#pragma GCC unroll 8
        for (int64_t pair = 0; pair < 8; ++pair, row += 2 * dim * SIZE) {
          const __m512i x = _mm512_loadu_si512(row), y = _mm512_loadu_si512(row + dim * SIZE);
          _mm512_store_si512(at + pair * 64, _mm512_unpacklo_epi16(x, y));
          _mm512_store_si512(at + panel + pair * 64, _mm512_unpackhi_epi16(x, y));
        }
        continue;
      }
      for (int64_t k = 0; k < 16; k += 2) {
        __m512i x[2];
        for (int64_t i = 0; i < 2; ++i) {
          const bool seen = tile + k + i >= all.begin && tile + k + i < all.end;
          x[i] = seen ? row_of_32<KV>(row + (k + i) * dim * SIZE, n, scales ? scales[k + i] : 1.f) : _mm512_setzero_si512();
        }
        _mm512_store_si512(at + k / 2 * 64, _mm512_unpacklo_epi16(x[0], x[1]));
        _mm512_store_si512(at + panel + k / 2 * 64, _mm512_unpackhi_epi16(x[0], x[1]));
      }
    }
  }
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

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
  static constexpr int64_t SIZE = KV == Type::bf16 ? 2 : 1;
  static constexpr int64_t VALUE_PANEL = PARTITION / STEP * PANEL + 64;  // bytes; a power of two would crowd the cache
  const AttentionJob& job;
  const Unit& unit;
  int64_t dim, wide, steps, tiles;  // steps of features, tiles of LINES
  char* queries;  // [heads, tiles, steps, LINES, 64 bytes]
  char* keys;     // [16 panels, steps, PANEL]
  char* values;   // [wide / 16 panels, VALUE_PANEL]
  char* scores;   // [PARTITION / 16, LINES, 64 bytes], weights in place: [PARTITION / 32, 2 * LINES, 64 bytes]
  State part;

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
                     64, part.from(i, wide), {}};
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
    for (int64_t t = all.begin / 16; t * 16 < all.end; ++t) {
      const int64_t at = unit.cache_at(job, head, base + t * 16);
      const float* scales = KV == Type::bf16 ? nullptr : job.key_scales + unit.scale_at(job, head, base + t * 16);
      const char* from = (const char*)job.keys + at * SIZE;
      for (int64_t s = 0; s < steps; ++s) {
        __m512i rows[16];
        const __mmask32 n = features(s);
        if (KV == Type::bf16 && n == 0xffffffffu)
          for (int64_t k = 0; k < 16; ++k) rows[k] = _mm512_loadu_si512(from + (k * dim + s * STEP) * SIZE);
        else
          for (int64_t k = 0; k < 16; ++k)
            rows[k] = row_of_32<KV>(from + (k * dim + s * STEP) * SIZE, n, scales ? scales[k] : 1.f);
        turn(rows, keys + (t * steps + s) * PANEL);
      }
    }
    for (int64_t s = all.begin / STEP; s * STEP < all.end; ++s)
      pack_values<KV>(job, unit, head, base, all, s, 0, wide, values + s * PANEL, VALUE_PANEL);
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
