// Rotary position embedding, and the write of K and V into the paged cache.
#include "call.h"

namespace octavo {

void bind_rotary(nanobind::module_&) {}

}  // namespace octavo
