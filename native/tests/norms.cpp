// Norms against a plain loop.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "octavo/levels.h"

namespace octavo {

void check_norms() {
  for (int64_t width : {1, 7, 16, 33, 576}) {
    const size_t n = size_t(width);
    std::vector<float> x(3 * n), w(n), out(3 * n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(std::sin(double(i)));
    for (size_t i = 0; i < w.size(); ++i) w[i] = 1.f + 0.1f * float(i % 3);
    current_level().norms->rms_norm(x.data(), w.data(), out.data(), 3, width, width, width, 1e-5f, Type::f32);
    for (int64_t r = 0; r < 3; ++r) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += double(x[size_t(r * width + i)]) * x[size_t(r * width + i)];
      for (int64_t i = 0; i < width; ++i) {
        const size_t at = size_t(r * width + i);
        const double want = x[at] / std::sqrt(squares / double(width) + 1e-5) * w[size_t(i)];
        if (std::fabs(out[at] - want) > 1e-5) {
          std::printf("rms_norm: row %ld, width %ld, column %ld: %g, not %g\n", long(r), long(width), long(i), out[at], want);
          std::exit(1);
        }
      }
    }
  }
}

}  // namespace octavo
