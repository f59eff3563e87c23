// What the checks share: numbers to compute with, and the end of the program where one differs.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace octavo {

// `count` numbers between -1 and 1 that do not repeat.
inline std::vector<float> waves(int64_t count, double phase = 0.0) {
  std::vector<float> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = float(std::sin(1.7 * double(i) + phase));
  return out;
}

// |got - want| <= tolerance * max(1, |want|), or the end.
inline void near(double got, double want, double tolerance, const char* what) {
  if (std::fabs(got - want) <= tolerance * std::fmax(1.0, std::fabs(want))) return;
  std::printf("%s: %.9g, not %.9g\n", what, got, want);
  std::exit(1);
}

// `holds`, or the end.
inline void must(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

}  // namespace octavo
