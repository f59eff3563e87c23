// Activations rounded to int8, laid out for tiles and dot products alike. Include after qlinear_layout.h.
//
// q is [row / 16][K / 64][16 rows][64]: one 16 x 64 block is an AMX tile, and a quad of a row is 4 neighbouring bytes.
// Values past K are 0; rows past the last one are left as they were and nobody looks at what comes of them.
#pragma once
#include <cstdlib>

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t ROWS = 16;

#if defined(__AVX512F__)
// The larger of sizes |x|, as their bits, which grow with them; NaN is above all.
OCTAVO_INLINE I larger(I most, F x) {
  return _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}
OCTAVO_INLINE uint32_t largest(I most) { return uint32_t(_mm512_reduce_max_epi32(most)); }
OCTAVO_INLINE I round_to_bytes(int8_t* p, F x) {
  const I whole = _mm512_cvtps_epi32(x);
  _mm_store_si128((__m128i*)p, _mm512_cvtsepi32_epi8(whole));
  return whole;
}
OCTAVO_INLINE int32_t sum_int(I x) { return _mm512_reduce_add_epi32(x); }
#elif defined(__AVX2__)
OCTAVO_INLINE I larger(I most, F x) {
  return _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)));
}
OCTAVO_INLINE uint32_t largest(I most) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return uint32_t(_mm_cvtsi128_si32(m));
}
OCTAVO_INLINE I round_to_bytes(int8_t* p, F x) {
  const I whole = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
  return whole;
}
OCTAVO_INLINE int32_t sum_int(I x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#else
OCTAVO_INLINE I larger(I most, F x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const I size = I(bits & 0x7fffffffu);
  return size > most ? size : most;
}
OCTAVO_INLINE uint32_t largest(I most) { return uint32_t(most); }
OCTAVO_INLINE I round_to_bytes(int8_t* p, F x) {
  const float bounded = x >= -128.f ? x > 127.f ? 127.f : x : -128.f;  // NaN as the smallest
  const I whole = I(std::nearbyint(bounded));
  *p = int8_t(whole);
  return whole;
}
OCTAVO_INLINE int32_t sum_int(I x) { return x; }
#endif

OCTAVO_INLINE float from_bits(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
// Below this size everything is 0: its inverse would not be a number.
constexpr float TINY = 1e-35f;
OCTAVO_INLINE float inverse_scale(float most) { return most < TINY ? 0.f : 127.f / most; }
OCTAVO_INLINE float scale_of(float most) { return most < TINY ? 0.f : most / 127.f; }

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  char* room(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(4096, size_);
    }
    return static_cast<char*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

struct Activations {
  int64_t rows, k, chunks, groups;  // chunks of 64 inputs, groups of 32
  bool by_row;
  int8_t* q;
  float* scale;       // [rows], or [row / 16][groups][16]
  float* scaled_sum;  // scale * sum of q, in groups only
  int32_t* sum;       // as scale: sum of q (by rows: times OFFSET8); spans of 16 inputs [row / 16][2 * groups][16]
  int32_t* half_sum;

  // Where quad 0 of chunk c of a row lies; the next one is 4 bytes further.
  OCTAVO_INLINE const int8_t* quads(const Activations& x, int64_t row, int64_t chunk) {
    return x.q + ((row / ROWS * x.chunks + chunk) * ROWS + row % ROWS) * TILE_K;
  }
  static Activations in(Scratch& scratch, int64_t rows, int64_t k, bool by_row) {
    Activations x{rows, k, blocks_of(k, TILE_K), blocks_of(k, GROUP), by_row, nullptr, nullptr, nullptr, nullptr, nullptr};
    const int64_t padded = blocks_of(rows, ROWS) * ROWS, numbers = by_row ? padded : padded * x.groups;
    const int64_t bytes = padded * x.chunks * TILE_K + numbers * 4 * (by_row ? 2 : 5);
    char* at = scratch.room(size_t(bytes));
    x.q = (int8_t*)at;
    at += padded * x.chunks * TILE_K;
    x.scale = (float*)at;
    x.sum = (int32_t*)(at + numbers * 4);
    x.scaled_sum = (float*)(at + numbers * 8);
    x.half_sum = (int32_t*)(at + numbers * 12);
    return x;
  }
};

template <class T>
static void round_row(const Activations& to, const T* from, int64_t row) {
  I sizes[4] = {no_sum(), no_sum(), no_sum(), no_sum()};
  int64_t i = 0;
  for (; i + 4 * W <= to.k; i += 4 * W)
    for (int j = 0; j < 4; ++j) sizes[j] = larger(sizes[j], load(from + i + j * W));
  for (; i < to.k; i += W) sizes[0] = larger(sizes[0], load(from + i, first(to.k - i)));
  const float most = from_bits(largest(max_int(max_int(sizes[0], sizes[1]), max_int(sizes[2], sizes[3]))));
  const F inverse = all(inverse_scale(most));
  I sum = no_sum();
  int8_t* at = const_cast<int8_t*>(Activations::quads(to, row, 0));
  for (i = 0; i < to.chunks * TILE_K; i += W)
    sum = add_int(sum, round_to_bytes(at + i / TILE_K * (ROWS * TILE_K) + i % TILE_K,
                                      mul(load(from + i, first(to.k - i)), inverse)));
  to.scale[row] = scale_of(most);
  to.sum[row] = OFFSET8 * sum_int(sum);  // what a level's dot product counts too much
}

template <class T>
static void round_row_in_groups(const Activations& to, const T* from, int64_t row) {
  constexpr int HALF = 16 / W;
  const int64_t block = row / ROWS, in = row % ROWS;
  int8_t* at = const_cast<int8_t*>(Activations::quads(to, row, 0));
  for (int64_t g = 0; g < to.groups; ++g) {
    F part[2 * HALF];
    for (int j = 0; j < 2 * HALF; ++j) part[j] = load(from + g * GROUP + j * W, first(to.k - g * GROUP - j * W));
    I size = no_sum();
    for (int j = 0; j < 2 * HALF; ++j) size = larger(size, part[j]);
    const float most = from_bits(largest(size));
    const F inverse = all(inverse_scale(most));
    int32_t sums[2];
    for (int h = 0; h < 2; ++h) {
      I sum = no_sum();
      for (int j = 0; j < HALF; ++j)
        sum = add_int(sum, round_to_bytes(at + (g >> 1) * (ROWS * TILE_K) + (g & 1) * GROUP + h * 16 + j * W,
                                          mul(part[h * HALF + j], inverse)));
      sums[h] = sum_int(sum);
      to.half_sum[((block * to.groups + g) * 2 + h) * ROWS + in] = sums[h];
    }
    const int64_t number = (block * to.groups + g) * ROWS + in;
    const float scale = scale_of(most);
    to.scale[number] = scale;
    to.sum[number] = sums[0] + sums[1];
    to.scaled_sum[number] = scale * float(sums[0] + sums[1]);
  }
  if (to.groups & 1)  // the last chunk is half full
    std::memset(at + (to.groups >> 1) * (ROWS * TILE_K) + GROUP, 0, GROUP);
}

// Shared among threads in blocks of 16 rows, whose scales lie in one cache line.
template <class T>
static void round_rows(const Activations& to, const T* x, int64_t stride) {
  const int64_t grain = 1024 / (to.k + 1) + 1;
  parallel(blocks_of(to.rows, ROWS), grain, [&](int64_t begin, int64_t end, int) {
    const int64_t last = end * ROWS < to.rows ? end * ROWS : to.rows;
    for (int64_t row = begin * ROWS; row < last; ++row) {
      if (to.by_row)
        round_row(to, x + row * stride, row);
      else
        round_row_in_groups(to, x + row * stride, row);
    }
  });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
