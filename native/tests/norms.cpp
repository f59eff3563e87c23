// Norms against a plain loop.
#include <cmath>
#include <vector>

#include "check.h"
#include "octavo/levels.h"

namespace octavo {

void check_norms() {
  for (int64_t width : {1, 7, 16, 33, 64, 576}) {
    const int64_t rows = 3, heads = 2, row = heads * width + 5, head = width + 1;
    std::vector<float> x = waves(rows * row + 1), w = waves(width, 0.3), out(size_t(rows * heads * width));
    current_level().norms->rms_norm(x.data(), w.data(), out.data(), rows, heads, width, {row, head},
                                    {heads * width, width}, 1e-5f, Type::f32);
    std::vector<float> residual = waves(rows * width, 2.0), more = waves(rows * width, 0.7), normed(residual.size());
    std::vector<float> sum(residual.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = residual[i] + more[i];
    current_level().norms->add_rms_norm(more.data(), residual.data(), w.data(), normed.data(), residual.data(), rows,
                                        width, width, width, width, 1e-5f, Type::f32, Type::f32, Type::f32);
    const auto expect = [&](const float* from, const float* got, const char* what) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += double(from[i]) * from[i];
      for (int64_t i = 0; i < width; ++i)
        near(got[i], from[i] / std::sqrt(squares / double(width) + 1e-5) * w[size_t(i)], 1e-5, what);
    };
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h)
        expect(x.data() + r * row + h * head, out.data() + (r * heads + h) * width, "rms_norm");
      expect(sum.data() + r * width, normed.data() + r * width, "add_rms_norm");
      for (int64_t i = 0; i < width; ++i)
        near(residual[size_t(r * width + i)], sum[size_t(r * width + i)], 0, "the sum of add_rms_norm");
    }
  }
}

}  // namespace octavo
