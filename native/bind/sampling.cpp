// From logits to tokens: argmax, penalties, masks, truncation, draw, log-probabilities.
#include "call.h"

namespace octavo {

void bind_sampling(nanobind::module_&) {}

}  // namespace octavo
