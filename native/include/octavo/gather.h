// Rows of a table by index: token embeddings, rotary cos and sin.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct GatherTable {
  int unused;
};

}  // namespace octavo
