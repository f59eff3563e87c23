// Rows of a table by index: token embeddings, rotary cos and sin.
#include "call.h"

namespace octavo {

void bind_gather(nanobind::module_&) {}

}  // namespace octavo
