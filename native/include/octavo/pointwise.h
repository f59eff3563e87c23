// Gated activations: rows of 2 * width become rows of width, act(first half) * second half (Shazeer, 2020).
//
// Computed in float32 and rounded once. A row of x starts every `x_row` elements, one of out every
// `out_row`.
#pragma once
#include "octavo/types.h"

namespace octavo {

enum class Gate : int32_t { silu = 0, gelu = 1, gelu_tanh = 2 };

struct PointwiseTable {
  // Types f32 or bf16, the same for x and out.
  void (*gated)(const void* x, void* out, int64_t rows, int64_t width, int64_t x_row, int64_t out_row, Gate gate, Type type);
};

}  // namespace octavo
