// Writing packed weights, and rounding floats to int8 and int4. Include after qlinear_x.h.
#pragma once

namespace octavo {
namespace OCTAVO_LEVEL {

// ---- packing ----------------------------------------------------------------------------------

static void pack_int8(const QRows& from, int64_t i, int64_t k, uint8_t* panel, int64_t o) {
  const uint8_t* q = from.q + i * k;
  for (int64_t c = 0; c < blocks_of(k, TILE_K); ++c)
    for (int64_t quad = 0; quad < 16; ++quad)
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t at = c * TILE_K + quad * 4 + j;
        panel[c * 2048 + o / 16 * 1024 + quad * 64 + o % 16 * 4 + j] = at < k ? q[at] : 128;
      }
}

template <class Form>
static void pack_grouped(const QRows& from, int64_t i, int64_t k, uint8_t* panel, int64_t o) {
  constexpr int64_t SPANS = GROUP / Form::SPAN;
  const int64_t groups = blocks_of(k, GROUP), eights = blocks_of(groups, 8);
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* group = const_cast<uint8_t*>(Form::group(panel, g));
    uint8_t* at = group + o / 16 * Form::HALF + o % 16 * 4;
    for (int64_t j = 0; j < GROUP; ++j) {
      const int64_t input = g * GROUP + j;
      const uint8_t q = input < k ? from.q[i * k + input] : Form::ZERO;
      if (Form::BITS == 8)
        at[j / 4 * 64 + j % 4] = q;
      else if (j < 16)
        at[j / 4 * 64 + j % 4] = q;  // the high half follows
      else
        at[(j - 16) / 4 * 64 + j % 4] = uint8_t(at[(j - 16) / 4 * 64 + j % 4] | (q << 4));
    }
    uint8_t* scales = group + Form::WEIGHTS;
    for (int64_t s = 0; s < SPANS; ++s) {
      if (Form::FORM == Scale::half)
        ((uint16_t*)scales)[s * PANEL + o] = ((const uint16_t*)from.scale)[i * groups + g];
      else
        scales[s * PANEL + o] = ((const uint8_t*)from.scale)[(i * groups + g) * SPANS + s];
    }
    if (!Form::MIN) continue;
    uint8_t* minima = scales + Form::SCALES;
    if (Form::FORM == Scale::half)
      ((uint16_t*)minima)[o] = ((const uint16_t*)from.minimum)[i * groups + g];
    else
      minima[o] = ((const uint8_t*)from.minimum)[i * groups + g];
  }
  if (Form::FORM == Scale::k)
    for (int64_t e = 0; e < eights; ++e) {
      uint16_t* outer = (uint16_t*)(panel + e * Form::EIGHT);
      outer[o] = from.outer[i * eights + e];
      if (Form::MIN) outer[PANEL + o] = from.outer_minimum[i * eights + e];
    }
}

static void pack(QKind kind, const QRows& from, int64_t rows, int64_t k, int64_t first_row, void* packed) {
  const int64_t size = panel_bytes(kind, k), begin_panel = first_row / PANEL;
  const int64_t panels = blocks_of(first_row + rows, PANEL) - begin_panel;
  parallel(panels, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      uint8_t* panel = (uint8_t*)packed + (begin_panel + p) * size;
      for (int64_t o = 0; o < PANEL; ++o) {
        const int64_t i = (begin_panel + p) * PANEL + o - first_row;
        if (i < 0 || i >= rows) continue;
        if (kind == QKind::int8)
          pack_int8(from, i, k, panel, o);
        else
          with_grouped(kind, [&](auto form) { pack_grouped<decltype(form)>(from, i, k, panel, o); });
      }
    }
  });
}

// ---- rounding ---------------------------------------------------------------------------------

template <class T>
static void quantize_row_int8(const T* w, int64_t k, uint8_t* q, float* scale) {
  I size = no_sum();
  for (int64_t i = 0; i < k; i += W) size = larger(size, load(w + i, first(k - i)));
  const float most = from_bits(largest(size));
  const F inverse = all(inverse_scale(most));
  alignas(64) int8_t rounded[W == 1 ? 4 : W];
  for (int64_t i = 0; i < k; i += W) {
    round_to_bytes(rounded, mul(load(w + i, first(k - i)), inverse));
    for (int64_t j = 0; j < W && i + j < k; ++j) q[i + j] = uint8_t(rounded[j] + 128);
  }
  *scale = scale_of(most);
}

OCTAVO_INLINE uint16_t to_half(float x) {  // round to nearest even; too large becomes the largest
#if defined(__F16C__)
  const float most = 65504.f;
  return uint16_t(_cvtss_sh(x > most ? most : x < -most ? -most : x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t b;
  std::memcpy(&b, &x, 4);
  const uint32_t sign = (b >> 16) & 0x8000;
  b &= 0x7fffffffu;
  if (b > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (b >= 0x477ff000u) return uint16_t(sign | 0x7bff);
  if (b < 0x38800000u) {  // below the smallest normal: in units of 2^-24
    float size;
    std::memcpy(&size, &b, 4);
    return uint16_t(sign | uint32_t(std::nearbyint(size * 16777216.f)));
  }
  b += 0xfffu + ((b >> 13) & 1);
  return uint16_t(sign | ((b - 0x38000000u) >> 13));
#endif
}
OCTAVO_INLINE float from_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  return half_to_float(h);
#endif
}

// Whole numbers nearest to w / scale in -8..7, as floats, and how far they miss: 32 numbers.
OCTAVO_INLINE float try_int4(const F* w, float scale, F* q) {
  const float inverse = scale == 0.f ? 0.f : 1.f / scale;
  F missed = zero();
  for (int v = 0; v < GROUP / W; ++v) {
    q[v] = max(min(round_even(mul(w[v], all(inverse))), all(7.f)), all(-8.f));
    const F off = sub(w[v], mul(q[v], all(scale)));
    missed = fma(off, off, missed);
  }
  return sum(missed);
}

// The scale is tried with the number of largest size at -8, and a little beyond the range, which clips it: the large
// ones are few. Each try is mended by least squares for its whole numbers. The best one is kept, as an f16.
template <class T>
static void quantize_group_int4(const T* w, int64_t left, uint8_t* q, uint16_t* scale) {
  F part[GROUP / W], whole[GROUP / W];
  alignas(64) float numbers[GROUP];
  for (int v = 0; v < GROUP / W; ++v) {
    part[v] = load(w + v * W, first(left - v * W));
    store(numbers + v * W, part[v]);
  }
  float extreme = 0.f;
  for (int i = 0; i < GROUP; ++i)
    if (std::fabs(numbers[i]) > std::fabs(extreme)) extreme = numbers[i];
  constexpr float RANGES[] = {-8.f, -8.6f, -9.3f, -7.4f, 7.f, 7.6f};
  float best = -1.f, found = 0.f;
  for (float range : RANGES) {
    float tried = from_half(to_half(extreme / range));
    for (int again = 0; again < 2; ++again) {
      const float missed = try_int4(part, tried, whole);
      if (best < 0.f || missed < best) best = missed, found = tried;
      F products = zero(), squares = zero();
      for (int v = 0; v < GROUP / W; ++v) {
        products = fma(part[v], whole[v], products);
        squares = fma(whole[v], whole[v], squares);
      }
      const float below = sum(squares);
      if (below == 0.f) break;
      tried = from_half(to_half(sum(products) / below));
    }
  }
  try_int4(part, found, whole);
  for (int v = 0; v < GROUP / W; ++v) store(numbers + v * W, whole[v]);
  for (int64_t i = 0; i < GROUP && i < left; ++i) q[i] = uint8_t(int(numbers[i]) + 8);
  *scale = to_half(found);
}

template <class Row>
static void for_each_row(const void* w, Type type, int64_t stride, int64_t rows, const Row& row) {
  parallel(rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (type == Type::bf16)
        row((const bf16*)w + i * stride, i);
      else
        row((const float*)w + i * stride, i);
    }
  });
}

static void quantize_int8(const void* w, Type type, int64_t stride, int64_t rows, int64_t k, uint8_t* q, float* scales) {
  for_each_row(w, type, stride, rows, [&](auto from, int64_t i) { quantize_row_int8(from, k, q + i * k, scales + i); });
}

static void quantize_int4(const void* w, Type type, int64_t stride, int64_t rows, int64_t k, uint8_t* q, uint16_t* scales) {
  const int64_t groups = blocks_of(k, GROUP);
  for_each_row(w, type, stride, rows, [&](auto from, int64_t i) {
    for (int64_t g = 0; g < groups; ++g)
      quantize_group_int4(from + g * GROUP, k - g * GROUP, q + i * k + g * GROUP, scales + i * groups + g);
  });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
