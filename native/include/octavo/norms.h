// Root-mean-square norms (Zhang and Sennrich, 2019). Everything is computed in float32 and rounded once, at the end.
//
// Tensors are `rows` of vectors of `width` elements side by side. Where a vector starts is said by strides in elements.
#pragma once
#include "octavo/types.h"

namespace octavo {

// rows x heads vectors: vector (r, h) starts at r * row + h * head.
struct Strides {
  int64_t row, head;
};

struct NormsTable {
  // out = x / rms(x) * weight. Types f32 or bf16, the same for x, weight and out.
  void (*rms_norm)(const void* x, const void* weight, void* out, int64_t rows, int64_t heads, int64_t width,
                   Strides x_at, Strides out_at, float eps, Type type);
  // total = residual + x, in float32; out = total / rms(total) * weight, in `type`, which is the weight's as well.
  // `total` may be `residual` itself. total is contiguous; the others start a row every `*_row` elements.
  void (*add_rms_norm)(const void* x, const void* residual, const void* weight, void* out, float* total, int64_t rows,
                       int64_t width, int64_t x_row, int64_t residual_row, int64_t out_row, float eps, Type x_type, Type residual_type,
                       Type type);
};

}  // namespace octavo
