// See octavo/pointwise.h.
#include "octavo/pointwise.h"

#include "activations.h"
#include "octavo/parallel.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Columns in one task, and tasks worth a thread of their own.
constexpr int64_t COLUMNS = 512, GRAIN = 16;

template <class Act, class T>
static void gated_of(const T* x, T* out, int64_t rows, int64_t width, int64_t x_row, int64_t out_row) {
  const int64_t pieces = (width + COLUMNS - 1) / COLUMNS;
  parallel(rows * pieces, GRAIN, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / pieces, from = task % pieces * COLUMNS;
      const int64_t to = from + COLUMNS < width ? from + COLUMNS : width;
      const T *gate = x + r * x_row, *up = gate + width;
      T* answer = out + r * out_row;
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
static void gated_to(const void* x, void* out, int64_t rows, int64_t width, int64_t x_row, int64_t out_row,
                     Type type) {
  if (type == Type::bf16)
    gated_of<Act>((const bf16*)x, (bf16*)out, rows, width, x_row, out_row);
  else
    gated_of<Act>((const float*)x, (float*)out, rows, width, x_row, out_row);
}

static void gated(const void* x, void* out, int64_t rows, int64_t width, int64_t x_row, int64_t out_row, Gate gate, Type type) {
  if (gate == Gate::silu)
    gated_to<Silu>(x, out, rows, width, x_row, out_row, type);
  else if (gate == Gate::gelu)
    gated_to<Gelu>(x, out, rows, width, x_row, out_row, type);
  else
    gated_to<GeluTanh>(x, out, rows, width, x_row, out_row, type);
}

extern const PointwiseTable pointwise_table;
const PointwiseTable pointwise_table = {gated};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
