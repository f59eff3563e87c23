// Products by AMX tiles: many rows at a time. Include after qlinear_few.h.
//
// Integer sums are exact, so these give the same bits as qlinear_few.h: the float steps are the same functions.
#pragma once
#if OCTAVO_LEVEL_AMX

namespace octavo {
namespace OCTAVO_LEVEL {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row of each tile
  uint8_t rows[16] = {};
  // Tiles 0..3 hold sums, 4 and 5 activations, 6 and 7 weights; `quads` inputs / 4 at once.
  explicit TileConfig(int quads) {
    for (int t = 0; t < 8; ++t) bytes[t] = 64, rows[t] = 16;
    bytes[4] = bytes[5] = uint16_t(4 * quads);
    rows[6] = rows[7] = uint8_t(quads);
  }
  void use() const {  // with the memory named, which GCC 12's intrinsic forgets
    asm volatile("" ::: "memory");
    asm volatile("ldtilecfg %0" ::"m"(*this));
  }
};

// ---- int8 by rows -----------------------------------------------------------------------------

constexpr int64_t INNER = 8, OUTER_CHUNKS = 32;  // chunks of 64 inputs: weights that stay in L1, activations in L2
constexpr int64_t ROWS_AT_ONCE = 512, PANELS_AT_ONCE = 32;

// Sums of 32 outputs and one or two blocks of 16 rows over `chunks` chunks of inputs, in memory from call to call.
template <bool TWO>
OCTAVO_INLINE void tile_sums(const uint8_t* weights, const int8_t* x, int64_t x_block, int64_t chunks, int32_t* sums,
                             bool starts) {
  if (starts) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if (TWO) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  for (int64_t c = 0; c < chunks; ++c, weights += 2048, x += ROWS * TILE_K) {
    _tile_loadd(4, x, TILE_K);
    _tile_loadd(6, weights, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, weights + 1024, 64);
    _tile_dpbsud(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, x + x_block, TILE_K);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (TWO) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

template <class T>
static void put_tiles(const int32_t* sums, const float* scales, const Activations& x, int64_t row, int64_t o,
                      const Results<T>& to) {
  const int64_t rows = x.rows - row < ROWS ? x.rows - row : ROWS;
  const F scale[2] = {load(scales + o), load(scales + o + 16)};
  const F bias[2] = {Results<T>::bias_of(to, o), Results<T>::bias_of(to, o + 16)};
  const Left columns[2] = {first(to.columns - o), first(to.columns - o - 16)};
  for (int64_t r = 0; r < rows; ++r) {
    const I offset = all_int(x.sum[row + r]);
    T* out = to.out + (row + r) * to.stride + o;
    for (int h = 0; h < 2; ++h) {
      const I whole = sub_int(_mm512_load_si512(sums + h * 256 + r * 16), offset);
      store(out + h * 16, scaled_by_row(whole, scale[h], x.scale[row + r], bias[h]), columns[h]);
    }
  }
}

// Panels `begin` .. `end` of one part times all rows.
template <class T>
static void tiles_int8(const QPart& part, int64_t begin, int64_t end, const Activations& x, const Results<T>& to,
                       Scratch& scratch) {
  const int64_t steps = blocks_of(x.chunks, OUTER_CHUNKS), at_once = steps > 1 ? PANELS_AT_ONCE : 1;
  const int64_t panel_size = x.chunks * 2048, x_block = x.chunks * ROWS * TILE_K;
  TileConfig(16).use();
  for (int64_t first_row = 0; first_row < x.rows; first_row += ROWS_AT_ONCE) {
    const int64_t rows = x.rows - first_row < ROWS_AT_ONCE ? x.rows - first_row : ROWS_AT_ONCE;
    const int64_t blocks = blocks_of(rows, ROWS);
    int32_t* sums = (int32_t*)scratch.room(size_t(at_once * blocks) * 2048);
    const int8_t* of_x = x.q + first_row / ROWS * x_block;
    for (int64_t group = begin; group < end; group += at_once)
      for (int64_t step = 0; step < steps; ++step)
        for (int64_t p = group; p < end && p < group + at_once; ++p) {
          const uint8_t* weights = (const uint8_t*)part.packed + p * panel_size;
          int32_t* mine = sums + (p - group) * blocks * 512;
          const int64_t last = (step + 1) * OUTER_CHUNKS < x.chunks ? (step + 1) * OUTER_CHUNKS : x.chunks;
          for (int64_t c = step * OUTER_CHUNKS; c < last; c += INNER) {
            const int64_t chunks = last - c < INNER ? last - c : INNER;
            for (int64_t b = 0; b < blocks; b += 2) {
              const int8_t* at = of_x + b * x_block + c * ROWS * TILE_K;
              // the weights of the next step, a share of them at each block of rows
              const int64_t share = blocks_of(chunks * 32, (blocks + 1) / 2) * 64;
              const uint8_t* next = weights + (c + chunks) * 2048 + b / 2 * share;
              for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i, 0, 2);
              if (b + 1 < blocks)
                tile_sums<true>(weights + c * 2048, at, x_block, chunks, mine + b * 512, c == 0);
              else
                tile_sums<false>(weights + c * 2048, at, x_block, chunks, mine + b * 512, c == 0);
              if (c + chunks == x.chunks)
                for (int64_t one = b; one < blocks && one < b + 2; ++one)
                  put_tiles(mine + one * 512, (const float*)part.scales, x, first_row + one * ROWS, p * PANEL, to);
            }
          }
        }
  }
  _tile_release();
}

// ---- in groups --------------------------------------------------------------------------------

// Half a panel ready for tiles: quads of bytes, and its scales as floats.
template <class Form>
struct Opened {
  static constexpr int64_t SPANS = GROUP / Form::SPAN;
  const uint8_t* weights;  // group g at weights + g * step
  int64_t step;
  float* scale;    // [groups * SPANS][16]
  float* minimum;  // [groups][16]

  static int64_t bytes(int64_t groups) { return groups * (512 + 64 * (SPANS + 1)); }
};

template <class Form>
static Opened<Form> open_half(const uint8_t* panel, int h, int64_t groups, char* room) {
  Opened<Form> to;
  uint8_t* bytes = (uint8_t*)room;
  to.scale = (float*)(room + groups * 512);
  to.minimum = to.scale + groups * Opened<Form>::SPANS * 16;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* group = Form::group(panel, g);
    const uint16_t* outer = Form::outer(panel, g);
    for (int s = 0; s < Opened<Form>::SPANS; ++s)
      store(to.scale + (g * Opened<Form>::SPANS + s) * 16, Form::scale(group, outer, s, h * 16));
    if (Form::MIN) store(to.minimum + g * 16, Form::minimum(group, outer, h * 16));
    if (Form::BITS == 4)
      for (int j = 0; j < 4; ++j) {
        const Q both = load_quads(group + h * Form::HALF + j * 64), zero_point = _mm512_set1_epi8(Form::ZERO);
        _mm512_store_si512(bytes + g * 512 + j * 64, _mm512_sub_epi8(low_nibbles(both), zero_point));
        _mm512_store_si512(bytes + g * 512 + 256 + j * 64, _mm512_sub_epi8(high_nibbles(both), zero_point));
      }
  }
  to.weights = Form::BITS == 4 ? bytes : Form::group(panel, 0) + h * Form::HALF;
  to.step = Form::BITS == 4 ? 512 : 0;
  return to;
}

// One block of 16 rows times 16 outputs.
template <class Form, class T>
static void tile_block(const Opened<Form>& half, const uint8_t* panel, int h, const Activations& x, int64_t row, int64_t o,
                       const Results<T>& to) {
  constexpr int SPANS = GROUP / Form::SPAN, BATCH = 4;
  alignas(64) int32_t sums[2][BATCH][256];
  F y[16];
  for (int r = 0; r < 16; ++r) y[r] = Results<T>::bias_of(to, o);
  const int64_t all_spans = x.groups * SPANS, numbers = row / ROWS * x.groups * ROWS;
  const int8_t* of_x = Activations::quads(x, row, 0);
  const int32_t* x_sum = SPANS == 1 ? x.sum + numbers : x.half_sum + 2 * numbers;
#define OCTAVO_SPAN(tile, a, b, i)                                                                                    \
  if (n + i < all_spans) {                                                                                            \
    const int64_t span = n + i, g = span / SPANS;                                                                     \
    const uint8_t* weights = Form::BITS == 4 ? half.weights + g * 512                                                 \
                                             : Form::group(panel, g) + h * Form::HALF + span % SPANS * (512 / SPANS); \
    _tile_loadd(a, of_x + (g >> 1) * (ROWS * TILE_K) + (g & 1) * GROUP + span % SPANS * 16, TILE_K);                  \
    _tile_loadd(b, weights, 64);                                                                                      \
    _tile_zero(tile);                                                                                                 \
    if (Form::BITS == 4)                                                                                              \
      _tile_dpbssd(tile, a, b);                                                                                       \
    else                                                                                                              \
      _tile_dpbsud(tile, a, b);                                                                                       \
    _tile_stored(tile, sums[buffer][i], 64);                                                                          \
  }
  int buffer = 0;
  for (int64_t n = 0; n < all_spans; n += BATCH, buffer ^= 1) {
    OCTAVO_SPAN(0, 4, 6, 0)
    OCTAVO_SPAN(1, 5, 7, 1)
    OCTAVO_SPAN(2, 4, 6, 2)
    OCTAVO_SPAN(3, 5, 7, 3)
    for (int i = 0; i < BATCH && n + i < all_spans; ++i) {
      const int64_t span = n + i, g = span / SPANS;
      const F scale = load(half.scale + span * 16);
      const float* x_scale = x.scale + numbers + g * ROWS;
      const int32_t* left = x_sum + span * ROWS;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        I sum = _mm512_load_si512(sums[buffer][i] + r * 16);
        // Unsigned: rows that x does not have hold anything here, and their results go nowhere.
        if (Form::BITS == 8 && Form::ZERO) sum = sub_int(sum, all_int(int32_t(uint32_t(Form::ZERO) * uint32_t(left[r]))));
        y[r] = add_scaled(y[r], sum, scale, x_scale[r]);
      }
      if (Form::MIN) {
        const F minimum = load(half.minimum + g * 16);
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) y[r] = fma(minimum, all(x.scaled_sum[numbers + g * ROWS + r]), y[r]);
      }
    }
  }
#undef OCTAVO_SPAN
  const int64_t rows = x.rows - row < ROWS ? x.rows - row : ROWS;
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r)
    if (r < rows) Results<T>::put(to, row + r, o, y[r]);
}

constexpr int64_t GROUPED_BYTES_AT_ONCE = 512 << 10;  // of activations, that stay in the second cache

// Panels `begin` .. `end` of one part times all rows.
template <class Form, class T>
static void tiles_grouped(const QPart& part, int64_t begin, int64_t end, const Activations& x, const Results<T>& to,
                          Scratch& scratch) {
  const int64_t size = Form::panel_bytes(x.k), one = Opened<Form>::bytes(x.groups);
  char* room = scratch.room(size_t(2 * one));
  int64_t at_once = GROUPED_BYTES_AT_ONCE / (x.chunks * TILE_K) / ROWS * ROWS;
  if (at_once < 4 * ROWS) at_once = 4 * ROWS;
  TileConfig(Form::SPAN / 4).use();
  for (int64_t first_row = 0; first_row < x.rows; first_row += at_once) {
    const int64_t last = x.rows - first_row < at_once ? x.rows : first_row + at_once;
    for (int64_t p = begin; p < end; ++p) {
      const uint8_t* panel = (const uint8_t*)part.packed + p * size;
      const Opened<Form> halves[2] = {open_half<Form>(panel, 0, x.groups, room),
                                      open_half<Form>(panel, 1, x.groups, room + one)};
      for (int64_t row = first_row; row < last; row += ROWS)
        for (int h = 0; h < 2; ++h) tile_block<Form, T>(halves[h], panel, h, x, row, p * PANEL + h * 16, to);
    }
  }
  _tile_release();
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
#endif
