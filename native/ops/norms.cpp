// See octavo/norms.h.
#include "octavo/norms.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Elements worth a thread of their own: a region costs as much as norming about this many.
constexpr int64_t GRAIN = 8192;

OCTAVO_INLINE int64_t grain_rows(int64_t elements) { return elements >= GRAIN ? 1 : (GRAIN + elements - 1) / elements; }

// Four sums side by side, added pairwise: the order is the same for every row count and alignment.
struct Squares {
  F a = zero(), b = zero(), c = zero(), d = zero();
};

OCTAVO_INLINE float over(const Squares& s) { return sum(add(add(s.a, s.b), add(s.c, s.d))); }

template <class T>
OCTAVO_INLINE float sum_of_squares(const T* x, int64_t width) {
  Squares s;
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    const F a = load(x + i), b = load(x + i + W), c = load(x + i + 2 * W), d = load(x + i + 3 * W);
    s.a = fma(a, a, s.a);
    s.b = fma(b, b, s.b);
    s.c = fma(c, c, s.c);
    s.d = fma(d, d, s.d);
  }
  for (; i < width; i += W) {
    const F a = load(x + i, first(width - i));
    s.a = fma(a, a, s.a);
  }
  return over(s);
}

// The same for residual + x, which is stored.
template <class X, class R>
OCTAVO_INLINE float add_and_square(const X* x, const R* residual, float* total, int64_t width) {
  Squares s;
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    const F a = add(load(residual + i), load(x + i)), b = add(load(residual + i + W), load(x + i + W));
    const F c = add(load(residual + i + 2 * W), load(x + i + 2 * W));
    const F d = add(load(residual + i + 3 * W), load(x + i + 3 * W));
    store(total + i, a);
    store(total + i + W, b);
    store(total + i + 2 * W, c);
    store(total + i + 3 * W, d);
    s.a = fma(a, a, s.a);
    s.b = fma(b, b, s.b);
    s.c = fma(c, c, s.c);
    s.d = fma(d, d, s.d);
  }
  for (; i < width; i += W) {
    const Left n = first(width - i);
    const F a = add(load(residual + i, n), load(x + i, n));
    store(total + i, a, n);
    s.a = fma(a, a, s.a);
  }
  return over(s);
}

template <class X, class T>
OCTAVO_INLINE void scaled(const X* x, const T* weight, T* out, int64_t width, float by) {
  const F scale = all(by);
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  if (i < width) {
    const Left n = first(width - i);
    store(out + i, mul(mul(load(x + i, n), scale), load(weight + i, n)), n);
  }
}

OCTAVO_INLINE float one_over_rms(float squares, int64_t width, float eps) {
  return 1.f / std::sqrt(squares / float(width) + eps);
}

template <class T>
static void rms_norm_of(const T* x, const T* weight, T* out, int64_t rows, int64_t heads, int64_t width, Strides x_at,
                        Strides out_at, float eps) {
  parallel(rows, grain_rows(heads * width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = x + r * x_at.row + h * x_at.head;
        scaled(from, weight, out + r * out_at.row + h * out_at.head, width,
               one_over_rms(sum_of_squares(from, width), width, eps));
      }
  });
}

static void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t heads, int64_t width,
                     Strides x_at, Strides out_at, float eps, Type type) {
  if (type == Type::bf16)
    rms_norm_of((const bf16*)x, (const bf16*)weight, (bf16*)out, rows, heads, width, x_at, out_at, eps);
  else
    rms_norm_of((const float*)x, (const float*)weight, (float*)out, rows, heads, width, x_at, out_at, eps);
}

template <class X, class R, class T>
static void add_rms_norm_of(const X* x, const R* residual, const T* weight, T* out, float* total, int64_t rows,
                            int64_t width, int64_t x_row, int64_t residual_row, int64_t out_row, float eps) {
  parallel(rows, grain_rows(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* sums = total + r * width;
      const float squares = add_and_square(x + r * x_row, residual + r * residual_row, sums, width);
      scaled(sums, weight, out + r * out_row, width, one_over_rms(squares, width, eps));
    }
  });
}

template <class X, class R>
static void add_rms_norm_to(const X* x, const R* residual, const void* weight, void* out, float* total, int64_t rows,
                            int64_t width, int64_t x_row, int64_t residual_row, int64_t out_row, float eps, Type type) {
  if (type == Type::bf16)
    add_rms_norm_of(x, residual, (const bf16*)weight, (bf16*)out, total, rows, width, x_row, residual_row, out_row, eps);
  else
    add_rms_norm_of(x, residual, (const float*)weight, (float*)out, total, rows, width, x_row, residual_row, out_row, eps);
}

static void add_rms_norm(const void* x, const void* residual, const void* weight, void* out, float* total, int64_t rows,
                         int64_t width, int64_t x_row, int64_t residual_row, int64_t out_row, float eps, Type x_type, Type residual_type,
                         Type type) {
  if (x_type == Type::bf16 && residual_type == Type::bf16)
    add_rms_norm_to((const bf16*)x, (const bf16*)residual, weight, out, total, rows, width, x_row, residual_row, out_row, eps, type);
  else if (x_type == Type::bf16)
    add_rms_norm_to((const bf16*)x, (const float*)residual, weight, out, total, rows, width, x_row, residual_row, out_row, eps, type);
  else if (residual_type == Type::bf16)
    add_rms_norm_to((const float*)x, (const bf16*)residual, weight, out, total, rows, width, x_row, residual_row, out_row, eps, type);
  else
    add_rms_norm_to((const float*)x, (const float*)residual, weight, out, total, rows, width, x_row, residual_row, out_row, eps, type);
}

extern const NormsTable norms_table;
const NormsTable norms_table = {rms_norm, add_rms_norm};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
