// From logits to tokens: argmax, penalties, masks, truncation, draw, log-probabilities.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct SamplingTable {
  int unused;
};

}  // namespace octavo
