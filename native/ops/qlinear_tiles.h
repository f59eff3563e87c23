// Products by AMX tiles: many rows at a time. Include after qlinear_few.h.
//
// Integer sums are exact, so these give the same bits as qlinear_few.h: the float steps are the same functions.
#pragma once
#include "octavo/tiles.h"

#if OCTAVO_LEVEL_AMX

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t BLOCK = 2 * ROWS;  // rows of x multiplied together: two tiles

// Tiles 0..3 hold sums, 4 and 5 activations, 6 and 7 weights; `quads` inputs / 4 at once.
static void shape_for(int quads) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row of each tile
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  shape.bytes[4] = shape.bytes[5] = uint16_t(4 * quads);
  shape.rows[6] = shape.rows[7] = uint8_t(quads);
  asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}

// ---- int8 by rows -----------------------------------------------------------------------------

constexpr int64_t NEAR_CHUNKS = 18;  // of a panel, that stay in the first cache: of more inputs, the sums wait in memory
// With more inputs than these the sums wait while so many panels take a share of the inputs.
constexpr int64_t MOST_CHUNKS = 64, PANELS_AT_ONCE = 32;

// Chunks of inputs that are summed in one go.
static int64_t chunks_in_step(const Activations& x) { return blocks_of(x.chunks, blocks_of(x.chunks, NEAR_CHUNKS)); }

// Sums of one block, until they are scaled, rounded and written: among the products of the next block, when they have
// long reached the cache.
struct BlockSums {
  alignas(64) int32_t of[4 * 256];  // [16 rows][half][16 rows of 16]
  int64_t row = 0, rows = 0, o = 0;
};

template <class T>
static void write_sums(const BlockSums& from, const float* scales, const Activations& x, const Results<T>& to) {
  if (!from.rows) return;
  const F scale[2] = {load(scales + from.o), load(scales + from.o + 16)};
  const F bias[2] = {Results<T>::bias_of(to, from.o), Results<T>::bias_of(to, from.o + 16)};
  const Left columns[2] = {first(to.columns - from.o), first(to.columns - from.o - 16)};
  T* out = to.out + from.row * to.stride + from.o;
  for (int64_t r = 0; r < from.rows; ++r, out += to.stride) {
    const I offset = all_int(x.sum[from.row + r]);
    const float of_x = x.scale[from.row + r];
    const int32_t* sums = from.of + (r / ROWS) * 512 + r % ROWS * 16;
    for (int h = 0; h < 2; ++h)
      store(out + h * 16, scaled_by_row(sub_int(_mm512_load_si512(sums + h * 256), offset), scale[h], of_x, bias[h]), columns[h]);
  }
}

struct Int8Piece {
  const uint8_t *weights, *ahead;  // ahead: what later blocks will read
  const int8_t* x;
  int64_t x_block, lines;  // bytes from 16 rows to the next 16; cache lines to ask for at each step
};

// KEEPS: the panel is wanted again from the first cache.
template <bool TWO, bool KEEPS>
OCTAVO_INLINE void int8_steps(Int8Piece& piece, int64_t chunks) {
  Int8Piece p = piece;
  for (int64_t c = 0; c < chunks; ++c, p.weights += 2048, p.x += ROWS * TILE_K) {
    if (KEEPS) {
      OCTAVO_TILE_LOAD(6, p.weights, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.x, TILE_K);
      OCTAVO_TILE_LOAD(7, p.weights + 1024, 64);
    } else {
      OCTAVO_TILE_LOAD_ONCE(6, p.weights, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.x, TILE_K);
      OCTAVO_TILE_LOAD_ONCE(7, p.weights + 1024, 64);
    }
    OCTAVO_TILE_DOT_S8U8(0, 4, 6);
    OCTAVO_TILE_DOT_S8U8(1, 4, 7);
    if (TWO) {
      OCTAVO_TILE_LOAD_ONCE(5, p.x + p.x_block, TILE_K);
      OCTAVO_TILE_DOT_S8U8(2, 5, 6);
      OCTAVO_TILE_DOT_S8U8(3, 5, 7);
    }
    for (int64_t i = 0; i < p.lines; ++i) __builtin_prefetch(p.ahead + i * 64, 0, 2);
    p.ahead += p.lines * 64;
  }
  piece = p;
}

// Sums of one block over `chunks` chunks of inputs, on from those at `from` or from nothing, and `write` called among them.
template <bool TWO, bool KEEPS, class Write>
static void int8_block(Int8Piece p, int64_t chunks, const int32_t* from, int32_t* sums, const Write& write) {
  fence();
  if (!from) {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    if (TWO) {
      OCTAVO_TILE_ZERO(2);
      OCTAVO_TILE_ZERO(3);
    }
  } else {
    OCTAVO_TILE_LOAD(0, from, 64);
    OCTAVO_TILE_LOAD(1, from + 256, 64);
    if (TWO) {
      OCTAVO_TILE_LOAD(2, from + 512, 64);
      OCTAVO_TILE_LOAD(3, from + 768, 64);
    }
  }
  const int64_t begin = chunks < 3 ? chunks : 3;
  int8_steps<TWO, KEEPS>(p, begin);
  write();
  int8_steps<TWO, KEEPS>(p, chunks - begin);
  OCTAVO_TILE_STORE(0, sums, 64);
  OCTAVO_TILE_STORE(1, sums + 256, 64);
  if (TWO) {
    OCTAVO_TILE_STORE(2, sums + 512, 64);
    OCTAVO_TILE_STORE(3, sums + 768, 64);
  }
}

// Panels `begin` .. `end` of one part times rows `first_row` .. `last_row`.
template <class T>
static void tiles_int8(const QPart& part, int64_t begin, int64_t end, const Activations& x, int64_t first_row,
                       int64_t last_row, const Results<T>& to, Scratch& scratch) {
  const int64_t step = chunks_in_step(x), at_once = x.chunks <= MOST_CHUNKS ? 1 : PANELS_AT_ONCE;
  const int64_t panel_size = x.chunks * 2048, x_block = x.chunks * ROWS * TILE_K;
  const float* scales = (const float*)part.scales;
  BlockSums sums[2];
  int turn = 0;
  shape_for(16);
  const int64_t rows = last_row - first_row, blocks = blocks_of(rows, BLOCK);
  int32_t* waiting = step == x.chunks ? nullptr : (int32_t*)scratch.room(size_t(at_once * blocks) * sizeof(sums[0].of));
  const int8_t* of_x = x.q + first_row / ROWS * x_block;
  for (int64_t group = begin; group < end; group += at_once)
    for (int64_t c = 0; c < x.chunks; c += step)
      for (int64_t p = group; p < end && p < group + at_once; ++p) {
        const int64_t chunks = x.chunks - c < step ? x.chunks - c : step;
        const bool last = c + chunks == x.chunks;
        const uint8_t* weights = (const uint8_t*)part.packed + p * panel_size + c * 2048;
        // the same step of the next panel, a share of it with each block
        const int64_t lines = p + 1 < end ? blocks_of(32, blocks) : 0;
        for (int64_t b = 0; b < blocks; ++b) {
          BlockSums &now = sums[turn], &before = sums[turn ^ 1];
          int32_t* wait = waiting ? waiting + ((p - group) * blocks + b) * 1024 : nullptr;
          int32_t* mine = last ? now.of : wait;
          const int32_t* so_far = c ? wait : nullptr;
          const Int8Piece piece{weights, weights + panel_size + b * lines * 64 * chunks,
                                of_x + b * 2 * x_block + c * ROWS * TILE_K, x_block, lines};
          const auto write = [&] {
            write_sums(before, scales, x, to);
            before.rows = 0;
          };
          const bool keeps = blocks > 1 && chunks <= NEAR_CHUNKS, two = rows - b * BLOCK > ROWS;
          if (two)
            keeps ? int8_block<true, true>(piece, chunks, so_far, mine, write)
                  : int8_block<true, false>(piece, chunks, so_far, mine, write);
          else
            keeps ? int8_block<false, true>(piece, chunks, so_far, mine, write)
                  : int8_block<false, false>(piece, chunks, so_far, mine, write);
          if (!last) continue;
          now.row = first_row + b * BLOCK;
          now.rows = rows - b * BLOCK < BLOCK ? rows - b * BLOCK : BLOCK;
          now.o = p * PANEL;
          turn ^= 1;
        }
      }
  fence();
  write_sums(sums[turn ^ 1], scales, x, to);
  release_tiles();
}

// ---- in groups --------------------------------------------------------------------------------
//
// A span (a group, or half of one) is one product of tiles that ends in a float step for each sum, which takes as long as
// the product and its way through memory. So the products run some spans ahead of the float steps, on into the next
// block, and the results of a block stay in registers.

// A panel ready for tiles: bytes instead of nibbles, signed ones where it has a zero point, and its scales as floats.
template <class Form>
struct Opened {
  static constexpr int64_t SPANS = GROUP / Form::SPAN, SPAN_BYTES = PANEL * Form::SPAN;
  uint8_t* weights;  // [spans][half][quads][16][4]
  float* scale;      // [spans][32]
  float* minimum;    // [groups][32]

  static int64_t bytes(int64_t groups) { return groups * (PANEL * GROUP + PANEL * 4 * (SPANS + (Form::MIN ? 1 : 0))); }
};

template <class Form>
static Opened<Form> open_panel(const uint8_t* panel, int64_t groups, char* room) {
  constexpr int64_t SPANS = Opened<Form>::SPANS;
  Opened<Form> to;
  to.weights = (uint8_t*)room;
  to.scale = (float*)(room + groups * PANEL * GROUP);
  to.minimum = to.scale + groups * SPANS * PANEL;
  const __m512i zero_point = _mm512_set1_epi8(Form::BITS == 4 ? Form::ZERO : Form::ZERO ? -128 : 0);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* group = Form::group(panel, g);
    const uint16_t* outer = Form::outer(panel, g);
    uint8_t* weights = to.weights + g * PANEL * GROUP;
    for (int h = 0; h < 2; ++h) {
      const uint8_t* from = group + h * Form::HALF;
      for (int j = 0; j < 4; ++j) {
        if (Form::BITS == 4) {
          const Q both = load_quads(from + j * 64);
          _mm512_store_si512(weights + h * 512 + j * 64, _mm512_sub_epi8(low_nibbles(both), zero_point));
          _mm512_store_si512(weights + h * 512 + 256 + j * 64, _mm512_sub_epi8(high_nibbles(both), zero_point));
        } else {
          for (int i = 2 * j; i < 2 * j + 2; ++i) {
            const int64_t at = SPANS == 1 ? h * 512 + i * 64 : i / 4 * 512 + h * 256 + i % 4 * 64;
            _mm512_store_si512(weights + at, _mm512_xor_si512(load_quads(from + i * 64), zero_point));
          }
        }
      }
      for (int s = 0; s < SPANS; ++s)
        store(to.scale + (g * SPANS + s) * PANEL + h * 16, Form::scale(group, outer, s, h * 16));
      if (Form::MIN) store(to.minimum + g * PANEL + h * 16, Form::minimum(group, outer, h * 16));
    }
  }
  return to;
}

// 16 rows times half a panel.
template <class Form>
struct GroupedBlock {
  const int8_t* x;
  const uint8_t* weights;  // of its half, and so the scales
  const float *scale, *minimum;
  int64_t row, o;
};

constexpr int64_t LEAD = 2;  // spans that products are ahead of float steps; a power of 2

template <class Form, class T>
class GroupedTiles {
 public:
  GroupedTiles(const Activations& x, const Results<T>& to)
      : x_(x), to_(to), spans_(x.groups * Opened<Form>::SPANS) {}

  // The float steps of the block before, and the products of this one as far as they go meanwhile.
  void push(const GroupedBlock<Form>& next) {
    fence();
    if (any_)
      add_up(next);
    else
      for (int64_t s = 0; s < LEAD && s < spans_; ++s) product(*this, next, s);
    now_ = next;
    any_ = true;
  }
  void finish() {
    GroupedBlock<Form> none = now_;  // products that nobody waits for
    if (any_) add_up(none);
  }

 private:
  OCTAVO_INLINE int32_t* sums(GroupedTiles& me, int64_t count) { return me.sums_ + count % (2 * LEAD) * 256; }

  // The next product: span s of a block. It is stored when the one after it has begun.
  OCTAVO_INLINE void product(GroupedTiles& me, const GroupedBlock<Form>& b, int64_t s) {
    const int8_t* from = b.x + s * Form::SPAN / TILE_K * (ROWS * TILE_K) + s * Form::SPAN % TILE_K;
    const uint8_t* weights = b.weights + s * Opened<Form>::SPAN_BYTES;
    int32_t* before = sums(me, me.count_ - 1);
    constexpr bool SIGNED = Form::BITS == 4 || Form::ZERO;
    if (me.count_++ & 1) {
      OCTAVO_TILE_LOAD(5, from, TILE_K);
      OCTAVO_TILE_LOAD(7, weights, 64);
      OCTAVO_TILE_STORE(0, before, 64);
      OCTAVO_TILE_ZERO(1);
      if (SIGNED)
        OCTAVO_TILE_DOT_S8S8(1, 5, 7);
      else
        OCTAVO_TILE_DOT_S8U8(1, 5, 7);
    } else {
      OCTAVO_TILE_LOAD(4, from, TILE_K);
      OCTAVO_TILE_LOAD(6, weights, 64);
      OCTAVO_TILE_STORE(1, before, 64);
      OCTAVO_TILE_ZERO(0);
      if (SIGNED)
        OCTAVO_TILE_DOT_S8S8(0, 4, 6);
      else
        OCTAVO_TILE_DOT_S8U8(0, 4, 6);
    }
  }

  void add_up(const GroupedBlock<Form>& next) {
    const GroupedBlock<Form> b = now_;
    const int64_t spans = spans_, ahead = LEAD < spans ? LEAD : spans;
    int64_t at = count_ - ahead;  // of this block's first product
    const int64_t numbers = b.row / ROWS * x_.groups * ROWS;
    const float *x_scale = x_.scale + numbers, *scaled_sum = x_.scaled_sum + numbers;
    F y[16];
    const F bias = Results<T>::bias_of(to_, b.o);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) y[r] = bias;
    for (int64_t s = 0; s < spans; ++s, ++at) {
      if (s + ahead < spans)
        product(*this, b, s + ahead);
      else
        product(*this, next, s + ahead - spans);
      const int64_t g = s * Form::SPAN / GROUP;
      const int32_t* sum = sums(*this, at);
      const F scale = load(b.scale + s * PANEL);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) y[r] = add_scaled(y[r], _mm512_load_si512(sum + r * 16), scale, x_scale[g * ROWS + r]);
      if (Form::MIN) {
        const F minimum = load(b.minimum + g * PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) y[r] = fma(minimum, all(scaled_sum[g * ROWS + r]), y[r]);
      }
    }
    const int64_t rows = x_.rows - b.row;
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r)
      if (r < rows) Results<T>::put(to_, b.row + r, b.o, y[r]);
  }

  alignas(64) int32_t sums_[2 * LEAD * 256];
  const Activations x_;
  const Results<T> to_;
  const int64_t spans_;
  GroupedBlock<Form> now_{};
  int64_t count_ = 2 * LEAD;
  bool any_ = false;
};

// Rows to take at once, so that they stay in the second cache: equal shares of whole blocks.
static int64_t rows_at_once(const Activations& x) {
  constexpr int64_t INT8_BYTES = 1 << 20, GROUPED_BYTES = 768 << 10;
  const int64_t chunks = x.by_row && x.chunks > MOST_CHUNKS ? chunks_in_step(x) : x.chunks;
  int64_t most = (x.by_row ? INT8_BYTES : GROUPED_BYTES) / (chunks * TILE_K) / BLOCK * BLOCK;
  if (most < 2 * BLOCK) most = 2 * BLOCK;
  return blocks_of(blocks_of(x.rows, blocks_of(x.rows, most)), BLOCK) * BLOCK;
}

// Panels `begin` .. `end` of one part times rows `first_row` .. `last_row`.
template <class Form, class T>
static void tiles_grouped(const QPart& part, int64_t begin, int64_t end, const Activations& x, int64_t first_row,
                          int64_t last_row, const Results<T>& to, Scratch& scratch) {
  const int64_t size = Form::panel_bytes(x.k);
  const int64_t room = blocks_of(Opened<Form>::bytes(x.groups), 64) * 64;
  char* rooms = scratch.room(size_t(2 * room));  // two: the float steps of a panel end among the products of the next
  GroupedTiles<Form, T> work(x, to);
  shape_for(Form::SPAN / 4);
  for (int64_t p = begin; p < end; ++p) {
    const Opened<Form> panel = open_panel<Form>((const uint8_t*)part.packed + p * size, x.groups, rooms + p % 2 * room);
    for (int64_t row = first_row; row < last_row; row += ROWS)
      for (int h = 0; h < 2; ++h)
        work.push({x.q + row * x.chunks * TILE_K, panel.weights + h * (Opened<Form>::SPAN_BYTES / 2),
                   panel.scale + h * 16, panel.minimum + h * 16, row, p * PANEL + h * 16});
  }
  work.finish();
  release_tiles();
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
#endif
