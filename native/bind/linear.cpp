// Matrix products of weights in bf16 and float32, packed once.
#include "call.h"

namespace octavo {

void bind_linear(nanobind::module_&) {}

}  // namespace octavo
