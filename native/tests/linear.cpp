// Packed products against a plain loop, and that a row's bits do not depend on the rows beside it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "octavo/levels.h"

namespace octavo {
namespace {

uint16_t rounded(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return uint16_t((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
}
float widened(uint16_t bits) {
  uint32_t b = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
float some(size_t i) { return float(std::sin(double(i) * 0.7)); }

struct Numbers {  // the same numbers in both types
  std::vector<float> wide;
  std::vector<uint16_t> half;
  explicit Numbers(int64_t n) : wide(size_t(n)), half(size_t(n)) {
    for (size_t i = 0; i < wide.size(); ++i) {
      half[i] = rounded(some(i));
      wide[i] = widened(half[i]);
    }
  }
  const void* as(Type type) const { return type == Type::f32 ? (const void*)wide.data() : half.data(); }
};

void check(int64_t inputs, int64_t outputs, Type type, const int64_t all_rows = 45) {
  const LinearTable& linear = *current_level().linear;
  const Numbers x(all_rows * inputs), w(outputs * inputs), bias(outputs);
  const size_t bytes = size_t(linear.packed_bytes(inputs, outputs, type));
  void* packed = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  linear.pack(w.as(type), inputs, packed, inputs, outputs, type);
  std::vector<float> out(size_t(all_rows * outputs)), part(out.size());
  LinearCall call{x.as(type), inputs, packed, bias.wide.data(), out.data(), outputs, all_rows, inputs, outputs, type, Type::f32};
  linear.multiply(call);
  for (int64_t r = 0; r < all_rows; ++r)
    for (int64_t n = 0; n < outputs; ++n) {
      double want = bias.wide[size_t(n)];
      for (int64_t k = 0; k < inputs; ++k)
        want += double(x.wide[size_t(r * inputs + k)]) * w.wide[size_t(n * inputs + k)];
      const float got = out[size_t(r * outputs + n)];
      if (std::fabs(got - want) > 1e-5 * double(inputs)) {
        std::printf("linear %ld x %ld: row %ld, output %ld: %g, not %g\n", long(inputs), long(outputs), long(r), long(n),
                    double(got), want);
        std::exit(1);
      }
    }
  call.out = part.data();
  for (call.rows = 1; call.rows < all_rows; call.rows += all_rows / 9) {
    linear.multiply(call);
    if (std::memcmp(part.data(), out.data(), size_t(call.rows * outputs) * 4)) {
      std::printf("linear %ld x %ld: other bits for %ld rows\n", long(inputs), long(outputs), long(call.rows));
      std::exit(1);
    }
  }
  std::vector<uint16_t> narrow(out.size());
  call.rows = all_rows;
  call.out = narrow.data();
  call.out_type = Type::bf16;
  linear.multiply(call);
  for (size_t i = 0; i < out.size(); ++i)
    if (narrow[i] != rounded(out[i])) {
      std::printf("linear %ld x %ld: not rounded once\n", long(inputs), long(outputs));
      std::exit(1);
    }
  std::vector<int64_t> index;
  for (int64_t n = -1; n <= outputs; ++n) index.push_back(n);
  const size_t row_bytes = size_t(inputs) * (type == Type::f32 ? 4 : 2);
  std::vector<char> rows(index.size() * row_bytes, 1), zeros(row_bytes);
  linear.unpack_rows(packed, index.data(), rows.data(), int64_t(index.size()), inputs, outputs, type);
  for (size_t r = 0; r < index.size(); ++r) {
    const bool there = index[r] >= 0 && index[r] < outputs;
    const char* want = there ? (const char*)w.as(type) + size_t(index[r]) * row_bytes : zeros.data();
    if (std::memcmp(rows.data() + r * row_bytes, want, row_bytes)) {
      std::printf("linear %ld x %ld: row %ld is not what was packed\n", long(inputs), long(outputs), long(index[r]));
      std::exit(1);
    }
  }
  std::free(packed);
}

// A product whose halves are multiplied is the product and then the gate, rows apart and written past the caches or not.
void check_gated(int64_t inputs, int64_t half, int64_t rows) {
  const LinearTable& linear = *current_level().linear;
  const int64_t outputs = 2 * half, wide = outputs + 32, apart = half + 32;
  const Numbers x(rows * inputs), w(outputs * inputs);
  const size_t bytes = size_t(linear.packed_bytes(inputs, outputs, Type::bf16));
  void* packed = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  linear.pack(w.half.data(), inputs, packed, inputs, outputs, Type::bf16);
  std::vector<uint16_t> out(size_t(rows * wide)), want(size_t(rows * half));
  const size_t size = size_t(rows * apart) * 2 / 64 * 64 + 64;
  auto* got = static_cast<uint16_t*>(std::aligned_alloc(64, size));
  std::memset(got, 1, size);
  LinearCall call{x.half.data(), inputs, packed, nullptr, out.data(), wide, rows, inputs, outputs, Type::bf16, Type::bf16};
  linear.multiply(call);
  current_level().pointwise->gated(out.data(), want.data(), rows, half, wide, half, Gate::silu, Type::bf16);
  call.gated = got;
  call.gated_stride = apart;
  linear.multiply(call);
  for (int64_t r = 0; r < rows; ++r)
    if (std::memcmp(got + r * apart, want.data() + r * half, size_t(half) * 2) || got[r * apart + half] != 0x0101) {
      std::printf("gated linear %ld x %ld: row %ld\n", long(inputs), long(outputs), long(r));
      std::exit(1);
    }
  std::free(got);
  std::free(packed);
}

}  // namespace

void check_linear() {
  check_gated(100, 64, 7);
  check_gated(100, 64, 190);
  check_gated(1100, 33, 190);
  check_gated(700, 96, 177);
  check_gated(40, 2048, 1100);  // past the caches
  for (Type type : {Type::f32, Type::bf16}) {
    check(1, 1, type);
    check(7, 33, type);
    check(64, 96, type);
    check(577, 40, type);
    check(2090, 40, type, 200);  // sums wait in memory
  }
}

}  // namespace octavo
