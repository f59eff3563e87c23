// Gated activations.
#include "call.h"

namespace octavo {

void bind_pointwise(nanobind::module_&) {}

}  // namespace octavo
