// From logits to tokens: argmax, penalties, masks, truncation, draw, log-probabilities.
//
// Promises: what a row gives depends on that row alone, not on how many rows or threads there are; scaled logits, and so
// what top-k and min-p keep, are the same bits at every level; masses are float64 sums of float32 weights in one order.
#pragma once
#include "octavo/types.h"

namespace octavo {

// Distinct tokens of one request and how often each occurs in its output (octavo/sampling_counts.h keeps it up to date).
struct CountedTokens {
  int32_t* ids = nullptr;
  float* times = nullptr;
  int64_t size = 0;
};

// What one row asks for; octavo/sampling/state.py makes it: PARAMS has these fields in this order. Addresses may be 0.
struct SampleRow {
  double top_p, min_p;
  int64_t top_k;  // 0: all
  uint64_t seed;
  int64_t sample_index, min_tokens, num_prompt;
  const int64_t* allowed;  // the only ids that may come, where `restricted`
  int64_t num_allowed;
  const int64_t* ends;  // ids that may not come before `min_tokens`
  int64_t num_ends;
  const int64_t* bias_ids;
  const float* bias_values;
  int64_t num_bias;
  const int64_t* bad_words;  // one after another: length, then ids
  int64_t num_bad_words;
  const CountedTokens* counts;  // null without penalties
  float temperature, floor;     // `floor`: least scaled logit that min-p keeps
  float repetition, frequency, presence;
  int32_t logprobs, prompt_logprobs;  // columns: 0, or 1 + k
  bool greedy, restricted;
};

// What log-probabilities are made of: the model's own logits, or what all stations left of them; and whether they are
// given as they are or as the logarithm of their softmax.
enum class Scores : int32_t { raw_logprobs = 0, raw_logits = 1, processed_logprobs = 2, processed_logits = 3 };
enum class Failure : uint8_t { none = 0, not_finite = 1, nothing_left = 2 };

// Logits [rows, vocab] in f32 or bf16; a row starts every `stride` elements. Ids from `limit` on weigh in raw
// log-probabilities and are never chosen or listed.
struct Logits {
  const void* data;
  Type type;
  int64_t rows, vocab, limit, stride;
};

// Lines of `columns` ids and values: the chosen token, then the most likely ones by (value falling, id rising).
struct ScoreLines {
  int32_t* ids;
  float* values;
  int32_t* ranks;
  int64_t columns;  // 0: nobody asks
  Scores scores;
};

struct SampleCall {
  Logits logits;
  const SampleRow* params;   // [rows]
  const int32_t* token_ids;  // row i continues the first lengths[i] of token_ids + slots[i] * token_stride
  int64_t token_stride;
  const int32_t* slots;
  const int64_t* lengths;
  const int32_t* bitmask;  // a bit a token, lowest first, set: allowed; null: no mask
  int64_t bitmask_stride;  // words a row
  int32_t* tokens;
  Failure* failures;
  ScoreLines lines;
};

struct SamplingTable {
  // Returns how many rows failed. Logits are left as they are.
  int64_t (*sample)(const SampleCall& call);
  // The lines of tokens that are known: raw scores only.
  void (*score)(const Logits& logits, const int64_t* chosen, const ScoreLines& lines);
};

}  // namespace octavo
