// How an operator is called from Python: at once, or written on a tape to be replayed for any number of rows.
//
// An operator whose row count is the step's number of tokens is bound as
//     m.def("name", [](Ptr x, ..., int64_t rows) {
//       call("name", rows, [=](int64_t rows) { current_level().f->name(..., rows); });
//     });
// Pointers must stay valid as long as the tape: buffers of a recording come from its own pool (octavo/worker/recorded.py).
#pragma once
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "octavo/levels.h"
#include "octavo/team.h"

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
  void add(std::string name, std::function<void(int64_t)> op) {
    calls_.push_back(std::move(op));
    names_.push_back(std::move(name));
    product_.reset();
  }
  void add(const LinearCall& product) {
    add("linear", [product](int64_t rows) { multiply(product, rows); });
    product_ = product;
  }
  // A gated activation of what the last call gives is made part of that call, if it is a product. Nobody else may read
  // the product: a recording that is compared with the model's own pass (octavo/worker/recorded.py) would show it.
  bool gate_last(Ptr x, int64_t x_row, int64_t width, Ptr out, int64_t out_row, Gate gate, Type type) {
    if (!product_ || gate != Gate::silu || product_->gated) return false;
    LinearCall product = *product_;
    if (product.out != at<void>(x) || product.out_stride != x_row || product.outputs != 2 * width ||
        product.out_type != type)
      return false;
    product.gated = at<void>(out);
    product.gated_stride = out_row;
    calls_.back() = [product](int64_t rows) { multiply(product, rows); };
    names_.back() = "linear_gated";
    return true;
  }
  static void multiply(LinearCall product, int64_t rows) {
    product.rows = rows;
    current_level().linear->multiply(product);
  }
  void replay(int64_t rows) const {
    each([rows](const Op& op) { op(rows); });
  }
  // Seconds that each entry took, in the order of `names`.
  std::vector<double> timed_replay(int64_t rows) const {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds;
    seconds.reserve(calls_.size());
    Clock::time_point began = Clock::now();
    each([&](const Op& op) {
      op(rows);
      const Clock::time_point now = Clock::now();
      seconds.push_back(std::chrono::duration<double>(now - began).count());
      began = now;
    });
    return seconds;
  }
  size_t size() const { return calls_.size(); }
  const std::vector<std::string>& names() const { return names_; }

 private:
  using Op = std::function<void(int64_t)>;

  // What shows that a step is worth other threads is an operator that shares its work: they stay for those after it. For
  // a model so small that none does, nobody is woken.
  template <class Do>
  void each(const Do& does) const {
    size_t next = 0;
    const int64_t before = Team::gathered();
    while (next < calls_.size() && Team::gathered() == before) does(calls_[next++]);
    auto rest = [&] {
      while (next < calls_.size()) does(calls_[next++]);
    };
    using Rest = decltype(rest);
    if (next < calls_.size()) Team::lead([](void* data) { (*static_cast<Rest*>(data))(); }, &rest);
  }

  std::vector<Op> calls_;
  std::vector<std::string> names_;
  std::optional<LinearCall> product_;  // the last call, where it is one
};

template <class Op>
inline void call(const char* name, int64_t rows, Op&& op) {
  if (Tape* tape = Tape::recording())
    tape->add(name, std::forward<Op>(op));
  else
    op(rows);
}

// Without a name the family's stands for it: Op's type says in which bind_<family> it was written.
template <class Op>
inline void call(int64_t rows, Op&& op) {
  static const std::string family = [] {
    std::string text = __PRETTY_FUNCTION__;
    const size_t begin = text.find("bind_");
    if (begin == std::string::npos) return std::string("operator");
    const size_t end = text.find_first_of("(<: ", begin);
    return text.substr(begin + 5, end - begin - 5);
  }();
  call(family.c_str(), rows, std::forward<Op>(op));
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
void bind_probe(nanobind::module_& m);
void bind_spare(nanobind::module_& m);

}  // namespace octavo
