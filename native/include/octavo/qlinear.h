// Matrix products of quantized weights (int8, int4 in groups, GGUF blocks), packed once.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct QLinearTable {
  int unused;
};

}  // namespace octavo
