// Matrix products of quantized weights (int8, int4 in groups, GGUF's blocks), packed once.
//
// A weight [columns, K] (an output each row) is one or more parts, each of one kind. The products of integers are exact;
// the float steps come in one order for each output, whatever the number of rows and threads, and whatever instruction
// made the integers.
//
// Activations are rounded to int8 for each row: kind int8 with one scale a row, the others with one scale for 32 inputs.
#pragma once
#include "octavo/types.h"

namespace octavo {

// q is what is stored, 8 or 4 bits, unsigned; z its zero point.
enum class QKind : int32_t {
  int8 = 0,            // (q - 128) * scale of the row, f32
  int8_half = 1,       // (q - 128) * scale, an f16 for 32 inputs
  int8_half_min = 2,   // q * scale + minimum, two f16 for 32 inputs
  int8_k = 3,          // (q - 128) * fine * outer: an s8 for 16 inputs, an f16 for 256
  int8_k_min = 4,      // q * fine * outer - fine minimum * outer minimum: two u8 for 32 inputs, two f16 for 256
  int4_half = 5,       // (q - 8) * scale, as int8_half
  int4_half_min = 6,   // as int8_half_min
  int4_k_min = 7,      // as int8_k_min
};
constexpr int NUM_QKINDS = 8;

// One part of a weight. All fields are 64 bits wide, so that the caller can fill an array of numbers.
struct QPart {
  int64_t kind;
  int64_t columns;  // outputs
  int64_t first;    // where its outputs start in a row of the result
  int64_t packed;   // address, on a cache line
  int64_t scales;   // kind int8: address of f32 [columns rounded up to 32]
};

// Integers and scales of rows of a weight in plain order, to be packed. What a kind has not is null.
struct QRows {
  const uint8_t* q;        // [rows, K], 0..15 or 0..255
  const void* scale;       // f16 [rows, groups], or s8 / u8 fine scales [rows, groups]
  const void* minimum;     // the same for minima
  const uint16_t* outer;   // f16 [rows, K / 256]
  const uint16_t* outer_minimum;
};

struct QLinearTable {
  // Bytes of a packed part, a multiple of 64. The layout is the same at every level.
  int64_t (*packed_bytes)(QKind kind, int64_t columns, int64_t k);
  // Write rows `first` .. `first + rows` of a part.
  void (*pack)(QKind kind, const QRows& rows_of, int64_t rows, int64_t k, int64_t first, void* packed);
  // out[rows, *] = x[rows, k] @ weight.T + bias (f32, or null), rows `x_stride` and `out_stride` elements apart.
  void (*multiply)(const QPart* parts, int64_t num_parts, const float* bias, const void* x, Type x_type, int64_t x_stride,
                   void* out, Type out_type, int64_t out_stride, int64_t rows, int64_t k);
  // One scale a row: q[rows, k] = round(w / scale) + 128 with |w| / scale <= 127; scales f32 [rows].
  void (*quantize_int8)(const void* w, Type type, int64_t w_stride, int64_t rows, int64_t k, uint8_t* q, float* scales);
  // An f16 scale for 32 inputs: q in 0..15, (q - 8) * scale nearest to w in squares, among the scales tried.
  void (*quantize_int4)(const void* w, Type type, int64_t w_stride, int64_t rows, int64_t k, uint8_t* q, uint16_t* scales);
};

}  // namespace octavo
