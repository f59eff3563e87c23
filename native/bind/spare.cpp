// System calls in spare time. The interpreter's lock is free meanwhile.
#include "octavo/spare.h"

#include "call.h"

namespace octavo {

void bind_spare(nanobind::module_& m) {
  m.def(
      "spare_write",
      [](int file, Ptr from, int64_t num_bytes) { return spare_write(file, at<void>(from), num_bytes); },
      nanobind::call_guard<nanobind::gil_scoped_release>());
  m.def(
      "spare_crc32", [](Ptr from, int64_t num_bytes) { return spare_crc32(at<void>(from), num_bytes); },
      nanobind::call_guard<nanobind::gil_scoped_release>());
  m.def(
      "spare_populate", [](Ptr from, int64_t num_bytes) { return spare_populate(at<void>(from), num_bytes); },
      nanobind::call_guard<nanobind::gil_scoped_release>());
}

}  // namespace octavo
