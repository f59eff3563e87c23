// Norms and gated activations. Row-major tensors, `rows` of `width`; a row starts every `*_stride` elements.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct NormsTable {
  // out = x / rms(x) * weight, computed in float32 (Zhang and Sennrich, 2019); the normed value is rounded to the
  // type before it is scaled, as Llama's is. Types: f32 or bf16, the same for x, weight and out.
  void (*rms_norm)(const void* x, const void* weight, void* out, int64_t rows, int64_t width, int64_t x_stride,
                   int64_t out_stride, float eps, Type type);
};

}  // namespace octavo
