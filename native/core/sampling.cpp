// See octavo/sampling_counts.h.
#include "octavo/sampling_counts.h"

#include <cstddef>

namespace octavo {

void TokenCounts::reset() {
  ids_.clear();
  times_.clear();
  index_.assign(128, -1);  // twice the ids at least; a power of two
  seen_ = -1;
  ids = nullptr;
  times = nullptr;
  size = 0;
}

static std::size_t slot_of(int32_t token, const std::vector<int32_t>& index, const std::vector<int32_t>& ids) {
  const std::size_t mask = index.size() - 1;
  std::size_t at = (uint32_t(token) * 2654435769u >> 7) & mask;
  while (index[at] >= 0 && ids[std::size_t(index[at])] != token) at = (at + 1) & mask;
  return at;
}

int64_t TokenCounts::place(int32_t token) {
  std::size_t at = slot_of(token, index_, ids_);
  if (index_[at] >= 0) return index_[at];
  if (2 * (ids_.size() + 1) > index_.size()) {
    grow();
    at = slot_of(token, index_, ids_);
  }
  index_[at] = int32_t(ids_.size());
  ids_.push_back(token);
  times_.push_back(0.f);
  return index_[at];
}

void TokenCounts::grow() {
  index_.assign(2 * index_.size(), -1);
  for (std::size_t i = 0; i < ids_.size(); ++i) index_[slot_of(ids_[i], index_, ids_)] = int32_t(i);
}

void TokenCounts::update(const int32_t* tokens, int64_t length, int64_t num_prompt) {
  if (length < seen_) reset();
  if (seen_ < 0) {
    if (with_prompt_)
      for (int64_t i = 0; i < num_prompt && i < length; ++i) place(tokens[i]);
    seen_ = num_prompt;
  }
  for (int64_t i = seen_; i < length; ++i) times_[std::size_t(place(tokens[i]))] += 1.f;
  seen_ = length;
  ids = ids_.data();
  times = times_.data();
  size = int64_t(ids_.size());
}

}  // namespace octavo
