// Keys and values to a cache of fewer bits: one scale for each token and head, so that no value is cut off and no
// calibration is needed. Included by attention.cpp.
#pragma once
#include "attention_unit.h"
#include "octavo/parallel.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr float S8_MOST = 127.f, FP8_MOST = 448.f;
constexpr int64_t WRITE_GRAIN = 4096;  // elements worth a thread of their own

// To the nearest even; |x| at most 127.
OCTAVO_INLINE uint8_t s8_code(float x) {
  return uint8_t(int32_t((x + 12582912.f) - 12582912.f));  // 1.5 * 2^23
}

// To e4m3, to the nearest even; |x| at most 448. What is below e4m3's normal numbers becomes zero, 2^-15 of the highest:
// readers then need not know of others.
OCTAVO_INLINE uint8_t fp8_code(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 31 << 7, positive = bits & 0x7fffffffu;
  const uint32_t code = ((positive + 0x7ffffu + ((positive >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  return uint8_t(sign | (positive < (127u - 6u) << 23 ? 0 : code));
}

template <Type KV, class T>
static void write_row(const T* from, uint8_t* to, float* scale, int64_t dim) {
  constexpr float LIMIT = KV == Type::s8 ? S8_MOST : FP8_MOST;
  F top = zero();
  for (int64_t d = 0; d < dim; d += W) {
    const F x = load(from + d, first(dim - d));
    top = max(top, max(x, sub(zero(), x)));
  }
  const float high = highest(top);
  *scale = high / LIMIT;
  const F by = all(high > 0.f ? LIMIT / high : 0.f), limit = all(LIMIT), lowest = all(-LIMIT);
  for (int64_t d = 0; d < dim; d += 32) {
    alignas(64) float x[32];
    alignas(32) uint8_t codes[32];
    for (int64_t i = 0; i < 32; i += W)
      store(x + i, min(max(mul(load(from + d + i, first(dim - d - i)), by), lowest), limit));
    for (int64_t i = 0; i < 32; ++i) codes[i] = KV == Type::s8 ? s8_code(x[i]) : fp8_code(x[i]);
    std::memcpy(to + d, codes, size_t(least(32, dim - d)));
  }
}

template <Type KV, class T>
static void write_all(const AttentionWrite& w) {
  const int64_t elements = 2 * w.kv_heads * w.head_dim;
  parallel(w.tokens, (WRITE_GRAIN + elements - 1) / elements, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      if (w.slots[t] < 0) continue;
      const int64_t block = w.slots[t] / w.block_size, offset = w.slots[t] % w.block_size;
      for (int64_t h = 0; h < w.kv_heads; ++h) {
        const int64_t place = h * w.block_size + offset, scale = block * w.scale_stride + place;
        const int64_t to = block * w.block_stride + place * w.head_dim, from = h * w.head_dim;
        write_row<KV>((const T*)w.key + t * w.key_stride + from, (uint8_t*)w.keys + to, w.key_scales + scale, w.head_dim);
        write_row<KV>((const T*)w.value + t * w.value_stride + from, (uint8_t*)w.values + to, w.value_scales + scale,
                      w.head_dim);
      }
    }
  });
}

static void write(const AttentionWrite& w) {
  if (w.kv_type == Type::s8) {
    if (w.type == Type::bf16) write_all<Type::s8, bf16>(w);
    else write_all<Type::s8, float>(w);
  } else {
    if (w.type == Type::bf16) write_all<Type::fp8_e4m3, bf16>(w);
    else write_all<Type::fp8_e4m3, float>(w);
  }
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
