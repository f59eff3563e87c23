// Matrix products of quantized weights (int8, int4 in groups, GGUF blocks), packed once.
#include "call.h"

namespace octavo {

void bind_qlinear(nanobind::module_&) {}

}  // namespace octavo
