// Rotary position embedding (Su et al., RoFormer, 2021; half-split pairs), in place, and writing keys and values to the
// paged cache.
#pragma once
#include "octavo/norms.h"  // Strides
#include "octavo/types.h"

namespace octavo {

// The caches of one layer, [blocks, heads, size, dim]: state `offset` of block b and head h lies at
// b * block + h * head + offset * dim elements.
struct Cache {
  void *key, *value;
  int64_t size;  // tokens in a block
  int64_t key_block, key_head, value_block, value_head;
};

struct RotaryTable {
  // Features i and i + dim / 2 of each head's first `dim` are turned by the angle whose cosine is cos_sin[r][i] and
  // whose sine is cos_sin[r][i + dim / 2]; cos_sin is contiguous. Types f32 or bf16.
  void (*rotary)(void* query, void* key, const void* cos_sin, int64_t rows, int64_t query_heads, int64_t key_heads,
                 int64_t dim, Strides query_at, Strides key_at, Type type, Type cos_sin_type);
  // key and value [rows, heads, dim] to slots [rows] (block * size + offset); a negative slot is padding and skipped.
  // Types f32 or bf16.
  void (*write_kv)(const void* key, const void* value, Cache cache, const int64_t* slots, int64_t rows, int64_t heads,
                   int64_t dim, Strides key_at, Strides value_at, Type type, Type cache_type);
};

}  // namespace octavo
