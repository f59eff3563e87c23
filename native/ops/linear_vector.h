// The product by vectors: panels of P outputs, blocks of up to MOST_ROWS rows, the sums in registers.
//
// A weight is packed as [panel][step of k][P outputs][k of a step]; the rows of x are packed as [block][step][row], so that
// both are read from front to back. Every sum runs over k from the first to the last, whatever the block.
#pragma once
#include "octavo/linear.h"
#include "octavo/parallel.h"
#include "octavo/scratch.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

#if defined(__AVX512F__)
constexpr int V = 2, MOST_ROWS = 12;  // 24 sums in 32 registers
#elif defined(__AVX2__)
constexpr int V = 2, MOST_ROWS = 5;  // 10 sums in 16 registers
#else
constexpr int V = 8, MOST_ROWS = 2;
#endif
constexpr int P = V * W;

constexpr int64_t NEAR_BYTES = 32 << 10;     // of a panel, kept in the first cache over all blocks of rows
constexpr int64_t LOCAL_BYTES = 1 << 20;     // of x, kept in the second cache over all panels
constexpr int64_t AHEAD_BYTES = 6 << 10;     // how far before its use a weight is fetched when rows are few
constexpr int64_t WORTH_A_THREAD = 48 << 10; // bytes of weight below which waking a thread costs more than it saves

OCTAVO_INLINE int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }

// float32 weights and rows.
struct Single {
  using Weight = float;
  using Row = float;
  static constexpr int K = 1;          // k of a step
  static constexpr int ROW_ITEMS = 1;  // items of Row a step
  OCTAVO_INLINE Row item(const float* x, int64_t, int) { return *x; }
  template <int R>
  OCTAVO_INLINE void step(F (&sums)[R][V], const Row* a, const Weight* b) {
    F w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load(b + v * W);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F x = all(a[r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(x, w[v], sums[r][v]);
    }
  }
};

#if defined(__AVX512BF16__)

// bf16 weights and rows, two k at a time by the processor's own dot product (it takes denormals for zero).
struct Half {
  using Weight = bf16;
  using Row = uint32_t;
  static constexpr int K = 2, ROW_ITEMS = 1;
  OCTAVO_INLINE Row item(const bf16* x, int64_t left, int) {
    return uint32_t(x[0].bits) | (left > 1 ? uint32_t(x[1].bits) << 16 : 0u);
  }
  template <int R>
  OCTAVO_INLINE void step(F (&sums)[R][V], const Row* a, const Weight* b) {
    __m512bh w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = (__m512bh)_mm512_loadu_si512(b + v * W * 2);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(int(a[r]));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, w[v]);
    }
  }
};

#else

#if defined(__AVX512F__)
OCTAVO_INLINE F even(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
OCTAVO_INLINE F odd(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(int(0xffff0000))));
}
#elif defined(__AVX2__)
OCTAVO_INLINE F even(const bf16* pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)pairs), 16));
}
OCTAVO_INLINE F odd(const bf16* pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_loadu_si256((const __m256i*)pairs), _mm256_set1_epi32(int(0xffff0000))));
}
#else
OCTAVO_INLINE F even(const bf16* pairs) { return to_float(pairs[0]); }
OCTAVO_INLINE F odd(const bf16* pairs) { return to_float(pairs[1]); }
#endif

// bf16 weights widened as they are used, and rows widened once.
struct Half {
  using Weight = bf16;
  using Row = float;
  static constexpr int K = 2, ROW_ITEMS = 2;
  OCTAVO_INLINE Row item(const bf16* x, int64_t left, int i) { return i < left ? to_float(x[i]) : 0.f; }
  template <int R>
  OCTAVO_INLINE void step(F (&sums)[R][V], const Row* a, const Weight* b) {
    F w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = even(b + v * W * 2);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F x = all(a[r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(x, w[v], sums[r][v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = odd(b + v * W * 2);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F x = all(a[R + r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(x, w[v], sums[r][v]);
    }
  }
};

#endif

// One block of rows by one panel, over some steps of k.
struct Piece {
  const void* a;
  const void* b;
  int64_t steps;
  float* sums;  // [row][P], what was summed so far
  bool first, last;
  const char* ahead;  // where the weights of a later piece lie, and how far to go in them at each step
  int64_t ahead_step, ahead_second;
  const float* bias;
  void* out;
  int64_t out_stride, columns;  // columns: outputs left from this panel's first on
  Type out_type;
};

template <class T>
OCTAVO_INLINE void finish(F value, T* out, const float* bias, int64_t columns) {
  const Left n = first(columns);
  if (bias) value = add(value, load(bias, n));
  store(out, value, n);
}

template <class Kind, int R>
static void multiply_piece(const Piece& p) {
  F sums[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = p.first ? zero() : load(p.sums + r * P + v * W);
  auto* a = static_cast<const typename Kind::Row*>(p.a);
  auto* b = static_cast<const typename Kind::Weight*>(p.b);
  const char* ahead = p.ahead;
  for (int64_t s = 0; s < p.steps; ++s) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + p.ahead_second, 0, 2);
    ahead += p.ahead_step;
    Kind::template step<R>(sums, a, b);
    a += R * Kind::ROW_ITEMS;
    b += P * Kind::K;
  }
  if (!p.last) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(p.sums + r * P + v * W, sums[r][v]);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t columns = p.columns - v * W;
      if (columns <= 0) continue;
      const float* bias = p.bias ? p.bias + v * W : nullptr;
      if (p.out_type == Type::f32)
        finish(sums[r][v], (float*)p.out + r * p.out_stride + v * W, bias, columns);
      else
        finish(sums[r][v], (bf16*)p.out + r * p.out_stride + v * W, bias, columns);
    }
}

template <class Kind, int R = 1>
static void multiply_piece_of(int64_t rows, const Piece& p) {
  if constexpr (R <= MOST_ROWS) {
    if (rows == R)
      multiply_piece<Kind, R>(p);
    else
      multiply_piece_of<Kind, R + 1>(rows, p);
  }
}

// Rows are cut into blocks as equal as can be, blocks are grouped into bands whose packed x stays in the second cache.
struct Bands {
  int64_t rows, blocks, band_blocks;
  Bands(int64_t rows, int64_t most_rows, int64_t row_bytes)
      : rows(rows), blocks(over(rows, most_rows)), band_blocks(LOCAL_BYTES / (most_rows * row_bytes)) {
    if (band_blocks < 1) band_blocks = 1;
    band_blocks = over(blocks, over(blocks, band_blocks));
  }
  int64_t begin(int64_t block) const { return rows * block / blocks; }
};

// The part [from, to) of all (band, panel, block) in this order: body(panel, first block, end of blocks).
template <class Body>
OCTAVO_INLINE void each_panel(const Bands& bands, int64_t panels, int64_t from, int64_t to, const Body& body) {
  int64_t unit = 0;
  for (int64_t band = 0; band < bands.blocks; band += bands.band_blocks) {
    int64_t blocks = bands.blocks - band;
    if (blocks > bands.band_blocks) blocks = bands.band_blocks;
    int64_t u = from > unit ? from : unit, end = unit + panels * blocks;
    if (end > to) end = to;
    while (u < end) {
      const int64_t panel = (u - unit) / blocks, block = (u - unit) % blocks;
      int64_t count = blocks - block;
      if (count > end - u) count = end - u;
      body(panel, band + block, band + block + count);
      u += count;
    }
    unit += panels * blocks;
  }
}

template <class Kind>
static void pack_rows(const LinearCall& c, int64_t steps, const Bands& bands, int64_t block, typename Kind::Row* to) {
  const int64_t begin = bands.begin(block), count = bands.begin(block + 1) - begin;
  using Item = typename Kind::Weight;
  const Item* x = static_cast<const Item*>(c.x) + begin * c.x_stride;
  for (int64_t r = 0; r < count; ++r) {
    const Item* row = x + r * c.x_stride;
    typename Kind::Row* at = to + r;
    const int64_t whole = c.inputs / Kind::K;
    for (int64_t s = 0; s < whole; ++s)
      for (int i = 0; i < Kind::ROW_ITEMS; ++i, at += count) *at = Kind::item(row + s * Kind::K, Kind::K, i);
    if (whole < steps)
      for (int i = 0; i < Kind::ROW_ITEMS; ++i, at += count)
        *at = Kind::item(row + whole * Kind::K, c.inputs - whole * Kind::K, i);
  }
}

struct PackedRows {};
struct Sums {};

template <class Kind>
static void multiply_by_vectors(const LinearCall& c) {
  using Row = typename Kind::Row;
  using Weight = typename Kind::Weight;
  constexpr int64_t STEP_BYTES = P * Kind::K * int64_t(sizeof(Weight));
  const int64_t steps = over(c.inputs, Kind::K), panels = over(c.outputs, P);
  const int64_t row_items = steps * Kind::ROW_ITEMS;
  const Bands bands(c.rows, MOST_ROWS, row_items * int64_t(sizeof(Row)));
  const int64_t units = panels * bands.blocks;
  Row* x = static_cast<Row*>(scratch<PackedRows>(c.rows * row_items * int64_t(sizeof(Row))));
  const int64_t block_bytes = MOST_ROWS * row_items * int64_t(sizeof(Row));
  parallel(bands.blocks, over(WORTH_A_THREAD, block_bytes), [&](int64_t from, int64_t to, int) {
    for (int64_t b = from; b < to; ++b) pack_rows<Kind>(c, steps, bands, b, x + bands.begin(b) * row_items);
  });
  parallel(units, over(WORTH_A_THREAD, steps * STEP_BYTES), [&](int64_t from, int64_t to, int) {
    float* sums = static_cast<float*>(scratch<Sums>((bands.band_blocks + 1) * MOST_ROWS * P * 4));
    each_panel(bands, panels, from, to, [&](int64_t panel, int64_t block, int64_t end) {
      const Weight* w = static_cast<const Weight*>(c.packed) + panel * steps * P * Kind::K;
      const int64_t count = end - block, near = count == 1 ? steps : NEAR_BYTES / STEP_BYTES;
      for (int64_t s = 0; s < steps; s += near) {
        const int64_t now = steps - s < near ? steps - s : near;
        const char* here = reinterpret_cast<const char*>(w + s * P * Kind::K);
        for (int64_t b = block; b < end; ++b) {
          const int64_t begin = bands.begin(b), rows = bands.begin(b + 1) - begin;
          Piece p;
          p.a = x + begin * row_items + s * rows * Kind::ROW_ITEMS;
          p.b = here;
          p.steps = now;
          p.sums = sums + (begin - bands.begin(block)) * P;
          p.first = s == 0;
          p.last = s + now == steps;
          p.ahead_step = STEP_BYTES / count;
          p.ahead_second = count == 1 && STEP_BYTES > 64 ? 64 : 0;
          p.ahead = here + (count == 1 ? AHEAD_BYTES : now * STEP_BYTES + (b - block) * now * p.ahead_step);
          p.bias = c.bias ? c.bias + panel * P : nullptr;
          p.out = static_cast<char*>(c.out) + (begin * c.out_stride + panel * P) * (c.out_type == Type::f32 ? 4 : 2);
          p.out_stride = c.out_stride;
          p.columns = c.outputs - panel * P;
          p.out_type = c.out_type;
          multiply_piece_of<Kind>(rows, p);
        }
      }
    });
  });
}

template <class Kind>
static int64_t vector_bytes(int64_t inputs, int64_t outputs) {
  return over(outputs, P) * over(inputs, Kind::K) * Kind::K * P * int64_t(sizeof(typename Kind::Weight));
}

template <class Kind>
static void pack_for_vectors(const void* weight, int64_t stride, void* packed, int64_t inputs, int64_t outputs) {
  using Weight = typename Kind::Weight;
  const int64_t steps = over(inputs, Kind::K);
  parallel(over(outputs, P), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end; ++panel) {
      Weight* to = static_cast<Weight*>(packed) + panel * steps * P * Kind::K;
      for (int64_t n = 0; n < P; ++n) {
        const int64_t output = panel * P + n;
        const Weight* from = static_cast<const Weight*>(weight) + output * stride;
        for (int64_t k = 0; k < steps * Kind::K; ++k)
          to[(k / Kind::K * P + n) * Kind::K + k % Kind::K] =
              output < outputs && k < inputs ? from[k] : Weight{};
      }
    }
  });
}

constexpr int64_t FETCHED_BYTES = 64 << 10;  // of cache lines, worth a thread of their own

// Rows of a packed weight by index: body(row, to) writes one that exists. A row lies in one cache line for each `near` k.
template <class Item, class Body>
OCTAVO_INLINE void each_packed_row(const int64_t* index, Item* out, int64_t rows, int64_t inputs, int64_t outputs,
                                   int64_t near, const Body& body) {
  const int64_t grain = over(FETCHED_BYTES, over(inputs, near) * 64);
  parallel(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      if (index[r] >= 0 && index[r] < outputs)
        body(index[r], out + r * inputs);
      else
        std::memset(out + r * inputs, 0, size_t(inputs) * sizeof(Item));
  });
}

template <class Kind>
static void unpack_rows_of_vectors(const void* packed, const int64_t* index, void* out, int64_t rows, int64_t inputs,
                                   int64_t outputs) {
  using Weight = typename Kind::Weight;
  const int64_t steps = over(inputs, Kind::K);
  each_packed_row(index, static_cast<Weight*>(out), rows, inputs, outputs, Kind::K, [&](int64_t row, Weight* to) {
    const Weight* from = static_cast<const Weight*>(packed) + row / P * steps * P * Kind::K + row % P * Kind::K;
    for (int64_t step = 0; step < inputs / Kind::K; ++step)
      std::memcpy(to + step * Kind::K, from + step * P * Kind::K, Kind::K * sizeof(Weight));
    for (int64_t k = inputs / Kind::K * Kind::K; k < inputs; ++k)
      to[k] = from[k / Kind::K * P * Kind::K + k % Kind::K];
  });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
