// The product of bf16 by AMX tiles: panels of 32 outputs, blocks of 32 rows, 2 x 2 tiles of sums.
//
// A weight is packed as [panel of 32 outputs][32 of k][2 tiles][16 pairs of k][16 outputs][2]; a tile is 1 KiB, and a
// panel is read from front to back. All row counts go through the same instruction, so that they give the same bits (it
// takes denormals for zero, and adds the even and the odd k of a tile apart: no other instruction's bits agree).
//
// With many rows, four products a step take 64 cycles, and one of the two sides has to come from the first cache for
// the loads to keep up. So k is cut into chunks: a panel's chunk stays in the first cache while all blocks of a band of
// rows come by from the second, and the band's part of x stays in the second while some panels come by. Sums wait in
// memory from one chunk to the next, and go on as they were. Everything that is to come from farther away is fetched a
// little at each step. x is read as it is where its rows lie well, or else from a copy in the order of use, whole tiles
// at a time. Where few outputs would not pay for that copy, and all of k of some blocks and panels fits into the second
// cache, two panels take turns.
//
// A gated product computes a panel of gates, keeps them for a band's blocks, and then the panel that they are for.
//
// The limit: with everything in the first cache, four loads and four products take 76 cycles and not 64 (Granite Rapids).
#pragma once
#include "linear_tile_sums.h"
#include "octavo/tiles.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t TILE_BYTES = 1024, STEP_BYTES = 2 * TILE_BYTES;  // of a panel, and of a block of rows
constexpr int64_t SUMS_BYTES = BLOCK * PANEL * 4;
constexpr int64_t NEAR_STEPS = 20;               // of a panel in the first cache, beside the sums and what is written
constexpr int64_t CHUNK_STEPS = 16;              // the same where sums come and go
constexpr int64_t LOCAL_ROWS_BYTES = 640 << 10;  // of x in the second cache
constexpr int64_t WAITING_BYTES = 3 << 20;       // of sums between two chunks
constexpr int64_t BOTH_BLOCKS = 8, BOTH_PANELS = 2;  // that go through k together where all of k of both fits nearby
constexpr int64_t WRITE_FROM = 2;                // the step from which on sums are written
constexpr int64_t WRITE_ROWS = 4;                // at each step, unless they are `QuickRows`
constexpr int64_t FEW_BLOCKS = 5;                // up to here weights are waited for, and a copy of x does not pay
constexpr int64_t FEW_PANELS = 32;               // the same of outputs
constexpr int64_t MOST_STEPS = 64;               // at once, where chunks are not shorter
constexpr int64_t HURRY_STEPS = 10;              // too few to write two rows at each
constexpr int64_t FAR_BYTES = 4 << 20;           // of results: more than the second caches keep for who reads them

// In what order products are computed: band of rows after band of rows, in it panel after panel, in it block after
// block; some panels together go through k chunk by chunk.
struct TilePlan {
  int64_t blocks, steps;
  int64_t halves;      // 2: a panel of gates, and then the one of what they are for
  int64_t panels;      // of each half
  int64_t chunk;       // steps of k
  int64_t block_band;  // blocks
  int64_t panel_band;  // panels, while chunks of k change
  bool copies;         // x into whole tiles
  bool far;            // results go past the caches
  explicit TilePlan(const LinearCall& c)
      : blocks(over(c.rows, BLOCK)),
        steps(over(c.inputs, TILE_K)),
        halves(c.gated ? 2 : 1),
        panels(over(c.outputs, halves * PANEL)),
        chunk(steps) {
    const bool few = blocks <= FEW_BLOCKS;
    int64_t band_bytes = LOCAL_ROWS_BYTES;
    bool both = false;
    if (few) {
      band_bytes = LOCAL_BYTES;  // all of them
      if (blocks > 1 && blocks * steps * STEP_BYTES >= LOCAL_BYTES) chunk = over(steps, over(steps, MOST_STEPS));
    } else if (steps > NEAR_STEPS) {
      chunk = over(steps, over(steps, CHUNK_STEPS));
      both = halves * panels <= FEW_PANELS && steps <= MOST_STEPS;
    }
    block_band = both ? BOTH_BLOCKS : band_bytes / (chunk * STEP_BYTES);
    block_band = over(blocks, over(blocks, block_band > 1 ? block_band : 1));
    panel_band = both ? BOTH_PANELS : WAITING_BYTES / (block_band * halves * SUMS_BYTES);
    if (panel_band < 1) panel_band = 1;
    // Rows that begin within a cache line make each line be read twice; and rows that lie 2 KiB apart, or a multiple of
    // it, fall into few sets of the first cache.
    const bool reads_twice = c.x_stride % 32 || uint64_t(c.x) % 64;
    const bool collides = c.x_stride % 1024 == 0 && halves * panels > FEW_PANELS;
    copies = c.inputs % TILE_K || (blocks > 1 && reads_twice) || (!few && (collides || (chunk < steps && !both)));
    const void* out = c.gated ? c.gated : c.out;
    const int64_t out_stride = c.gated ? c.gated_stride : c.out_stride;
    far = uint64_t(out) % 64 == 0 && out_stride % 32 == 0 && c.rows * out_stride * 2 > FAR_BYTES;
  }
};

// Where a block's tiles of x lie in the copy: [chunk][block][step][upper rows, lower rows].
OCTAVO_INLINE int64_t place_of_rows(const TilePlan& plan, int64_t block, int64_t step, int64_t steps) {
  return (step * plan.blocks + block * steps) * STEP_BYTES;
}
OCTAVO_INLINE int64_t steps_of_chunk(const TilePlan& plan, int64_t step) {
  return plan.steps - step < plan.chunk ? plan.steps - step : plan.chunk;
}

struct TileRows {};

static void copy_block(const LinearCall& c, const TilePlan& plan, int64_t block, char* to) {
  const BlockOfRows rows = block_of_rows(block, c.rows);
  for (int64_t step = 0; step < plan.steps; step += plan.chunk) {
    const int64_t steps = steps_of_chunk(plan, step), left = c.inputs - step * TILE_K;
    const int64_t whole = left / TILE_K < steps ? left / TILE_K : steps;
    for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
      const bf16* row = static_cast<const bf16*>(c.x) + (rows.begin + r) * c.x_stride + step * TILE_K;
      char* at = to + place_of_rows(plan, block, step, steps) + r * LINE_BYTES;
      for (int64_t s = 0; s < whole; ++s)
        _mm512_store_si512(at + s * STEP_BYTES, _mm512_loadu_si512(row + s * TILE_K));
      if (whole == steps) continue;
      const __mmask32 some = (__mmask32(1) << (left - whole * TILE_K)) - 1;
      _mm512_store_si512(at + whole * STEP_BYTES, _mm512_maskz_loadu_epi16(some, row + whole * TILE_K));
    }
  }
}

// Memory that later products will read, some lines of it at each step.
struct Ahead {
  const char* at;
  int64_t lines;
};

struct TilePiece {
  const char* upper;  // 16 rows of x, and 16 more
  const char* lower;
  int64_t row_bytes, step_bytes;  // from one row of x to the next, and from one step to the next
  const char* panel;
  int64_t steps;
  Ahead panels, rows, sums;  // sums: whole, by four lines a step
  const float* from;         // sums so far, or null
  float* to;
};

// LINES: of later panels, fetched at each step. KEEPS: the panel is wanted again from the first cache.
// CHUNKS: there are sums, and rows of the next chunk, to be fetched.
template <bool TWO, int LINES, bool KEEPS, bool CHUNKS>
OCTAVO_INLINE void run_tiles(TilePiece p, FinishedSums& before) {
  // As a variable: each address then waits for the one before, and that pace suits the memory: with constant offsets,
  // as fast as the processor can ask, one row took an eighth longer.
  int64_t line = LINE_BYTES;
  asm volatile("" : "+r"(line));
  QuickRows quick = before.give_quick();
  const bool hurry = p.steps < HURRY_STEPS;
  for (int64_t s = 0; s < p.steps; ++s) {
    if (KEEPS) {
      OCTAVO_TILE_LOAD(6, p.panel, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.upper, p.row_bytes);
      OCTAVO_TILE_LOAD(7, p.panel + TILE_BYTES, 64);
    } else {
      OCTAVO_TILE_LOAD_ONCE(6, p.panel, 64);
      OCTAVO_TILE_LOAD_ONCE(4, p.upper, p.row_bytes);
      OCTAVO_TILE_LOAD_ONCE(7, p.panel + TILE_BYTES, 64);
    }
    OCTAVO_TILE_DOT(0, 4, 6);
    OCTAVO_TILE_DOT(1, 4, 7);
    if (TWO) {
      OCTAVO_TILE_LOAD_ONCE(5, p.lower, p.row_bytes);
      OCTAVO_TILE_DOT(2, 5, 6);
      OCTAVO_TILE_DOT(3, 5, 7);
    }
#pragma GCC unroll 32
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(p.panels.at + i * line, 0, 2);
    p.panels.at += p.panels.lines * LINE_BYTES;
    if (CHUNKS) {
      for (int64_t i = 0; i < p.rows.lines; ++i) __builtin_prefetch(p.rows.at + i * LINE_BYTES, 0, 2);
      p.rows.at += p.rows.lines * LINE_BYTES;
      if (p.sums.lines) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) __builtin_prefetch(p.sums.at + i * LINE_BYTES, 0, 3);
        p.sums.at += 4 * LINE_BYTES;
        p.sums.lines -= 4;
      }
    }
    if (s >= WRITE_FROM) {
      quick.two();
      if (hurry) quick.two();
      if (before.rows) before.write(WRITE_ROWS);
    }
    p.panel += STEP_BYTES;
    p.upper += p.step_bytes;
    p.lower += p.step_bytes;
  }
  quick.rest();
}

template <bool TWO, bool KEEPS, bool CHUNKS>
static void run_tiles_fetching(const TilePiece& p, FinishedSums& before) {
  if (p.panels.lines > 16)
    run_tiles<TWO, 32, KEEPS, CHUNKS>(p, before);
  else if (p.panels.lines > 8)
    run_tiles<TWO, 16, KEEPS, CHUNKS>(p, before);
  else if (p.panels.lines > 4)
    run_tiles<TWO, 8, KEEPS, CHUNKS>(p, before);
  else if (p.panels.lines > 2)
    run_tiles<TWO, 4, KEEPS, CHUNKS>(p, before);
  else
    run_tiles<TWO, 2, KEEPS, CHUNKS>(p, before);
}

template <bool TWO, bool KEEPS, bool CHUNKS>
static void multiply_piece(const TilePiece& p, FinishedSums& before) {
  fence();
  if (CHUNKS && p.from) {
    OCTAVO_TILE_LOAD(0, p.from, PANEL * 4);
    OCTAVO_TILE_LOAD(1, p.from + 16, PANEL * 4);
    if (TWO) {
      OCTAVO_TILE_LOAD(2, p.from + TILE_ROWS * PANEL, PANEL * 4);
      OCTAVO_TILE_LOAD(3, p.from + TILE_ROWS * PANEL + 16, PANEL * 4);
    }
  } else {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    if (TWO) {
      OCTAVO_TILE_ZERO(2);
      OCTAVO_TILE_ZERO(3);
    }
  }
  run_tiles_fetching<TWO, KEEPS, CHUNKS>(p, before);
  if (before.rows) before.write(BLOCK);
  OCTAVO_TILE_STORE(0, p.to, PANEL * 4);
  OCTAVO_TILE_STORE(1, p.to + 16, PANEL * 4);
  if (TWO) {
    OCTAVO_TILE_STORE(2, p.to + TILE_ROWS * PANEL, PANEL * 4);
    OCTAVO_TILE_STORE(3, p.to + TILE_ROWS * PANEL + 16, PANEL * 4);
  }
  fence();
}

struct WaitingSums {};
struct Gates {};

// One thread's part of a product.
struct TileWork {
  const LinearCall& c;
  const TilePlan& plan;
  const char* copy;  // of x, or null
  char* gates = nullptr;  // of a band's blocks, BLOCK lines each
  FinishedSums finished{};

  // The part [from, to) of all (band of rows, panel, block).
  void run(int64_t from, int64_t to) {
    if (c.gated) gates = static_cast<char*>(scratch<Gates>(plan.block_band * BLOCK * LINE_BYTES));
    int64_t unit = 0;
    for (int64_t block = 0; block < plan.blocks; block += plan.block_band) {
      const int64_t blocks = plan.blocks - block < plan.block_band ? plan.blocks - block : plan.block_band;
      const int64_t pairs = plan.panels * blocks, begin = from > unit ? from - unit : 0;
      const int64_t end = to - unit < pairs ? to - unit : pairs;
      unit += pairs;
      if (begin >= end) continue;
      int64_t panels = over(end, blocks) - begin / blocks;
      if (plan.chunk < plan.steps) panels = over(panels, over(panels, plan.panel_band));
      for (int64_t u = begin, next; u < end; u = next) {
        next = (u / blocks + panels) * blocks;
        if (next > end) next = end;
        run_panels(block, blocks, u, next);
      }
    }
    if (finished.rows) finished.write(BLOCK);
    if (plan.far) _mm_sfence();
  }

  void run_panels(int64_t block, int64_t blocks, int64_t from, int64_t to) {
    float* waiting = nullptr;
    if (plan.chunk < plan.steps)
      waiting = static_cast<float*>(scratch<WaitingSums>((to - from) * plan.halves * SUMS_BYTES));
    for (int64_t step = 0; step < plan.steps; step += plan.chunk)
      for (int64_t first = from, next; first < to; first = next) {
        next = (first / blocks + 1) * blocks;
        if (next > to) next = to;
        for (int64_t half = 0; half < plan.halves; ++half)
          for (int64_t u = first; u < next; ++u) multiply({block, blocks, from, to}, u, half, next - first, step, waiting);
      }
  }

  // Units [from, to) of a band of blocks that go through k together.
  struct Together {
    int64_t block, blocks, from, to;
    int64_t first() const { return from / blocks; }
    int64_t end() const { return over(to, blocks); }
  };

  const char* panel_at(int64_t panel, int64_t half, int64_t step) const {
    return static_cast<const char*>(c.packed) + ((panel + half * plan.panels) * plan.steps + step) * STEP_BYTES;
  }

  // What of the weight is read after this panel.
  const char* panel_after(int64_t panel, int64_t half, const Together& all, int64_t step) const {
    if (half + 1 < plan.halves) return panel_at(panel, half + 1, step);
    if (panel + 1 < all.end()) return panel_at(panel + 1, 0, step);
    const int64_t next = step + plan.chunk;
    return next < plan.steps ? panel_at(all.first(), 0, next) : panel_at(all.end(), 0, 0);
  }

  // One block by one panel, over the chunk that begins at `step`; `count` blocks of the panel follow one another.
  void multiply(const Together& all, int64_t u, int64_t half, int64_t count, int64_t step, float* waiting) {
    const int64_t blocks = all.blocks, i = u % blocks, panel = u / blocks, steps = steps_of_chunk(plan, step);
    const bool last = step + steps == plan.steps;
    const BlockOfRows rows = block_of_rows(all.block + i, c.rows);
    TilePiece p;
    if (copy) {
      p.row_bytes = LINE_BYTES;
      p.step_bytes = STEP_BYTES;
      p.upper = copy + place_of_rows(plan, all.block + i, step, steps);
      p.lower = p.upper + TILE_BYTES;
    } else {
      p.row_bytes = c.x_stride * 2;
      p.step_bytes = LINE_BYTES;
      p.upper = static_cast<const char*>(c.x) + rows.begin * p.row_bytes + step * LINE_BYTES;
      p.lower = p.upper + TILE_ROWS * p.row_bytes;
    }
    p.panel = panel_at(panel, half, step);
    p.steps = steps;
    p.panels.lines = over(STEP_BYTES / LINE_BYTES, blocks);
    if (blocks == 1)
      p.panels.at = p.panel + AHEAD_BYTES;
    else  // each block fetches its share of the panel after this one
      p.panels.at = panel_after(panel, half, all, step) + i * p.panels.lines * LINE_BYTES * steps;
    // Sums lie in the order in which they are come by.
    const int64_t first = u - i > all.from ? u - i : all.from;
    const int64_t place = (first - all.from) * plan.halves + half * count + u - first;
    p.from = step ? waiting + place * BLOCK * PANEL : nullptr;
    p.to = last ? finished.sums : waiting + place * BLOCK * PANEL;
    if (waiting) {
      p.rows = {p.upper, 0};
      if (copy) {  // each panel fetches its share of the rows' next chunk
        const int64_t next = last ? 0 : step + steps;
        p.rows.lines = over(STEP_BYTES / LINE_BYTES, (all.end() - all.first()) * plan.halves);
        p.rows.at = copy + place_of_rows(plan, all.block + i, next, steps_of_chunk(plan, next)) +
                    ((panel - all.first()) * plan.halves + half) * p.rows.lines * LINE_BYTES * steps;
      }
      const int64_t after = place + 1 < (all.to - all.from) * plan.halves ? place + 1 : 0;
      p.sums.at = reinterpret_cast<const char*>(waiting + after * BLOCK * PANEL);
      p.sums.lines = SUMS_BYTES / LINE_BYTES;
    }
    const bool keeps = blocks > 1 && steps <= NEAR_STEPS;
    if (rows.end - rows.begin > TILE_ROWS)
      multiply_piece_of<true>(p, keeps, waiting);
    else
      multiply_piece_of<false>(p, keeps, waiting);
    if (last)
      finished.take(c, rows, panel, plan.far, gates ? gates + i * BLOCK * LINE_BYTES : nullptr, half + 1 < plan.halves);
  }

  template <bool TWO>
  void multiply_piece_of(const TilePiece& p, bool keeps, bool chunks) {
    if (chunks)
      multiply_piece<TWO, true, true>(p, finished);
    else if (keeps)
      multiply_piece<TWO, true, false>(p, finished);
    else
      multiply_piece<TWO, false, false>(p, finished);
  }
};

// With few rows two operators are as good. Gates are whole panels, and what is done to sums is done to whole lines.
static bool gates_by_tiles(const LinearCall& c) {
  return c.type == Type::bf16 && c.out_type == Type::bf16 && !c.bias && c.outputs % (2 * PANEL) == 0 &&
         over(c.rows, BLOCK) > FEW_BLOCKS;
}

static void multiply_by_tiles(const LinearCall& c) {
  const TilePlan plan(c);
  char* copy = plan.copies ? static_cast<char*>(scratch<TileRows>(plan.blocks * plan.steps * STEP_BYTES)) : nullptr;
  if (copy)
    parallel(plan.blocks, over(WORTH_A_THREAD, plan.steps * STEP_BYTES), [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) copy_block(c, plan, b, copy);
    });
  const int64_t units = plan.panels * plan.blocks;
  int64_t grain = over(WORTH_A_THREAD, plan.halves * plan.steps * STEP_BYTES);
  // With many blocks each part begins with what is in no cache yet: few parts.
  if (plan.blocks > FEW_BLOCKS && grain < units / most_threads()) grain = units / most_threads();
  const bool few = c.rows < BLOCK;
  parallel(units, grain, [&](int64_t begin, int64_t end, int) {
    shape_tiles(int(few && c.rows < TILE_ROWS ? c.rows : TILE_ROWS),
                int(few && c.rows > TILE_ROWS ? c.rows - TILE_ROWS : TILE_ROWS));
    TileWork work{c, plan, copy};
    work.run(begin, end);
    release_tiles();
  });
}

static int64_t tile_bytes(int64_t inputs, int64_t outputs) {
  return over(outputs, PANEL) * over(inputs, TILE_K) * STEP_BYTES;
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

static void unpack_rows_of_tiles(const void* packed, const int64_t* index, void* out, int64_t rows, int64_t inputs,
                                 int64_t outputs) {
  const int64_t steps = over(inputs, TILE_K);
  each_packed_row(index, static_cast<bf16*>(out), rows, inputs, outputs, 2, [&](int64_t row, bf16* to) {
    const int64_t n = row % PANEL;
    const bf16* from = static_cast<const bf16*>(packed) + row / PANEL * steps * PANEL * TILE_K + n / 16 * 512 + n % 16 * 2;
    int64_t k = 0;
    for (; k + TILE_K <= inputs; k += TILE_K, from += 1024)
#pragma GCC unroll 16
      for (int pair = 0; pair < TILE_K / 2; ++pair) std::memcpy(to + k + pair * 2, from + pair * 32, 4);
    for (int64_t i = 0; k + i < inputs; ++i) to[k + i] = from[i / 2 * 32 + i % 2];
  });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
