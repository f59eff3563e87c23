// How often each token occurs in one request's output, kept up to date token by token.
#pragma once
#include <vector>

#include "octavo/sampling.h"

namespace octavo {

// The cost of an update is that of the new tokens, not of the text. Ids of the prompt are listed with count 0 when
// `with_prompt`, for the repetition penalty.
class TokenCounts : public CountedTokens {
 public:
  explicit TokenCounts(bool with_prompt) : with_prompt_(with_prompt) { reset(); }
  TokenCounts(const TokenCounts&) = delete;
  TokenCounts& operator=(const TokenCounts&) = delete;
  // Counts what is new in the request's first `length` tokens; a shorter text than last time is counted anew.
  void update(const int32_t* tokens, int64_t length, int64_t num_prompt);

 private:
  void reset();
  int64_t place(int32_t token);
  void grow();

  bool with_prompt_;
  int64_t seen_ = -1;  // tokens counted, prompt included; negative before the first update
  std::vector<int32_t> ids_, index_;
  std::vector<float> times_;
};

}  // namespace octavo
