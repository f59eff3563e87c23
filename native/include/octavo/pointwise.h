// Gated activations.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct PointwiseTable {
  int unused;
};

}  // namespace octavo
