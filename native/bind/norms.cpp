// Norms and gated activations.
#include "call.h"

namespace octavo {

void bind_norms(nanobind::module_& m) {
  m.def("rms_norm", [](Ptr x, Ptr weight, Ptr out, int64_t rows, int64_t width, int64_t x_stride, int64_t out_stride,
                       float eps, int type) {
    call(rows, [=](int64_t n) {
      current_level().norms->rms_norm(at<void>(x), at<void>(weight), at<void>(out), n, width, x_stride, out_stride, eps,
                                      Type(type));
    });
  });
}

}  // namespace octavo
