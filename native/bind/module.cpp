// The Python module octavo._native. `octavo.ops.native` is its only importer and says what each function is.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <string>

#include "call.h"

namespace nb = nanobind;
using namespace octavo;

NB_MODULE(_native, m) {
  // They are for those who write bindings. A process forked from one with an engine ends with objects that threads held
  // which it does not have, and its user can do nothing about them.
  nb::set_leak_warnings(false);

  m.def("levels", [] {
    std::vector<std::string> names;
    for (int i = 0; i < num_levels(); ++i) names.push_back(level(i).name);
    return names;
  });
  m.def("level", [] { return std::string(current_level().name); });
  m.def("use_level", [](const std::string& name) { return use_level(name.c_str()); });
  m.def("num_threads", [] { return omp_get_max_threads(); });

  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("__len__", &Tape::size)
      .def("start", [](Tape& tape) { Tape::recording() = &tape; })
      .def("stop", [](Tape&) { Tape::recording() = nullptr; })
      .def("replay", &Tape::replay, nb::call_guard<nb::gil_scoped_release>())
      .def("timed_replay", &Tape::timed_replay, nb::call_guard<nb::gil_scoped_release>())
      .def("names", &Tape::names);

  bind_norms(m);
  bind_linear(m);
  bind_qlinear(m);
  bind_attention(m);
  bind_pointwise(m);
  bind_rotary(m);
  bind_gather(m);
  bind_sampling(m);
  bind_probe(m);
  bind_spare(m);
}
