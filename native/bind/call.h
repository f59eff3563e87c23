// How an operator is called from Python: at once, or written on a tape to be replayed for any number of rows.
//
// An operator whose row count is the step's number of tokens is bound as
//     m.def("name", [](Ptr x, ..., int64_t rows) { call(rows, [=](int64_t rows) { current_level().f->name(..., rows); }); });
// Pointers must stay valid as long as the tape: buffers of a recording come from its own pool (octavo/worker/recorded.py).
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "octavo/levels.h"

namespace octavo {

using Ptr = uint64_t;  // what tensor.data_ptr() gives
template <class T>
inline T* at(Ptr p) { return reinterpret_cast<T*>(p); }

class Tape {
 public:
  // The tape being recorded by this thread, if any: operators are then written down and not run.
  static Tape*& recording() {
    static thread_local Tape* tape = nullptr;
    return tape;
  }
  void add(std::function<void(int64_t)> op) { calls_.push_back(std::move(op)); }
  void replay(int64_t rows) const {
    for (const auto& op : calls_) op(rows);
  }
  size_t size() const { return calls_.size(); }

 private:
  std::vector<std::function<void(int64_t)>> calls_;
};

template <class Op>
inline void call(int64_t rows, Op&& op) {
  if (Tape* tape = Tape::recording())
    tape->add(std::forward<Op>(op));
  else
    op(rows);
}

// One function a family, in bind/<family>.cpp.
void bind_norms(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_qlinear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_pointwise(nanobind::module_& m);
void bind_rotary(nanobind::module_& m);
void bind_gather(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace octavo
