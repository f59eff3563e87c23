// Gated activations against a plain loop.
#include <cmath>
#include <vector>

#include "check.h"
#include "octavo/levels.h"

namespace octavo {

void check_pointwise() {
  for (int64_t width : {1, 5, 16, 33, 600}) {
    const int64_t rows = 3, row = 2 * width + 3;
    std::vector<float> x = waves(rows * row), out(size_t(rows * width));
    for (float& v : x) v *= 4;
    for (Gate gate : {Gate::silu, Gate::gelu, Gate::gelu_tanh}) {
      current_level().pointwise->gated(x.data(), out.data(), rows, width, row, width, gate, Type::f32);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i) {
          const double g = x[size_t(r * row + i)], up = x[size_t(r * row + width + i)];
          const double act = gate == Gate::silu  ? g / (1 + std::exp(-g))
                             : gate == Gate::gelu ? g * 0.5 * (1 + std::erf(g * std::sqrt(0.5)))
                                                  : g * 0.5 * (1 + std::tanh(0.79788456080286536 * (g + 0.044715 * g * g * g)));
          near(out[size_t(r * width + i)], act * up, 5e-6, "gated");
        }
    }
  }
}

}  // namespace octavo
