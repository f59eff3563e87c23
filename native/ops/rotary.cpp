// See octavo/rotary.h.
#include "octavo/rotary.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t GRAIN = 16384;  // elements worth a thread of their own

OCTAVO_INLINE int64_t grain_rows(int64_t elements) { return elements >= GRAIN ? 1 : (GRAIN + elements - 1) / elements; }

template <class T, class C>
OCTAVO_INLINE void turn(T* x, const C* cos, const C* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    const Left n = first(half - i);
    const F c = load(cos + i, n), s = load(sin + i, n), a = load(x + i, n), b = load(x + half + i, n);
    store(x + i, sub(mul(a, c), mul(b, s)), n);
    store(x + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

template <class T, class C>
static void rotary_of(T* query, T* key, const C* cos_sin, int64_t rows, int64_t query_heads, int64_t key_heads,
                      int64_t dim, Strides query_at, Strides key_at) {
  parallel(rows, grain_rows((query_heads + key_heads) * dim), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const C *cos = cos_sin + r * dim, *sin = cos + dim / 2;
      for (int64_t h = 0; h < query_heads; ++h) turn(query + r * query_at.row + h * query_at.head, cos, sin, dim / 2);
      for (int64_t h = 0; h < key_heads; ++h) turn(key + r * key_at.row + h * key_at.head, cos, sin, dim / 2);
    }
  });
}

static void rotary(void* query, void* key, const void* cos_sin, int64_t rows, int64_t query_heads, int64_t key_heads,
                   int64_t dim, Strides query_at, Strides key_at, Type type, Type cos_sin_type) {
  const float* wide = (const float*)cos_sin;
  const bf16* narrow = (const bf16*)cos_sin;
  if (type == Type::bf16 && cos_sin_type == Type::bf16)
    rotary_of((bf16*)query, (bf16*)key, narrow, rows, query_heads, key_heads, dim, query_at, key_at);
  else if (type == Type::bf16)
    rotary_of((bf16*)query, (bf16*)key, wide, rows, query_heads, key_heads, dim, query_at, key_at);
  else if (cos_sin_type == Type::bf16)
    rotary_of((float*)query, (float*)key, narrow, rows, query_heads, key_heads, dim, query_at, key_at);
  else
    rotary_of((float*)query, (float*)key, wide, rows, query_heads, key_heads, dim, query_at, key_at);
}

template <class T>
OCTAVO_INLINE void copy(const T* from, T* to, int64_t n) {
  std::memcpy(to, from, size_t(n) * sizeof(T));
}
template <class T, class U>
OCTAVO_INLINE void copy(const T* from, U* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i, first(n - i)), first(n - i));
}

template <class T, class U>
static void write_kv_of(const T* key, const T* value, Cache cache, const int64_t* slots, int64_t rows, int64_t heads,
                        int64_t dim, Strides key_at, Strides value_at) {
  parallel(rows, grain_rows(2 * heads * dim), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      if (slots[r] < 0) continue;
      const int64_t block = slots[r] / cache.size, state = slots[r] % cache.size * dim;
      U* keys = (U*)cache.key + block * cache.key_block + state;
      U* values = (U*)cache.value + block * cache.value_block + state;
      for (int64_t h = 0; h < heads; ++h) {
        copy(key + r * key_at.row + h * key_at.head, keys + h * cache.key_head, dim);
        copy(value + r * value_at.row + h * value_at.head, values + h * cache.value_head, dim);
      }
    }
  });
}

static void write_kv(const void* key, const void* value, Cache cache, const int64_t* slots, int64_t rows, int64_t heads,
                     int64_t dim, Strides key_at, Strides value_at, Type type, Type cache_type) {
  const float *wide_key = (const float*)key, *wide_value = (const float*)value;
  const bf16 *narrow_key = (const bf16*)key, *narrow_value = (const bf16*)value;
  if (type == Type::bf16 && cache_type == Type::bf16)
    write_kv_of<bf16, bf16>(narrow_key, narrow_value, cache, slots, rows, heads, dim, key_at, value_at);
  else if (type == Type::bf16)
    write_kv_of<bf16, float>(narrow_key, narrow_value, cache, slots, rows, heads, dim, key_at, value_at);
  else if (cache_type == Type::bf16)
    write_kv_of<float, bf16>(wide_key, wide_value, cache, slots, rows, heads, dim, key_at, value_at);
  else
    write_kv_of<float, float>(wide_key, wide_value, cache, slots, rows, heads, dim, key_at, value_at);
}

extern const RotaryTable rotary_table;
const RotaryTable rotary_table = {rotary, write_kv};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
