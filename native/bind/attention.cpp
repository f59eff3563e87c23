// Attention over the paged KV cache: prefill and decode, one arithmetic for both.
#include "call.h"

namespace octavo {

void bind_attention(nanobind::module_&) {}

}  // namespace octavo
