// Matrix products of quantized weights (int8, int4 in groups, GGUF blocks), packed once.
#include "call.h"

namespace octavo {

void bind_qlinear(nanobind::module_& m) {
  m.def("qlinear_packed_bytes", [](int kind, int64_t columns, int64_t k) {
    return current_level().qlinear->packed_bytes(QKind(kind), columns, k);
  });
  m.def("qlinear_pack", [](int kind, Ptr q, Ptr scale, Ptr minimum, Ptr outer, Ptr outer_minimum, int64_t rows, int64_t k,
                           int64_t first, Ptr packed) {
    const QRows from{at<uint8_t>(q), at<void>(scale), at<void>(minimum), at<uint16_t>(outer), at<uint16_t>(outer_minimum)};
    current_level().qlinear->pack(QKind(kind), from, rows, k, first, at<void>(packed));
  });
  m.def("qlinear_quantize_int8", [](Ptr w, int type, int64_t stride, int64_t rows, int64_t k, Ptr q, Ptr scales) {
    current_level().qlinear->quantize_int8(at<void>(w), Type(type), stride, rows, k, at<uint8_t>(q), at<float>(scales));
  });
  m.def("qlinear_quantize_int4", [](Ptr w, int type, int64_t stride, int64_t rows, int64_t k, Ptr q, Ptr scales) {
    current_level().qlinear->quantize_int4(at<void>(w), Type(type), stride, rows, k, at<uint8_t>(q), at<uint16_t>(scales));
  });
  // `parts`: the address of an array of QPart, which must live as long as a tape that holds the call.
  m.def("qlinear", [](Ptr parts, int64_t num_parts, Ptr bias, Ptr x, int x_type, int64_t x_stride, Ptr out, int out_type,
                      int64_t out_stride, int64_t rows, int64_t k) {
    call(rows, [=](int64_t n) {
      current_level().qlinear->multiply(at<QPart>(parts), num_parts, at<float>(bias), at<void>(x), Type(x_type), x_stride,
                                        at<void>(out), Type(out_type), out_stride, n, k);
    });
  });
}

}  // namespace octavo
