// Operands of products of bf16 pairs, and the products: AVX-512 BF16, or AMX tiles where the level has them.
//
// Keys lie as rows of features in the cache; the products want them in panels: 16 columns, and for each pair of the
// inner dimension one value of each column, pairs side by side. Values are interleaved row with row, which is cheap, and
// leaves features in the order that `give` (attention_state.h) undoes.
// Included by attention_pairs.h.
#pragma once
#include "attention_unit.h"
#include "octavo/tiles.h"

#if defined(__AVX512BF16__)

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t STEP = 32;        // of the inner dimension in one product: 16 pairs
constexpr int64_t LINES = 32;       // computed together
constexpr int64_t PANEL = 16 * 64;  // bytes of 16 columns and one step

// Lanes of the 16 keys from `key` that lie in the range.
OCTAVO_INLINE __mmask16 lanes_in(Range seen, int64_t key) {
  return __mmask16(first(seen.end - key) & ~first(seen.begin - key));
}

// 32 elements as bf16, scales left out: every number of a code is one of bf16 too. Those out of `n` are zero. Codes of e4m3
// are normal numbers or zero (attention_write.h); what was never written gives numbers as well, never NaN.
template <Type KV>
OCTAVO_INLINE __m512i row_of_32(const char* p, __mmask32 n) {
  if (KV == Type::bf16) return _mm512_maskz_loadu_epi16(n, p);
  const __m256i bytes = _mm256_maskz_loadu_epi8(n, p);
  if (KV == Type::s8) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes));
    const __m512i high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
  }
  const __m512i x = _mm512_cvtepu8_epi16(bytes);
  const __mmask32 any = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7f));
  const __m512i size = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x7f0));
  const __m512i moved = _mm512_maskz_add_epi16(any, size, _mm512_set1_epi16((127 - 7) << 7));
  constexpr int OR_WHERE = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(moved, _mm512_slli_epi16(x, 8), _mm512_set1_epi16(int16_t(0x8000)), OR_WHERE);
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

// The features of a step that are there.
OCTAVO_INLINE __mmask32 features_of(int64_t dim, int64_t step) {
  const int64_t left = dim - step * STEP;
  return left >= STEP ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
}

// To the second cache. A few lines at a time among other work: in one burst they would hold it all up. `asm`, so that the
// compiler does not gather them.
OCTAVO_INLINE void bring(const char* from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) asm volatile("prefetcht1 (%0)" ::"r"(from + b));
}

// Values of keys 32 * step .. 32 * step + 31, features from `slice`, to panels. Those that `all` leaves out are zero, or
// the weights of those are: bf16 that was never written may be NaN. `soon`: two runs of 16 keys that are read next, brought
// nearer row by row meanwhile, or null.
template <Type KV>
OCTAVO_INLINE void pack_values(const AttentionJob& job, const Unit& unit, int64_t head, int64_t base, Range all,
                               int64_t step, int64_t slice, int64_t width, char* to, int64_t panel,
                               const char* const* soon) {
  constexpr int64_t SIZE = KV == Type::bf16 ? 2 : 1;
  const int64_t dim = job.head_dim;
  for (int64_t tile = step * STEP; tile < step * STEP + STEP; tile += 16, to += 8 * 64) {
    if (tile >= all.end || tile + 16 <= all.begin) {
      for (int64_t n = 0; n < width / 16; ++n)
        for (int64_t pair = 0; pair < 8; ++pair) _mm512_store_si512(to + n * panel + pair * 64, _mm512_setzero_si512());
      continue;
    }
    const char* from = (const char*)job.values + unit.cache_at(job, head, base + tile) * SIZE;
    const bool whole = KV != Type::bf16 || (tile >= all.begin && tile + 16 <= all.end);
    for (int64_t f = 0; f < width; f += STEP) {
      const __mmask32 n = features_of(dim, (slice + f) / STEP);
      char* at = to + f / 16 * panel;
      const char* row = from + (slice + f) * SIZE;
      if (whole && n == 0xffffffffu) {
#pragma GCC unroll 8
        for (int64_t pair = 0; pair < 8; ++pair, row += 2 * dim * SIZE) {
          if (soon) bring(soon[tile / 16 % 2] + ((slice + f) / STEP * 8 + pair) * 64 * SIZE, 64 * SIZE);
          const __m512i x = row_of_32<KV>(row, 0xffffffffu), y = row_of_32<KV>(row + dim * SIZE, 0xffffffffu);
          _mm512_store_si512(at + pair * 64, _mm512_unpacklo_epi16(x, y));
          _mm512_store_si512(at + panel + pair * 64, _mm512_unpackhi_epi16(x, y));
        }
        continue;
      }
      for (int64_t k = 0; k < 16; k += 2) {
        if (soon) bring(soon[tile / 16 % 2] + ((slice + f) / STEP * 8 + k / 2) * 64 * SIZE, 64 * SIZE);
        __m512i x[2];
        for (int64_t i = 0; i < 2; ++i) {
          const bool seen = whole || (tile + k + i >= all.begin && tile + k + i < all.end);
          x[i] = seen ? row_of_32<KV>(row + (k + i) * dim * SIZE, n) : _mm512_setzero_si512();
        }
        _mm512_store_si512(at + k / 2 * 64, _mm512_unpacklo_epi16(x[0], x[1]));
        _mm512_store_si512(at + panel + k / 2 * 64, _mm512_unpackhi_epi16(x[0], x[1]));
      }
    }
  }
}

// Scales of a partition's keys and values, side by side; 0 for those out of the range, so that nothing stale counts.
template <Type KV>
struct Scales {
  static constexpr int64_t COUNT = KV == Type::bf16 ? 0 : PARTITION;
  alignas(64) float keys[COUNT + 16], values[COUNT + 16];

  void take(const AttentionJob& job, const Unit& unit, int64_t head, int64_t base, Range all) {
    if (KV == Type::bf16) return;
    for (int64_t t = all.begin / STEP * STEP; t < all.end; t += 16) {
      const int64_t at = unit.scale_at(job, head, base + t);
      const __mmask16 n = lanes_in(all, t);
      _mm512_store_ps(keys + t, _mm512_maskz_loadu_ps(n, job.key_scales + at));
      _mm512_store_ps(values + t, _mm512_maskz_loadu_ps(n, job.value_scales + at));
    }
    if ((all.end - 1) % STEP < 16) {  // the step's second half
      const int64_t t = all.end / STEP * STEP + 16;
      _mm512_store_ps(keys + t, _mm512_setzero_ps());
      _mm512_store_ps(values + t, _mm512_setzero_ps());
    }
  }
};

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

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
