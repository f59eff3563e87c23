// The product of bf16 by AMX tiles: panels of 32 outputs, blocks of 32 rows, 2 x 2 tiles of sums.
//
// A weight is packed as [panel of 32 outputs][32 of k][2 tiles][16 pairs of k][16 outputs][2]; a tile is 1 KiB, and a panel is
// read from front to back. x is read as it is where that may be, or from a copy padded to whole tiles. All row counts go
// through the same instruction, so that they give the same bits (it takes denormals for zero, and adds the even and the
// odd k of a tile apart: no other instruction's bits agree).
#pragma once
#include "linear_vector.h"
#include "octavo/tiles.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t TILE_K = 32, TILE_ROWS = 16, PANEL = 32, BLOCK = 32;
constexpr int64_t TILE_BYTES = 1024, STEP_OF_PANEL = 2 * TILE_BYTES;

struct TilePiece {
  const char* upper;  // 16 rows of x, and 16 more
  const char* lower;
  int64_t row_stride, k_stride;  // bytes from one row, and from one 32 of k, to the next
  const char* b;
  int64_t steps;
  const char* ahead;  // weights to be used later
};

// LINES: cache lines of later weights fetched at each step.
template <bool TWO, int LINES>
OCTAVO_INLINE void run_tiles(const TilePiece& p) {
  const char *upper = p.upper, *lower = p.lower, *b = p.b, *ahead = p.ahead;
  const int64_t row_stride = p.row_stride, k_stride = p.k_stride;
  for (int64_t s = 0; s < p.steps; ++s) {
    OCTAVO_TILE_LOAD(6, b, 64);
    OCTAVO_TILE_LOAD(4, upper, row_stride);
    OCTAVO_TILE_LOAD(7, b + TILE_BYTES, 64);
    OCTAVO_TILE_DOT(0, 4, 6);
    OCTAVO_TILE_DOT(1, 4, 7);
    if (TWO) {
      OCTAVO_TILE_LOAD(5, lower, row_stride);
      OCTAVO_TILE_DOT(2, 5, 6);
      OCTAVO_TILE_DOT(3, 5, 7);
    }
#pragma GCC unroll 32
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + i * 64, 0, 2);
    ahead += LINES * 64;
    b += STEP_OF_PANEL;
    upper += k_stride;
    lower += k_stride;
  }
}

template <bool TWO>
static void run_tiles_fetching(const TilePiece& p, int64_t lines) {
  if (lines > 16)
    run_tiles<TWO, 32>(p);
  else if (lines > 8)
    run_tiles<TWO, 16>(p);
  else if (lines > 4)
    run_tiles<TWO, 8>(p);
  else if (lines > 2)
    run_tiles<TWO, 4>(p);
  else
    run_tiles<TWO, 2>(p);
}

template <class T>
static void finish_tiles(const float* sums, T* out, int64_t out_stride, int64_t rows, int64_t columns,
                         const float* bias) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < PANEL; v += W)
      if (v < columns)
        finish(load(sums + r * PANEL + v), out + r * out_stride + v, bias ? bias + v : nullptr, columns - v);
}

struct TileRows {};

// Copies rows [begin, end) into whole tiles of k; rows from `rows` on are zero.
static void pad_rows(const LinearCall& c, int64_t begin, int64_t end, int64_t row_bytes, char* to) {
  for (int64_t r = begin; r < end; ++r) {
    char* row = to + r * row_bytes;
    const int64_t bytes = r < c.rows ? c.inputs * 2 : 0;
    if (bytes) std::memcpy(row, static_cast<const bf16*>(c.x) + r * c.x_stride, size_t(bytes));
    std::memset(row + bytes, 0, size_t(row_bytes - bytes));
  }
}

static void multiply_by_tiles(const LinearCall& c) {
  const int64_t steps = over(c.inputs, TILE_K), panels = over(c.outputs, PANEL);
  const bool few = c.rows <= BLOCK;
  const bool copies = c.inputs % TILE_K || (!few && c.rows % BLOCK);
  // An odd number of cache lines a row: sixteen rows then lie in different sets of the first cache.
  const int64_t row_bytes = copies ? (steps * 64) | 64 : c.x_stride * 2;
  const int64_t padded = few ? c.rows : over(c.rows, BLOCK) * BLOCK;
  char* copy = copies ? static_cast<char*>(scratch<TileRows>(padded * row_bytes)) : nullptr;
  const char* x = copies ? copy : static_cast<const char*>(c.x);
  Bands bands(padded, BLOCK, row_bytes);
  const int64_t units = panels * bands.blocks;
  const int64_t worth = over(units * steps * STEP_OF_PANEL, WORTH_A_THREAD);
  together(worth < units ? worth : units, [&](int64_t me, int64_t all, Meet meet) {
    if (copies) {
      pad_rows(c, padded * me / all, padded * (me + 1) / all, row_bytes, copy);
      meet();
    }
    const int upper = int(few && c.rows < TILE_ROWS ? c.rows : TILE_ROWS);
    const int lower = int(few ? (c.rows > TILE_ROWS ? c.rows - TILE_ROWS : 1) : TILE_ROWS);
    shape_tiles(upper, lower);
    each_panel(bands, panels, units * me / all, units * (me + 1) / all, [&](int64_t panel, int64_t block, int64_t end) {
      const char* w = static_cast<const char*>(c.packed) + panel * steps * STEP_OF_PANEL;
      const int64_t lines = over(32, end - block);
      for (int64_t i = block; i < end; ++i) {
        const int64_t begin = i * BLOCK, rows = c.rows - begin < BLOCK ? c.rows - begin : BLOCK;
        TilePiece p;
        p.upper = x + begin * row_bytes;
        p.lower = p.upper + TILE_ROWS * row_bytes;
        p.row_stride = row_bytes;
        p.k_stride = 64;
        p.b = w;
        p.steps = steps;
        p.ahead = end - block == 1 ? w + AHEAD_BYTES : w + steps * (STEP_OF_PANEL + (i - block) * lines * 64);
        alignas(64) float sums[BLOCK * PANEL];
        fence();
        OCTAVO_TILE_ZERO(0);
        OCTAVO_TILE_ZERO(1);
        if (rows > TILE_ROWS) {
          OCTAVO_TILE_ZERO(2);
          OCTAVO_TILE_ZERO(3);
          run_tiles_fetching<true>(p, lines);
          OCTAVO_TILE_STORE(2, sums + TILE_ROWS * PANEL, PANEL * 4);
          OCTAVO_TILE_STORE(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
        } else {
          run_tiles_fetching<false>(p, lines);
        }
        OCTAVO_TILE_STORE(0, sums, PANEL * 4);
        OCTAVO_TILE_STORE(1, sums + 16, PANEL * 4);
        fence();
        const int64_t at = begin * c.outputs + panel * PANEL, columns = c.outputs - panel * PANEL;
        const float* bias = c.bias ? c.bias + panel * PANEL : nullptr;
        if (c.out_type == Type::f32)
          finish_tiles(sums, static_cast<float*>(c.out) + at, c.outputs, rows, columns, bias);
        else
          finish_tiles(sums, static_cast<bf16*>(c.out) + at, c.outputs, rows, columns, bias);
      }
    });
    release_tiles();
  });
}

static int64_t tile_bytes(int64_t inputs, int64_t outputs) {
  return over(outputs, PANEL) * over(inputs, TILE_K) * STEP_OF_PANEL;
}

static void pack_for_tiles(const void* weight, int64_t stride, void* packed, int64_t inputs, int64_t outputs) {
  const int64_t steps = over(inputs, TILE_K);
  parallel(over(outputs, PANEL), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t n = 0; n < PANEL; ++n) {
        const int64_t output = panel * PANEL + n;
        const bf16* from = static_cast<const bf16*>(weight) + output * stride;
        bf16* to = static_cast<bf16*>(packed) + panel * steps * PANEL * TILE_K + n / 16 * 512 + n % 16 * 2;
        for (int64_t k = 0; k < steps * TILE_K; ++k)
          to[k / TILE_K * 1024 + k % TILE_K / 2 * 32 + k % 2] = output < outputs && k < inputs ? from[k] : bf16{0};
      }
  });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
