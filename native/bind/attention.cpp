// Attention over the paged KV cache: prefill and decode, one arithmetic for both.

#include "call.h"
#include "octavo/attention_plan.h"
#include "octavo/parallel.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// An array's memory without a copy; nanobind's own arrays cost microseconds each.
class View {
 public:
  View(nb::handle array, int dims) {
    if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_STRIDED_RO)) throw nb::python_error();
    if (buffer_.ndim != dims || buffer_.itemsize != 4 || buffer_.strides[dims - 1] != (dims > 1 && !buffer_.shape[1] ? buffer_.strides[1] : 4)) {
      PyBuffer_Release(&buffer_);
      throw nb::value_error("expected an int32 array whose last dimension is contiguous");
    }
  }
  ~View() { PyBuffer_Release(&buffer_); }
  const int32_t* data() const { return static_cast<const int32_t*>(buffer_.buf); }
  int64_t size(int dim) const { return buffer_.shape[dim]; }
  int64_t stride() const { return buffer_.strides[0] / 4; }

 private:
  Py_buffer buffer_;
};

struct Layer {
  Ptr keys, values, key_scales, value_scales;
  int64_t block_stride, scale_stride, heads, kv_heads, head_dim, window;
  float scale, softcap;
  Ptr slopes, sinks;
  int type, kv_type;
};

void attend(AttentionPlan& plan, const Layer& l, Ptr query, int64_t query_stride, Ptr out, int64_t out_stride,
            int64_t tokens) {
  const AttentionCut& cut = plan.cut({l.heads, l.kv_heads, l.head_dim, l.window, int(most_threads()), !l.slopes});
  AttentionJob job{};
  job.query = at<void>(query);
  job.out = at<void>(out);
  job.keys = at<void>(l.keys);
  job.values = at<void>(l.values);
  job.key_scales = at<float>(l.key_scales);
  job.value_scales = at<float>(l.value_scales);
  job.query_stride = query_stride;
  job.out_stride = out_stride;
  job.block_stride = l.block_stride;
  job.scale_stride = l.scale_stride;
  job.heads = l.heads;
  job.kv_heads = l.kv_heads;
  job.head_dim = l.head_dim;
  job.block_size = plan.block_size();
  job.window = l.window;
  job.scale = l.scale;
  job.softcap = l.softcap;
  job.slopes = at<float>(l.slopes);
  job.sinks = at<float>(l.sinks);
  job.type = Type(l.type);
  job.kv_type = Type(l.kv_type);
  job.tokens = tokens;
  job.used_tokens = plan.tokens() < tokens ? plan.tokens() : tokens;
  job.rows = cut.rows.data();
  job.num_rows = int64_t(cut.rows.size());
  job.units = cut.units.data();
  job.num_units = int64_t(cut.units.size());
  job.members = cut.members.data();
  job.waits = cut.waits.data();
  job.num_waits = int64_t(cut.waits.size());
  job.most_lines = cut.most_lines;
  job.state_floats = cut.state_floats;
  current_level().attention->run(job);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<>())
      .def("fill",
           [](AttentionPlan& plan, nb::handle query_starts, nb::handle contexts, nb::handle table, int64_t block_size) {
             const View starts(query_starts, 1), context(contexts, 1), blocks(table, 2);
             plan.fill(context.size(0), starts.data(), context.data(), blocks.data(), blocks.size(1), blocks.stride(),
                       block_size);
           })
      .def("share_prefixes", &AttentionPlan::share_prefixes)
      .def("shared_partitions", &AttentionPlan::shared_partitions)
      .def_prop_ro("tokens", &AttentionPlan::tokens);
  // A layer's part that never changes is made once; the plan must live as long as what was recorded.
  nb::class_<Layer>(m, "AttentionLayer")
      .def(
          "__init__",
          [](Layer* self, Ptr keys, Ptr values, Ptr key_scales, Ptr value_scales, int64_t block_stride,
             int64_t scale_stride, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, float scale,
             float softcap, Ptr slopes, Ptr sinks, int dtype, int kv_dtype) {
            new (self) Layer{keys, values, key_scales, value_scales, block_stride, scale_stride, heads, kv_heads,
                             head_dim, window, scale, softcap, slopes, sinks, dtype, kv_dtype};
          },
          nb::arg("keys"), nb::arg("values"), nb::arg("key_scales"), nb::arg("value_scales"), nb::arg("block_stride"),
          nb::arg("scale_stride"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("window"),
          nb::arg("scale"), nb::arg("softcap"), nb::arg("slopes"), nb::arg("sinks"), nb::arg("dtype"),
          nb::arg("kv_dtype"));
  m.def("attention", [](AttentionPlan& plan, const Layer& layer, Ptr query, int64_t query_stride, Ptr out,
                        int64_t out_stride, int64_t tokens) {
    call("attention", tokens, [=, &plan](int64_t n) { attend(plan, layer, query, query_stride, out, out_stride, n); });
  });
  m.def("attention_write", [](const Layer& l, Ptr key, Ptr value, int64_t key_stride, int64_t value_stride, Ptr slots,
                              int64_t block_size, int64_t tokens) {
    call("attention_write", tokens, [=](int64_t n) {
      AttentionWrite w{};
      w.key = at<void>(key);
      w.value = at<void>(value);
      w.keys = at<void>(l.keys);
      w.values = at<void>(l.values);
      w.key_scales = at<float>(l.key_scales);
      w.value_scales = at<float>(l.value_scales);
      w.slots = at<int64_t>(slots);
      w.tokens = n;
      w.key_stride = key_stride;
      w.value_stride = value_stride;
      w.block_stride = l.block_stride;
      w.scale_stride = l.scale_stride;
      w.kv_heads = l.kv_heads;
      w.block_size = block_size;
      w.head_dim = l.head_dim;
      w.type = Type(l.type);
      w.kv_type = Type(l.kv_type);
      current_level().attention->write(w);
    });
  });
}

}  // namespace octavo
