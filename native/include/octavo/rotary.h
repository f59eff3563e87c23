// Rotary position embedding, and the write of K and V into the paged cache.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct RotaryTable {
  int unused;
};

}  // namespace octavo
