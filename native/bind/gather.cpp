// Rows of a table by index: token embeddings, rotary cos and sin.
#include "call.h"

namespace octavo {

void bind_gather(nanobind::module_& m) {
  m.def("gather_rows", [](Ptr table, Ptr index, Ptr out, int64_t rows, int64_t table_rows, int64_t row_bytes) {
    call("gather_rows", rows, [=](int64_t n) {
      current_level().gather->gather_rows(at<void>(table), at<int64_t>(index), at<void>(out), n, table_rows, row_bytes);
    });
  });
}

}  // namespace octavo
