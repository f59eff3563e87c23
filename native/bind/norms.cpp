// Norms.
#include "call.h"

namespace octavo {

void bind_norms(nanobind::module_& m) {
  m.def("rms_norm", [](Ptr x, Ptr weight, Ptr out, int64_t rows, int64_t heads, int64_t width, int64_t x_row,
                       int64_t x_head, int64_t out_row, int64_t out_head, float eps, int type) {
    call("rms_norm", rows, [=](int64_t n) {
      current_level().norms->rms_norm(at<void>(x), at<void>(weight), at<void>(out), n, heads, width, {x_row, x_head},
                                      {out_row, out_head}, eps, Type(type));
    });
  });
  m.def("add_rms_norm", [](Ptr x, Ptr residual, Ptr weight, Ptr out, Ptr total, int64_t rows, int64_t width,
                           int64_t x_row, int64_t residual_row, int64_t out_row, float eps, int x_type, int residual_type, int type) {
    call("add_rms_norm", rows, [=](int64_t n) {
      current_level().norms->add_rms_norm(at<void>(x), at<void>(residual), at<void>(weight), at<void>(out),
                                          at<float>(total), n, width, x_row, residual_row, out_row, eps, Type(x_type),
                                          Type(residual_type), Type(type));
    });
  });
}

}  // namespace octavo
