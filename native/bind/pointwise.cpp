// Gated activations.
#include "call.h"

namespace octavo {

void bind_pointwise(nanobind::module_& m) {
  m.def("gated", [](Ptr x, Ptr out, int64_t rows, int64_t width, int64_t x_row, int64_t out_row, int gate, int type) {
    Tape* tape = Tape::recording();
    if (tape && tape->gate_last(x, x_row, width, out, out_row, Gate(gate), Type(type))) return;
    call("gated", rows, [=](int64_t n) {
      current_level().pointwise->gated(at<void>(x), at<void>(out), n, width, x_row, out_row, Gate(gate), Type(type));
    });
  });
}

}  // namespace octavo
