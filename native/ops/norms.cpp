// See octavo/norms.h.
#include "octavo/norms.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

template <class T>
static void rms_norm_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t width, int64_t x_stride,
                          int64_t out_stride, float eps) {
  parallel(rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const T* from = x + r * x_stride;
      T* to = out + r * out_stride;
      F squares = zero();
      for (int64_t i = 0; i < width; i += W) {
        F v = load(from + i, first(width - i));
        squares = fma(v, v, squares);
      }
      const F scale = all(1.f / std::sqrt(sum(squares) / float(width) + eps));
      for (int64_t i = 0; i < width; i += W) {
        const Left n = first(width - i);
        alignas(64) T rounded[W];
        store(rounded, mul(load(from + i, n), scale));
        store(to + i, mul(load(rounded), load(weight + i, n)), n);
      }
    }
  });
}

static void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t width, int64_t x_stride,
                     int64_t out_stride, float eps, Type type) {
  if (type == Type::bf16)
    rms_norm_rows((const bf16*)x, (const bf16*)weight, (bf16*)out, rows, width, x_stride, out_stride, eps);
  else
    rms_norm_rows((const float*)x, (const float*)weight, (float*)out, rows, width, x_stride, out_stride, eps);
}

extern const NormsTable norms_table;
const NormsTable norms_table = {rms_norm};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
