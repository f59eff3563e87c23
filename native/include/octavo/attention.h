// Attention over the paged KV cache: prefill and decode, one arithmetic for both.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct AttentionTable {
  int unused;
};

}  // namespace octavo
