// Matrix products of weights in bf16 and float32, packed once.
#include <nanobind/stl/string.h>

#include <string>

#include "call.h"

namespace octavo {

void bind_linear(nanobind::module_& m) {
  m.def("linear_layout", [](int type) { return std::string(current_level().linear->layout(Type(type))); });
  m.def("linear_packed_bytes", [](int64_t inputs, int64_t outputs, int type) {
    return current_level().linear->packed_bytes(inputs, outputs, Type(type));
  });
  m.def("linear_pack", [](Ptr weight, int64_t stride, Ptr packed, int64_t inputs, int64_t outputs, int type) {
    current_level().linear->pack(at<void>(weight), stride, at<void>(packed), inputs, outputs, Type(type));
  });
  m.def("linear", [](Ptr x, int64_t x_stride, Ptr packed, Ptr bias, Ptr out, int64_t out_stride, int64_t rows,
                     int64_t inputs, int64_t outputs, int type, int out_type) {
    const LinearCall product{at<void>(x), x_stride, at<void>(packed), at<float>(bias), at<void>(out), out_stride,
                             rows, inputs, outputs, Type(type), Type(out_type)};
    if (Tape* tape = Tape::recording())
      tape->add(product);
    else
      Tape::multiply(product, rows);
  });
  m.def("linear_rows", [](Ptr packed, Ptr index, Ptr out, int64_t rows, int64_t inputs, int64_t outputs, int type) {
    call("linear_rows", rows, [=](int64_t n) {
      current_level().linear->unpack_rows(at<void>(packed), at<int64_t>(index), at<void>(out), n, inputs, outputs,
                                          Type(type));
    });
  });
}

}  // namespace octavo
