// Products with quantized weights against plain loops: every kind, odd sizes, one row and many.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "octavo/levels.h"

namespace octavo {
namespace {

struct Kind {
  QKind kind;
  int zero, span;  // inputs that a scale is for; 0: a row
  bool four, outer, minimum;
};
const Kind KINDS[] = {
    {QKind::int8, 128, 0, false, false, false},      {QKind::int8_half, 128, 32, false, false, false},
    {QKind::int8_half_min, 0, 32, false, false, true}, {QKind::int8_k, 128, 16, false, true, false},
    {QKind::int8_k_min, 0, 32, false, true, true},   {QKind::int4_half, 8, 32, true, false, false},
    {QKind::int4_half_min, 0, 32, true, false, true}, {QKind::int4_k_min, 0, 32, true, true, true},
};
constexpr uint16_t HALVES[] = {0x3800, 0x3c00, 0x3e00, 0x4000};  // 0.5, 1, 1.5 and 2 as f16
constexpr double VALUES[] = {0.5, 1, 1.5, 2};

uint32_t next(uint32_t& state) { return (state = state * 1664525u + 1013904223u) >> 8; }

struct Aligned {
  explicit Aligned(int64_t bytes) : at(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64))) {
    std::memset(at, 0, size_t(bytes));
  }
  ~Aligned() { std::free(at); }
  Aligned(const Aligned&) = delete;
  void* at;
};

void fail(const Kind& kind, int64_t rows, int64_t outputs, int64_t k, double got, double want) {
  std::printf("qlinear: kind %d, %ld rows, %ld x %ld: %g, not %g\n", int(kind.kind), long(rows), long(outputs), long(k), got, want);
  std::exit(1);
}

// What an activation's int8 number stands for.
void round_x(const std::vector<float>& x, int64_t rows, int64_t k, bool by_row, std::vector<double>& out) {
  const int64_t span = by_row ? k : 32;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t begin = 0; begin < k; begin += span) {
      const int64_t end = begin + span < k ? begin + span : k;
      float most = 0;
      for (int64_t i = begin; i < end; ++i) most = std::fmax(most, std::fabs(x[size_t(r * k + i)]));
      const float inverse = most == 0 ? 0 : 127.f / most, scale = most / 127.f;
      for (int64_t i = begin; i < end; ++i)
        out[size_t(r * k + i)] = double(std::nearbyint(x[size_t(r * k + i)] * inverse)) * double(scale);
    }
}

void check(const Kind& kind, int64_t outputs, int64_t k, int64_t rows) {
  uint32_t seed = uint32_t(outputs * 31 + k);
  const int64_t groups = (k + 31) / 32, spans = kind.span ? groups * 32 / kind.span : 1, eights = (groups + 7) / 8;
  std::vector<uint8_t> q(size_t(outputs * k)), fine(size_t(outputs * spans)), fine_min(size_t(outputs * groups));
  std::vector<uint16_t> half(size_t(outputs * groups)), half_min(half.size()), outer(size_t(outputs * eights)), outer_min(outer.size());
  std::vector<double> w(q.size());
  const int64_t padded = (outputs + 31) / 32 * 32;
  Aligned scales(padded * 4);
  std::vector<int> pick(half.size()), pick_min(half.size()), pick_outer(outer.size());
  for (size_t i = 0; i < half.size(); ++i) {
    pick[i] = int(next(seed) % 4), pick_min[i] = int(next(seed) % 4);
    half[i] = HALVES[pick[i]], half_min[i] = HALVES[pick_min[i]];
  }
  for (size_t i = 0; i < outer.size(); ++i) pick_outer[i] = int(next(seed) % 4), outer[i] = outer_min[i] = HALVES[pick_outer[i]];
  for (uint8_t& f : fine) f = uint8_t(next(seed) % 64);
  for (uint8_t& f : fine_min) f = uint8_t(next(seed) % 64);
  for (int64_t o = 0; o < outputs; ++o) {
    static_cast<float*>(scales.at)[o] = float(VALUES[o % 4]);
    for (int64_t i = 0; i < k; ++i) {
      const size_t at = size_t(o * k + i), group = size_t(o * groups + i / 32), eight = size_t(o * eights + i / 256);
      q[at] = uint8_t(next(seed) % (kind.four ? 16 : 256));
      const double number = double(q[at]) - kind.zero;
      if (!kind.span)
        w[at] = number * VALUES[o % 4];
      else if (kind.outer)
        w[at] = number * fine[size_t(o * spans + i / kind.span)] * VALUES[pick_outer[eight]] -
                (kind.minimum ? fine_min[group] * VALUES[pick_outer[eight]] : 0);
      else
        w[at] = number * VALUES[pick[group]] + (kind.minimum ? VALUES[pick_min[group]] : 0);
    }
  }
  const QLinearTable& ops = *current_level().qlinear;
  Aligned packed(ops.packed_bytes(kind.kind, outputs, k));
  const void* scale = kind.outer ? static_cast<const void*>(fine.data()) : half.data();
  const void* minimum = kind.outer ? static_cast<const void*>(fine_min.data()) : half_min.data();
  ops.pack(kind.kind, {q.data(), scale, minimum, outer.data(), outer_min.data()}, outputs, k, 0, packed.at);

  std::vector<float> x(size_t(rows * k)), out(size_t(rows * outputs)), bias(size_t(outputs), 0.25f);
  for (float& v : x) v = float(int(next(seed) % 2001) - 1000) / 500.f;
  std::vector<double> rounded(x.size());
  round_x(x, rows, k, !kind.span, rounded);
  const QPart part{int64_t(kind.kind), outputs, 0, int64_t(packed.at), int64_t(scales.at)};
  ops.multiply(&part, 1, bias.data(), x.data(), Type::f32, k, out.data(), Type::f32, outputs, rows, k);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      double want = 0.25, size = 1;
      for (int64_t i = 0; i < k; ++i) {
        const double product = rounded[size_t(r * k + i)] * w[size_t(o * k + i)];
        want += product, size += std::fabs(product);
      }
      const double got = out[size_t(r * outputs + o)];
      if (!(std::fabs(got - want) <= 1e-5 * size)) fail(kind, rows, outputs, k, got, want);
    }
}

}  // namespace

void check_qlinear() {
  for (const Kind& kind : KINDS)
    for (int64_t rows : {1, 6, 35})
      for (int64_t outputs : {1, 33, 64})
        for (int64_t k : {256, 512, 40, 97})
          if (!kind.outer || k % 256 == 0) check(kind, outputs, k, rows);
  check(KINDS[0], 40, 2200, 20);  // more inputs than are summed at once
  std::vector<float> w(5 * 70), scales(5);
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::sin(float(i));
  std::vector<uint8_t> q(w.size());
  std::vector<uint16_t> halves(5 * 3);
  current_level().qlinear->quantize_int8(w.data(), Type::f32, 70, 5, 70, q.data(), scales.data());
  for (size_t i = 0; i < w.size(); ++i)
    if (std::fabs((int(q[i]) - 128) * scales[i / 70] - w[i]) > 0.51f * scales[i / 70]) fail(KINDS[0], 0, 5, 70, q[i], w[i]);
  current_level().qlinear->quantize_int4(w.data(), Type::f32, 70, 5, 70, q.data(), halves.data());
  for (uint8_t number : q)
    if (number > 15) fail(KINDS[5], 0, 5, 70, number, 15);
}

}  // namespace octavo
