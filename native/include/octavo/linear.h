// Matrix products of weights in bf16 and float32, packed once.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct LinearTable {
  int unused;
};

}  // namespace octavo
