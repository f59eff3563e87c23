// Matrix products of weights in bf16 and float32, packed once.
//
// out[r][n] = sum over k of x[r][k] * weight[n][k], + bias[n]. Sums are in float32, in one order of k for every number of
// rows and threads; the bias is added to the sum in float32, and the result is rounded once.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct LinearCall {
  const void* x;      // rows of `inputs` elements of `type`, `x_stride` elements apart
  int64_t x_stride;
  const void* packed; // what `pack` wrote, on a cache line
  const float* bias;  // one for each output, or null
  void* out;          // rows of `outputs` elements of `out_type`, `out_stride` elements apart
  int64_t out_stride;
  int64_t rows, inputs, outputs;
  Type type, out_type;  // f32 or bf16
  // Where it is not null, of each row of out only gated[r][i] = silu(out[r][i]) * out[r][outputs / 2 + i] is wanted,
  // with the bits that the two operators give one after the other. `out` is then working memory.
  void* gated = nullptr;
  int64_t gated_stride = 0;
};

struct LinearTable {
  const char* (*layout)(Type type);  // the name of the packed form: equal names, equal bytes
  int64_t (*packed_bytes)(int64_t inputs, int64_t outputs, Type type);
  // weight: `outputs` rows of `inputs` elements, `stride` elements apart.
  void (*pack)(const void* weight, int64_t stride, void* packed, int64_t inputs, int64_t outputs, Type type);
  void (*multiply)(const LinearCall& call);
  // out[r] = row index[r] of the weight that `pack` was given, to the bit; zeros for an index outside 0 .. outputs.
  void (*unpack_rows)(const void* packed, const int64_t* index, void* out, int64_t rows, int64_t inputs, int64_t outputs,
                      Type type);
};

}  // namespace octavo
