// See octavo/pointwise.h.
#include "octavo/pointwise.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Columns in one task, and tasks worth a thread of their own.
constexpr int64_t COLUMNS = 512, GRAIN = 16;

struct Silu {
  OCTAVO_INLINE F of(F x) { return div(x, add(all(1.f), exp(sub(zero(), x)))); }
};

// The error function to 1.5e-7: Abramowitz and Stegun, 7.1.26. x (1 + erf(x / sqrt 2)) / 2 is x - x tail / 2 above zero
// and x tail / 2 below, with tail = 1 - erf(|x| / sqrt 2), so that nothing cancels far below zero.
struct Gelu {
  OCTAVO_INLINE F of(F x) {
    const F size = max(x, sub(zero(), x));
    const F z = mul(size, all(0.70710678118654752f));
    const F t = div(all(1.f), fma(z, all(0.3275911f), all(1.f)));
    F p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    const F tail = mul(mul(p, t), exp(sub(zero(), mul(z, z))));
    // max(x, 0) - |x| tail / 2
    return sub(max(x, zero()), mul(mul(size, all(0.5f)), tail));
  }
};

// (1 + tanh u) / 2 is 1 / (1 + e^-2u).
struct GeluTanh {
  OCTAVO_INLINE F of(F x) {
    const F cube = mul(mul(x, x), x);
    const F u = mul(fma(cube, all(0.044715f), x), all(-1.5957691216057308f));  // -2 sqrt(2 / pi)
    return div(x, add(all(1.f), exp(u)));
  }
};

template <class Act, class T>
static void gated_of(const T* x, T* out, int64_t rows, int64_t width, int64_t x_row) {
  const int64_t pieces = (width + COLUMNS - 1) / COLUMNS;
  parallel(rows * pieces, GRAIN, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / pieces, from = task % pieces * COLUMNS;
      const int64_t to = from + COLUMNS < width ? from + COLUMNS : width;
      const T *gate = x + r * x_row, *up = gate + width;
      T* answer = out + r * width;
      int64_t i = from;
      for (; i + W <= to; i += W) store(answer + i, mul(Act::of(load(gate + i)), load(up + i)));
      if (i < to) {
        const Left n = first(to - i);
        store(answer + i, mul(Act::of(load(gate + i, n)), load(up + i, n)), n);
      }
    }
  });
}

template <class Act>
static void gated_to(const void* x, void* out, int64_t rows, int64_t width, int64_t x_row, Type type) {
  if (type == Type::bf16)
    gated_of<Act>((const bf16*)x, (bf16*)out, rows, width, x_row);
  else
    gated_of<Act>((const float*)x, (float*)out, rows, width, x_row);
}

static void gated(const void* x, void* out, int64_t rows, int64_t width, int64_t x_row, Gate gate, Type type) {
  if (gate == Gate::silu)
    gated_to<Silu>(x, out, rows, width, x_row, type);
  else if (gate == Gate::gelu)
    gated_to<Gelu>(x, out, rows, width, x_row, type);
  else
    gated_to<GeluTanh>(x, out, rows, width, x_row, type);
}

extern const PointwiseTable pointwise_table;
const PointwiseTable pointwise_table = {gated};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
