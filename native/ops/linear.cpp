// See octavo/linear.h. What packing and multiplication do stands in linear_vector.h, and in linear_tiles.h for AMX.
#include "linear_vector.h"
#include "octavo/pointwise.h"
#if defined(OCTAVO_LEVEL_AMX)
#include "linear_tiles.h"
#endif

namespace octavo {
namespace OCTAVO_LEVEL {

#if defined(OCTAVO_LEVEL_AMX)
#define OCTAVO_HALF_LAYOUT "bf16 tiles 32x32"
#elif defined(__AVX512F__)
#define OCTAVO_HALF_LAYOUT "bf16 pairs of 32"
#elif defined(__AVX2__)
#define OCTAVO_HALF_LAYOUT "bf16 pairs of 16"
#else
#define OCTAVO_HALF_LAYOUT "bf16 pairs of 8"
#endif
#if defined(__AVX512F__)
#define OCTAVO_SINGLE_LAYOUT "f32 by 32"
#elif defined(__AVX2__)
#define OCTAVO_SINGLE_LAYOUT "f32 by 16"
#else
#define OCTAVO_SINGLE_LAYOUT "f32 by 8"
#endif

static const char* layout(Type type) { return type == Type::f32 ? OCTAVO_SINGLE_LAYOUT : OCTAVO_HALF_LAYOUT; }

static int64_t packed_bytes(int64_t inputs, int64_t outputs, Type type) {
  if (type == Type::f32) return vector_bytes<Single>(inputs, outputs);
#if defined(OCTAVO_LEVEL_AMX)
  return tile_bytes(inputs, outputs);
#else
  return vector_bytes<Half>(inputs, outputs);
#endif
}

static void pack(const void* weight, int64_t stride, void* packed, int64_t inputs, int64_t outputs, Type type) {
  if (type == Type::f32) return pack_for_vectors<Single>(weight, stride, packed, inputs, outputs);
#if defined(OCTAVO_LEVEL_AMX)
  pack_for_tiles(weight, stride, packed, inputs, outputs);
#else
  pack_for_vectors<Half>(weight, stride, packed, inputs, outputs);
#endif
}

extern const PointwiseTable pointwise_table;

static void multiply(const LinearCall& call) {
  if (call.rows == 0 || call.outputs == 0) return;
  if (call.gated) {
#if defined(OCTAVO_LEVEL_AMX)
    if (gates_by_tiles(call)) return multiply_by_tiles(call);
#endif
    LinearCall plain = call;
    plain.gated = nullptr;
    multiply(plain);
    return pointwise_table.gated(call.out, call.gated, call.rows, call.outputs / 2, call.out_stride, call.gated_stride,
                                 Gate::silu, call.out_type);
  }
  if (call.type == Type::f32) return multiply_by_vectors<Single>(call);
#if defined(OCTAVO_LEVEL_AMX)
  multiply_by_tiles(call);
#else
  multiply_by_vectors<Half>(call);
#endif
}

static void unpack_rows(const void* packed, const int64_t* index, void* out, int64_t rows, int64_t inputs,
                        int64_t outputs, Type type) {
  if (type == Type::f32) return unpack_rows_of_vectors<Single>(packed, index, out, rows, inputs, outputs);
#if defined(OCTAVO_LEVEL_AMX)
  unpack_rows_of_tiles(packed, index, out, rows, inputs, outputs);
#else
  unpack_rows_of_vectors<Half>(packed, index, out, rows, inputs, outputs);
#endif
}

extern const LinearTable linear_table;
const LinearTable linear_table = {layout, packed_bytes, pack, multiply, unpack_rows};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
