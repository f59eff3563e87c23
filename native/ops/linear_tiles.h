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
constexpr int64_t NEAR_PANEL = 44 << 10;  // a panel of this size stays in the first cache over all blocks of rows

struct TilePiece {
  const char* upper;  // 16 rows of x, and 16 more
  const char* lower;
  int64_t row_stride;  // bytes from one row to the next
  const char* b;
  const char* ahead;  // what later pieces will read, and how its lines and its steps lie
  int64_t ahead_line, ahead_step;
};

// LINES: cache lines of later pieces fetched at each step. KEEPS: the panel is wanted again from the first cache.
template <bool TWO, int LINES, bool KEEPS>
OCTAVO_INLINE void run_tiles(TilePiece& piece, int64_t steps) {
  TilePiece p = piece;
  for (int64_t s = 0; s < steps; ++s) {
    if (KEEPS) {
      OCTAVO_TILE_LOAD(6, p.b, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.upper, p.row_stride);
      OCTAVO_TILE_LOAD(7, p.b + TILE_BYTES, 64);
    } else {
      OCTAVO_TILE_LOAD_ONCE(6, p.b, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.upper, p.row_stride);
      OCTAVO_TILE_LOAD_ONCE(7, p.b + TILE_BYTES, 64);
    }
    OCTAVO_TILE_DOT(0, 4, 6);
    OCTAVO_TILE_DOT(1, 4, 7);
    if (TWO) {
      OCTAVO_TILE_LOAD_ONCE(5, p.lower, p.row_stride);
      OCTAVO_TILE_DOT(2, 5, 6);
      OCTAVO_TILE_DOT(3, 5, 7);
    }
#pragma GCC unroll 32
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(p.ahead + i * p.ahead_line, 0, 2);
    p.ahead += p.ahead_step;
    p.b += STEP_OF_PANEL;
    p.upper += TILE_K * 2;
    p.lower += TILE_K * 2;
  }
  piece = p;
}

template <bool TWO>
static void run_tiles_fetching(TilePiece& p, int64_t steps, int64_t lines, bool keeps) {
  if (lines > 16)
    run_tiles<TWO, 32, false>(p, steps);
  else if (lines > 4)
    keeps ? run_tiles<TWO, 16, true>(p, steps) : run_tiles<TWO, 16, false>(p, steps);
  else if (lines > 1)
    keeps ? run_tiles<TWO, 4, true>(p, steps) : run_tiles<TWO, 4, false>(p, steps);
  else
    keeps ? run_tiles<TWO, 1, true>(p, steps) : run_tiles<TWO, 1, false>(p, steps);
}

OCTAVO_INLINE void store_both(float* to, F a, F b) {
  store(to, a);
  store(to + W, b);
}
OCTAVO_INLINE void store_both(bf16* to, F a, F b) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }

template <class T>
OCTAVO_INLINE void finish_tiles(const float* sums, T* out, int64_t out_stride, int64_t rows, int64_t columns,
                                const float* bias) {
  if (columns < PANEL) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < columns; v += W)
        finish(load(sums + r * PANEL + v), out + r * out_stride + v, bias ? bias + v : nullptr, columns - v);
    return;
  }
  const F left = bias ? load(bias) : zero(), right = bias ? load(bias + W) : zero();
  for (int64_t r = 0; r < rows; ++r) {
    F a = load(sums + r * PANEL), b = load(sums + r * PANEL + W);
    if (bias) {  // adding a zero would turn -0 into 0
      a = add(a, left);
      b = add(b, right);
    }
    store_both(out + r * out_stride, a, b);
  }
}

struct TileRows {};

// Copies rows [begin, end) into whole tiles of k.
static void pad_rows(const LinearCall& c, int64_t begin, int64_t end, int64_t row_bytes, char* to) {
  const int64_t bytes = c.inputs * 2, whole = over(c.inputs, TILE_K) * TILE_K * 2;
  for (int64_t r = begin; r < end; ++r) {
    char* row = to + r * row_bytes;
    std::memcpy(row, static_cast<const bf16*>(c.x) + r * c.x_stride, size_t(bytes));
    std::memset(row + bytes, 0, size_t(whole - bytes));
  }
}

// Rows `from` to `end` of a block that begins at `begin`; the ones before `from` belong to another block.
struct BlockOfRows {
  int64_t begin, from, end;
};
OCTAVO_INLINE BlockOfRows block_of_rows(int64_t block, int64_t rows) {
  const int64_t from = block * BLOCK, end = from + BLOCK;
  if (end <= rows || rows < BLOCK) return {from, from, end < rows ? end : rows};
  // The last block begins earlier instead of being padded: some rows are computed twice, with the same bits.
  return {rows - from > TILE_ROWS ? rows - BLOCK : rows - TILE_ROWS, from, rows};
}

// The sums of one block, until they are added to the bias, rounded and written: that is done among the products of the
// next block, when they have long reached the cache.
struct Sums32 {
  alignas(64) float sums[BLOCK * PANEL];
  BlockOfRows rows{0, 0, 0};
  int64_t panel = 0;

  void write(const LinearCall& c) const {
    if (rows.from == rows.end) return;
    const int64_t element = c.out_type == Type::f32 ? 4 : 2;
    const int64_t columns = c.outputs - panel * PANEL, count = rows.end - rows.from;
    char* out = static_cast<char*>(c.out) + (rows.from * c.outputs + panel * PANEL) * element;
    const float* mine = sums + (rows.from - rows.begin) * PANEL;
    const float* bias = c.bias ? c.bias + panel * PANEL : nullptr;
    if (c.out_type == Type::f32)
      finish_tiles(mine, reinterpret_cast<float*>(out), c.outputs, count, columns, bias);
    else
      finish_tiles(mine, reinterpret_cast<bf16*>(out), c.outputs, count, columns, bias);
  }
};

// In what order (block of rows, panel) are computed, so that what is read again comes from the second cache: rows and
// panels are cut into bands, and where a band's x is still too much, k is cut too: its sums then wait in memory.
struct TilePlan {
  int64_t blocks, panels, steps;
  int64_t block_band, panel_band, step_band;
  bool by_panel;  // in a band: all blocks of one panel, then the next panel; or all panels of one block
  TilePlan(int64_t rows, int64_t panels, int64_t steps, int64_t row_bytes, int64_t threads)
      : blocks(over(rows, BLOCK)), panels(panels), steps(steps), block_band(blocks), panel_band(panels), step_band(steps),
        by_panel(true) {
    const int64_t block_bytes = BLOCK * row_bytes, share = over(panels, threads);
    if (blocks * block_bytes <= LOCAL_BYTES) return;
    if (share * steps * STEP_OF_PANEL <= LOCAL_BYTES) {
      panel_band = share;
      by_panel = false;
      return;
    }
    if (block_bytes > LOCAL_BYTES / 4) {
      step_band = over(steps, over(block_bytes, LOCAL_BYTES / 8));
      panel_band = 32;
    }
    block_band = LOCAL_BYTES / (block_bytes * step_band / steps);
    block_band = over(blocks, over(blocks, block_band));
  }
};

// A run of (block, panel) pairs within one band: the first block and panel of the band, and which pairs of it.
struct TileRun {
  int64_t block, panel, blocks, panels, from, to;
};

// The part [from, to) of all pairs, band after band.
template <class Body>
OCTAVO_INLINE void each_run(const TilePlan& plan, int64_t from, int64_t to, const Body& body) {
  int64_t unit = 0;
  for (int64_t block = 0; block < plan.blocks; block += plan.block_band)
    for (int64_t panel = 0; panel < plan.panels; panel += plan.panel_band) {
      TileRun run{block, panel, plan.blocks - block, plan.panels - panel, from - unit, to - unit};
      if (run.blocks > plan.block_band) run.blocks = plan.block_band;
      if (run.panels > plan.panel_band) run.panels = plan.panel_band;
      const int64_t pairs = run.blocks * run.panels;
      if (run.from < 0) run.from = 0;
      if (run.to > pairs) run.to = pairs;
      if (run.from < run.to) body(run);
      unit += pairs;
    }
}

// Products of one block into `now`, and the writing of the one `before`.
template <bool TWO>
static void multiply_block(const LinearCall& c, TilePiece& p, int64_t steps, int64_t lines, bool keeps, float* now,
                           bool continues, const Sums32& before) {
  fence();
  if (continues) {
    OCTAVO_TILE_LOAD(0, now, PANEL * 4);
    OCTAVO_TILE_LOAD(1, now + 16, PANEL * 4);
    if (TWO) {
      OCTAVO_TILE_LOAD(2, now + TILE_ROWS * PANEL, PANEL * 4);
      OCTAVO_TILE_LOAD(3, now + TILE_ROWS * PANEL + 16, PANEL * 4);
    }
  } else {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    if (TWO) {
      OCTAVO_TILE_ZERO(2);
      OCTAVO_TILE_ZERO(3);
    }
  }
  const int64_t begin = steps < 4 ? steps : 4;
  run_tiles_fetching<TWO>(p, begin, lines, keeps);
  before.write(c);
  run_tiles_fetching<TWO>(p, steps - begin, lines, keeps);
  OCTAVO_TILE_STORE(0, now, PANEL * 4);
  OCTAVO_TILE_STORE(1, now + 16, PANEL * 4);
  if (TWO) {
    OCTAVO_TILE_STORE(2, now + TILE_ROWS * PANEL, PANEL * 4);
    OCTAVO_TILE_STORE(3, now + TILE_ROWS * PANEL + 16, PANEL * 4);
  }
  fence();
}

// Whether many rows are worth a copy: rows that begin within a cache line make each line be read twice.
static bool reads_badly(const LinearCall& c) { return c.x_stride % 32 || uint64_t(c.x) % 64; }

struct WaitingSums {};

// One thread's part of a product.
struct TileWork {
  const LinearCall& c;
  const TilePlan& plan;
  const char* x;
  int64_t row_bytes;
  Sums32 sums[2];
  int turn = 0;

  void run(const TileRun& r) {
    float* waiting = nullptr;
    if (plan.step_band < plan.steps)
      waiting = static_cast<float*>(scratch<WaitingSums>((r.to - r.from) * BLOCK * PANEL * 4));
    for (int64_t step = 0; step < plan.steps; step += plan.step_band)
      for (int64_t u = r.from; u < r.to; ++u) piece(r, u, step, waiting);
  }

  void piece(const TileRun& r, int64_t u, int64_t step, float* waiting) {
    const int64_t i = plan.by_panel ? u % r.blocks : u / r.panels, j = plan.by_panel ? u / r.blocks : u % r.panels;
    const int64_t steps = plan.steps - step < plan.step_band ? plan.steps - step : plan.step_band;
    const bool last = step + steps == plan.steps;
    const BlockOfRows rows = block_of_rows(r.block + i, c.rows);
    const char* upper = x + rows.begin * row_bytes + step * TILE_K * 2;
    const char* w = static_cast<const char*>(c.packed) + ((r.panel + j) * plan.steps + step) * STEP_OF_PANEL;
    TilePiece p{upper, upper + TILE_ROWS * row_bytes, row_bytes, w, w, 64, 0};
    int64_t lines;
    if (plan.by_panel) {  // the next panel, a share of it with each block
      lines = over(32, r.blocks);
      p.ahead_step = lines * 64;
      p.ahead += r.blocks == 1 ? AHEAD_BYTES : plan.steps * STEP_OF_PANEL + i * lines * 64 * steps;
    } else {  // the next block of rows, a share of it with each panel
      lines = over(32, r.panels);
      p.ahead_line = row_bytes;
      p.ahead_step = 64;
      p.ahead = upper + (BLOCK + j * lines) * row_bytes;
    }
    Sums32 &now = sums[turn], &before = sums[turn ^ 1];
    float* to = last ? now.sums : waiting + (u - r.from) * BLOCK * PANEL;
    if (last && step > 0) std::memcpy(to, waiting + (u - r.from) * BLOCK * PANEL, BLOCK * PANEL * 4);
    const bool keeps = plan.by_panel && r.blocks > 1 && steps * STEP_OF_PANEL <= NEAR_PANEL;
    if (rows.end - rows.begin > TILE_ROWS)
      multiply_block<true>(c, p, steps, lines, keeps, to, step > 0, before);
    else
      multiply_block<false>(c, p, steps, lines, keeps, to, step > 0, before);
    before.rows = {0, 0, 0};
    if (!last) return;
    now.rows = rows;
    now.panel = r.panel + j;
    turn ^= 1;
  }
};

static void multiply_by_tiles(const LinearCall& c) {
  const int64_t steps = over(c.inputs, TILE_K), panels = over(c.outputs, PANEL);
  const bool copies = c.inputs % TILE_K || (c.rows > BLOCK && reads_badly(c));
  // An odd number of cache lines a row: sixteen rows then lie in different sets of the first cache.
  const int64_t row_bytes = copies ? (steps * 64) | 64 : c.x_stride * 2;
  char* copy = copies ? static_cast<char*>(scratch<TileRows>(c.rows * row_bytes)) : nullptr;
  const char* x = copies ? copy : static_cast<const char*>(c.x);
  const int64_t units = panels * over(c.rows, BLOCK);
  if (copies)
    parallel(c.rows, over(WORTH_A_THREAD, row_bytes),
             [&](int64_t begin, int64_t end, int) { pad_rows(c, begin, end, row_bytes, copy); });
  const TilePlan plan(c.rows, panels, steps, row_bytes, most_threads());
  const bool few = c.rows < BLOCK;
  parallel(units, over(WORTH_A_THREAD, steps * STEP_OF_PANEL), [&](int64_t begin, int64_t end, int) {
    shape_tiles(int(few && c.rows < TILE_ROWS ? c.rows : TILE_ROWS),
                int(few && c.rows > TILE_ROWS ? c.rows - TILE_ROWS : TILE_ROWS));
    TileWork work{c, plan, x, row_bytes};
    each_run(plan, begin, end, [&](const TileRun& run) { work.run(run); });
    work.sums[work.turn ^ 1].write(c);
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
