// What becomes of the sums of a block of rows by a panel of outputs: biased, rounded, gated, written.
// Included by linear_tiles.h.
#pragma once
#include "activations.h"
#include "linear_vector.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t TILE_K = 32, TILE_ROWS = 16, PANEL = 32, BLOCK = 32, LINE_BYTES = 64;

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

OCTAVO_INLINE void store_both(float* to, F a, F b) {
  store(to, a);
  store(to + W, b);
}
OCTAVO_INLINE void store_both(bf16* to, F a, F b) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }

template <class T>
OCTAVO_INLINE void finish_rows(const float* sums, T* out, int64_t out_stride, int64_t rows, int64_t columns,
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

// Sums that are only rounded to bf16 and written, or multiplied by their gates as well: whole panels without a bias.
struct QuickRows {
  const float* from = nullptr;
  char* to = nullptr;
  int64_t stride = 0;  // bytes
  int64_t rows = 0;    // left
  const char* gates = nullptr;  // of the same columns, rounded to bf16, a line a row
  bool far = false;             // to memory, past the caches

  inline __m512i value() const {
    const __m512i sum = (__m512i)_mm512_cvtne2ps_pbh(load(from + W), load(from));
    if (!gates) return sum;
    const __m512i gate = _mm512_load_si512(gates);
    const auto half = [](__m512i x, int i) {
      return widen(i ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
    };
    const F low = mul(Silu::of(half(gate, 0)), half(sum, 0)), high = mul(Silu::of(half(gate, 1)), half(sum, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  inline void row() {
    const __m512i x = value();
    if (far)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), x);
    else
      _mm512_storeu_si512(to, x);
    from += PANEL;
    to += stride;
    if (gates) gates += LINE_BYTES;
  }
  inline void two() {
    if (rows < 2) return;
    row();
    row();
    rows -= 2;
  }
  inline void rest() {
    for (; rows > 0; --rows) row();
  }
};

// The sums of one block, until they are added to the bias, rounded and written: that is done a few rows at each step of
// the next block, when they have long reached the cache, and so that the writes never wait in a queue.
struct FinishedSums {
  alignas(64) float sums[BLOCK * PANEL];
  const float* next = nullptr;
  const float* bias = nullptr;
  const char* gates = nullptr;
  char* out = nullptr;
  int64_t rows = 0;  // left
  int64_t columns = 0, out_stride = 0;
  Type type = Type::f32;
  bool far = false;

  // As `row_of_gates`, that many lines, when they are gates; `gates`: theirs, when they are to be multiplied by them.
  void take(const LinearCall& c, const BlockOfRows& block, int64_t panel, bool goes_far, char* row_of_gates,
            bool are_gates) {
    const int64_t first = block.from - block.begin;
    type = c.out_type;
    rows = block.end - block.from;
    next = sums + first * PANEL;
    bias = c.bias ? c.bias + panel * PANEL : nullptr;
    columns = c.outputs - panel * PANEL;
    gates = are_gates ? nullptr : row_of_gates;
    far = goes_far && !are_gates;
    if (are_gates) {
      out = row_of_gates;
      out_stride = PANEL;
      return;
    }
    out_stride = c.gated ? c.gated_stride : c.out_stride;
    out = static_cast<char*>(c.gated ? c.gated : c.out) +
          (block.from * out_stride + panel * PANEL) * (type == Type::f32 ? 4 : 2);
  }
  // What is left, where it can be written quickly; it is the caller's then.
  inline QuickRows give_quick() {
    if (type != Type::bf16 || bias || columns < PANEL) return {};
    const QuickRows quick{next, out, out_stride * 2, rows, gates, far};
    rows = 0;
    return quick;
  }
  // Apart: within the loop over steps it would take the registers of the loop.
  __attribute__((noinline)) void write(int64_t most) {
    QuickRows quick = give_quick();
    if (quick.rows) return quick.rest();
    const int64_t n = rows < most ? rows : most;
    if (type == Type::f32)
      finish_rows(next, reinterpret_cast<float*>(out), out_stride, n, columns, bias);
    else
      finish_rows(next, reinterpret_cast<bf16*>(out), out_stride, n, columns, bias);
    next += n * PANEL;
    out += n * out_stride * (type == Type::f32 ? 4 : 2);
    rows -= n;
  }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
