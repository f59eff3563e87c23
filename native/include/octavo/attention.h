// Attention over the paged KV cache: prefill and decode, one arithmetic for both.
//
// The keys of a sequence are cut into partitions of 256 counted from position 0. For one query token and head, each
// partition gives a state: the highest score, the sum of weights, and the sum of weighted values; states are merged in
// rising order. What a partition gives depends on the query, the keys and the level only: a key that is not seen has
// weight zero, which changes no sum. So the bits of an answer are the same for every batch, chunking, number of threads
// and sharing of prefixes. (Split and merge: Milakov and Gimelshein, 2018; Dao et al., 2022, 2023.)
//
// A *line* is one query token of one query head; lines of one KV head share its keys: line = token * group + head.
#pragma once
#include "octavo/types.h"

namespace octavo {

constexpr int64_t PARTITION = 256;  // keys
constexpr int64_t KEY_TILE = 16;    // keys that always lie in one block: block sizes are multiples of it

// One request's share of a step.
struct AttentionRow {
  int32_t first_token;    // of the step
  int32_t tokens;         // new ones
  int32_t context;        // tokens in the cache before this step
  int32_t parts_begin;    // partitions that are this row's own business: not shared, not left behind by the window
  int32_t parts_end;
  int32_t folded_end;     // states [parts_begin, folded_end) are merged in the first slot; the others have one each
  int32_t shared;         // 1: the first slot holds the shared partitions, and every own partition has one
  int32_t slots;          // 0: no unit has to wait for another
  int64_t states;         // floats before this row's first slot
  const int32_t* blocks;  // block ids by position / block size
};

// A piece of work: lines of one row, or of rows that share their first partitions, against partitions of some KV heads.
struct AttentionUnit {
  int32_t first_member, members;  // in AttentionJob::members: rows
  int32_t line_begin, line_end;   // of one row; of all members together where there are several
  int32_t head_begin, head_end;   // KV heads
  int32_t part_begin, part_end;
};

struct AttentionJob {
  const void* query;  // [tokens, heads, head_dim], a token every `query_stride` elements
  void* out;          // [tokens, heads, head_dim], a token every `out_stride` elements
  const void* keys;   // [blocks, kv_heads, block_size, head_dim], a block every `block_stride` elements
  const void* values;
  const float* key_scales;  // [blocks, kv_heads, block_size], a block every `scale_stride`; null for plain types
  const float* value_scales;
  int64_t query_stride, out_stride, block_stride, scale_stride;
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t window;  // positions that a query sees, its own included; 0: all
  float scale, softcap;  // softcap 0: none
  const float* slopes;   // [heads], added times the distance (Press et al., 2022); null: none
  const float* sinks;    // [heads], scores of a key without a value; null: none
  Type type, kv_type;    // of query and out; of keys and values
  int64_t tokens;        // rows of out; those beyond `used_tokens` are padding and become zero
  int64_t used_tokens;
  const AttentionRow* rows;
  int64_t num_rows;
  const AttentionUnit* units;
  int64_t num_units;
  const int32_t* members;
  const int32_t* waits;  // [num_rows, kv_heads], units that write a state of it
  int64_t num_waits;
  int64_t most_lines;    // lines of a unit, rounded up to 32, times its heads
  int64_t state_floats;  // of all slots
};

// Floats of one slot: output sums, highest scores, sums of weights.
inline int64_t attention_state_floats(int64_t lines, int64_t dim) {
  const int64_t wide = (dim + 31) / 32 * 32, padded = (lines + 15) / 16 * 16;
  return lines * wide + 2 * padded;
}

// Keys and values [tokens, kv_heads, head_dim] (a token every `*_stride` elements) to their token slots of a cache of s8
// or fp8_e4m3, laid out as in AttentionJob: x = stored * scale. Slots below 0 are padding.
struct AttentionWrite {
  const void *key, *value;
  void *keys, *values;
  float *key_scales, *value_scales;
  const int64_t* slots;
  int64_t tokens, key_stride, value_stride, block_stride, scale_stride;
  int64_t kv_heads, block_size, head_dim;
  Type type, kv_type;  // of key and value; of the cache
};

struct AttentionTable {
  void (*run)(const AttentionJob& job);
  void (*write)(const AttentionWrite& write);
};

}  // namespace octavo
