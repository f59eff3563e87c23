// How each kind of quantized weight lies in memory, and how its scales are read. Include after vec.h, in qlinear.cpp only.
//
// A part is cut into panels of 32 outputs, a panel into halves of 16. "Quad" is 4 neighbouring inputs; a row of quads
// holds one quad of each of 16 outputs, 64 bytes: what one dot product instruction and one row of an AMX tile take.
//   int8                [K / 64] x [half][16 quads][16 outputs][4]                     2048 bytes for 64 inputs
//   int8 in groups      [half][8 quads][16][4], then the group's scales                1024 + scales for 32 inputs
//   int4 in groups      [half][4 quads][16][4], then the group's scales                 512 + scales for 32 inputs;
//                       the low nibbles are quads 0..3 and the high ones quads 4..7
// Scales are [32 outputs] each. The kinds "k" have their outer scales before every 8 groups.
#pragma once

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t PANEL = 32, GROUP = 32, TILE_K = 64;
OCTAVO_INLINE int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// ---- whole numbers ----------------------------------------------------------------------------
// Q: the quads of W outputs; I: W sums. dot8 takes q in 0..255 and gives sums of (q - 128 + OFFSET8) * x.

#if defined(__AVX512F__)

using I = __m512i;
using Q = __m512i;
constexpr int OFFSET8 = 128;
OCTAVO_INLINE I no_sum() { return _mm512_setzero_si512(); }
OCTAVO_INLINE I all_int(int32_t x) { return _mm512_set1_epi32(x); }
OCTAVO_INLINE Q load_quads(const uint8_t* p) { return _mm512_load_si512(p); }
OCTAVO_INLINE I same_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
OCTAVO_INLINE I dot8(I sum, Q q, I x) { return _mm512_dpbusd_epi32(sum, q, x); }
OCTAVO_INLINE I dot4(I sum, Q q, I x) { return _mm512_dpbusd_epi32(sum, q, x); }
OCTAVO_INLINE Q low_nibbles(Q q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
OCTAVO_INLINE Q high_nibbles(Q q) { return _mm512_and_si512(_mm512_srli_epi16(q, 4), _mm512_set1_epi8(15)); }
// The high ones where they are, 16 times as large, and the sums of their products made smaller again.
OCTAVO_INLINE Q high_nibbles_up(Q q) { return _mm512_and_si512(q, _mm512_set1_epi8(-16)); }
OCTAVO_INLINE I down(I sum) { return _mm512_srai_epi32(sum, 4); }
// Some multiple of a number in memory: without a general register, whose way to a vector takes one of the ports that
// the products need.
template <int FACTOR>
OCTAVO_INLINE I times(const int32_t* p) {
  static_assert(FACTOR == -128 || FACTOR == -8 || FACTOR == 0, "");
  return _mm512_sub_epi32(no_sum(), _mm512_slli_epi32(_mm512_set1_epi32(*p), FACTOR == -128 ? 7 : 3));
}
OCTAVO_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
OCTAVO_INLINE I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
OCTAVO_INLINE I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
OCTAVO_INLINE F as_float(I x) { return _mm512_cvtepi32_ps(x); }
OCTAVO_INLINE F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)p)); }
OCTAVO_INLINE F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)p))); }
OCTAVO_INLINE F load_s8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)p))); }

#elif defined(__AVX2__)

using I = __m256i;
using Q = __m256i;
constexpr int OFFSET8 = 0;
OCTAVO_INLINE I no_sum() { return _mm256_setzero_si256(); }
OCTAVO_INLINE I all_int(int32_t x) { return _mm256_set1_epi32(x); }
OCTAVO_INLINE Q load_quads(const uint8_t* p) { return _mm256_load_si256((const __m256i*)p); }
OCTAVO_INLINE I same_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}
// The 16-bit sums of pairs must not saturate: |q - 128| <= 128 and |x| <= 127 keep them below 32767.
OCTAVO_INLINE I dot8(I sum, Q q, I x) {
  const __m256i w = _mm256_xor_si256(q, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
OCTAVO_INLINE I dot4(I sum, Q q, I x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1)));
}
OCTAVO_INLINE Q low_nibbles(Q q) { return _mm256_and_si256(q, _mm256_set1_epi8(15)); }
OCTAVO_INLINE Q high_nibbles(Q q) { return _mm256_and_si256(_mm256_srli_epi16(q, 4), _mm256_set1_epi8(15)); }
// A sum of two products of 16 times as much has no room in 16 bits.
OCTAVO_INLINE Q high_nibbles_up(Q q) { return high_nibbles(q); }
OCTAVO_INLINE I down(I sum) { return sum; }
template <int FACTOR>
OCTAVO_INLINE I times(const int32_t* p) { return all_int(FACTOR * *p); }
OCTAVO_INLINE I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
OCTAVO_INLINE I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
OCTAVO_INLINE I max_int(I a, I b) { return _mm256_max_epi32(a, b); }
OCTAVO_INLINE F as_float(I x) { return _mm256_cvtepi32_ps(x); }
OCTAVO_INLINE F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i*)p)); }
OCTAVO_INLINE F load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
OCTAVO_INLINE F load_s8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

#else

using I = int32_t;
struct Q { uint8_t of[4]; };
constexpr int OFFSET8 = 0;
OCTAVO_INLINE I no_sum() { return 0; }
OCTAVO_INLINE I all_int(int32_t x) { return x; }
OCTAVO_INLINE Q load_quads(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
OCTAVO_INLINE I same_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
OCTAVO_INLINE I dot4(I sum, Q q, I x) {
  int8_t of[4];
  std::memcpy(of, &x, 4);
  for (int i = 0; i < 4; ++i) sum += int32_t(q.of[i]) * of[i];
  return sum;
}
OCTAVO_INLINE I dot8(I sum, Q q, I x) {
  int8_t of[4];
  std::memcpy(of, &x, 4);
  for (int i = 0; i < 4; ++i) sum += (int32_t(q.of[i]) - 128) * of[i];
  return sum;
}
OCTAVO_INLINE Q low_nibbles(Q q) { return {{uint8_t(q.of[0] & 15), uint8_t(q.of[1] & 15), uint8_t(q.of[2] & 15), uint8_t(q.of[3] & 15)}}; }
OCTAVO_INLINE Q high_nibbles(Q q) { return {{uint8_t(q.of[0] >> 4), uint8_t(q.of[1] >> 4), uint8_t(q.of[2] >> 4), uint8_t(q.of[3] >> 4)}}; }
OCTAVO_INLINE Q high_nibbles_up(Q q) { return high_nibbles(q); }
OCTAVO_INLINE I down(I sum) { return sum; }
template <int FACTOR>
OCTAVO_INLINE I times(const int32_t* p) { return FACTOR * *p; }
OCTAVO_INLINE I add_int(I a, I b) { return a + b; }
OCTAVO_INLINE I sub_int(I a, I b) { return a - b; }
OCTAVO_INLINE I max_int(I a, I b) { return a > b ? a : b; }
OCTAVO_INLINE F as_float(I x) { return float(x); }
OCTAVO_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24
    const float small = float(fraction) * 5.9604644775390625e-8f;
    return sign ? -small : small;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
OCTAVO_INLINE F load_half(const uint16_t* p) { return half_to_float(*p); }
OCTAVO_INLINE F load_u8(const uint8_t* p) { return float(*p); }
OCTAVO_INLINE F load_s8(const uint8_t* p) { return float(int8_t(*p)); }

#endif

constexpr int V = 16 / W;  // vectors in half a panel

// ---- kinds in groups --------------------------------------------------------------------------

enum class Scale { half, k };

template <int Bits, Scale Form, bool HasMin, int Span>
struct Grouped {
  static constexpr int BITS = Bits, SPAN = Span;  // inputs that one scale is for: 32 or 16
  static constexpr bool MIN = HasMin;
  static constexpr Scale FORM = Form;
  static constexpr int ZERO = HasMin ? 0 : Bits == 8 ? 128 : 8;
  // What a level's dot product leaves to be taken off for each unit of the sum of x.
  static constexpr int LEFT = Bits == 8 ? ZERO - 128 + OFFSET8 : ZERO;
  static constexpr int64_t WEIGHTS = PANEL * GROUP * Bits / 8, HALF = WEIGHTS / 2;
  static constexpr int64_t ONE = PANEL * (Form == Scale::half ? 2 : 1);  // bytes of one scale for each output
  static constexpr int64_t SCALES = ONE * (GROUP / Span), BYTES = WEIGHTS + SCALES + (HasMin ? ONE : 0);
  static constexpr int64_t OUTER = Form == Scale::k ? PANEL * 2 * (HasMin ? 2 : 1) : 0, EIGHT = OUTER + 8 * BYTES;

  static int64_t panel_bytes(int64_t k) {
    const int64_t groups = blocks_of(k, GROUP);
    return groups * BYTES + blocks_of(groups, 8) * OUTER;
  }
  // Where group g of a panel starts, and the outer scales before it.
  OCTAVO_INLINE const uint8_t* group(const uint8_t* panel, int64_t g) {
    return Form == Scale::half ? panel + g * BYTES : panel + (g >> 3) * EIGHT + OUTER + (g & 7) * BYTES;
  }
  OCTAVO_INLINE const uint16_t* outer(const uint8_t* panel, int64_t g) { return (const uint16_t*)(panel + (g >> 3) * EIGHT); }

  // The scale of span s of a group for W outputs from output `o` of the panel.
  OCTAVO_INLINE F scale(const uint8_t* group, const uint16_t* outer, int s, int o) {
    const uint8_t* at = group + WEIGHTS + s * ONE;
    if (Form == Scale::half) return load_half((const uint16_t*)at + o);
    return mul(HasMin ? load_u8(at + o) : load_s8(at + o), load_half(outer + o));
  }
  OCTAVO_INLINE F minimum(const uint8_t* group, const uint16_t* outer, int o) {
    const uint8_t* at = group + WEIGHTS + SCALES;
    if (Form == Scale::half) return load_half((const uint16_t*)at + o);
    return sub(zero(), mul(load_u8(at + o), load_half(outer + PANEL + o)));
  }
};

using Int8Half = Grouped<8, Scale::half, false, 32>;
using Int8HalfMin = Grouped<8, Scale::half, true, 32>;
using Int8K = Grouped<8, Scale::k, false, 16>;
using Int8KMin = Grouped<8, Scale::k, true, 32>;
using Int4Half = Grouped<4, Scale::half, false, 32>;
using Int4HalfMin = Grouped<4, Scale::half, true, 32>;
using Int4KMin = Grouped<4, Scale::k, true, 32>;

// Call `use` with the kind's type; int8 by rows is not one of them.
template <class Use>
static void with_grouped(QKind kind, const Use& use) {
  switch (kind) {
    case QKind::int8_half: return use(Int8Half());
    case QKind::int8_half_min: return use(Int8HalfMin());
    case QKind::int8_k: return use(Int8K());
    case QKind::int8_k_min: return use(Int8KMin());
    case QKind::int4_half: return use(Int4Half());
    case QKind::int4_half_min: return use(Int4HalfMin());
    case QKind::int4_k_min: return use(Int4KMin());
    default: return;
  }
}

static int64_t panel_bytes(QKind kind, int64_t k) {
  int64_t bytes = PANEL * TILE_K * blocks_of(k, TILE_K);
  with_grouped(kind, [&](auto form) { bytes = decltype(form)::panel_bytes(k); });
  return bytes;
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
