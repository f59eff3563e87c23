// What the machine itself allows.
#include "call.h"

namespace octavo {

void bind_probe(nanobind::module_& m) {
  m.def("probe_read", [](Ptr memory, int64_t num_bytes) { return current_level().probe->read(at<void>(memory), num_bytes); });
  m.def("probe_bf16", [](int64_t rounds) { return current_level().probe->multiply_bf16(rounds); });
  m.def("probe_int8", [](int64_t rounds) { return current_level().probe->multiply_int8(rounds); });
}

}  // namespace octavo
