// Rotation and the write to the cache against plain loops.
#include <cmath>
#include <vector>

#include "check.h"
#include "octavo/levels.h"

namespace octavo {

static void check_turning(int64_t dim, int64_t turned) {
  const int64_t rows = 3, heads = 2, row = 2 * heads * dim + 1;
  std::vector<float> x = waves(rows * row), angles(size_t(rows * turned)), before = x;
  for (size_t i = 0; i < angles.size(); ++i) angles[i] = float(std::cos(0.1 * double(i)));
  current_level().rotary->rotary(x.data(), x.data() + heads * dim, angles.data(), rows, heads, heads, turned,
                                 {row, dim}, {row, dim}, Type::f32, Type::f32);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < 2 * heads; ++h)
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t half = turned / 2, j = i < half ? i : i - half;
        const size_t here = size_t(r * row + h * dim + i), other = size_t(i < half ? here + half : here - half);
        double want = before[here];
        if (i < turned) {
          const double c = angles[size_t(r * turned + j)], s = angles[size_t(r * turned + half + j)];
          want = before[here] * c + (i < half ? -1 : 1) * before[other] * s;
        }
        near(x[here], want, 1e-6, "rotary");
      }
}

static void check_writing(int64_t dim) {
  const int64_t rows = 4, heads = 3, size = 5, blocks = 3, row = heads * dim + 2;
  std::vector<float> key = waves(rows * row), value = waves(rows * row, 2.0);
  std::vector<float> cache(size_t(blocks * 2 * heads * size * dim), -9.f), want = cache;
  const int64_t slots[] = {7, -1, 14, 0}, half = heads * size * dim;
  const Cache to = {cache.data(), cache.data() + half, size, 2 * half, size * dim, 2 * half, size * dim};
  current_level().rotary->write_kv(key.data(), value.data(), to, slots, rows, heads, dim, {row, dim}, {row, dim},
                                   Type::f32, Type::f32);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads && slots[r] >= 0; ++h)
      for (int64_t i = 0; i < dim; ++i) {
        const size_t place = size_t(slots[r] / size * 2 * half + h * size * dim + slots[r] % size * dim + i);
        want[place] = key[size_t(r * row + h * dim + i)];
        want[place + size_t(half)] = value[size_t(r * row + h * dim + i)];
      }
  for (size_t i = 0; i < want.size(); ++i) near(cache[i], want[i], 0, "write_kv");
}

void check_rotary() {
  check_turning(64, 64);
  check_turning(20, 20);
  check_turning(24, 6);
  for (int64_t dim : {1, 7, 64}) check_writing(dim);
}

void check_gather() {
  for (int64_t width : {1, 3, 100}) {
    const std::vector<float> table = waves(5 * width);
    const int64_t index[] = {4, 0, 4, -1, 5};
    std::vector<float> out(size_t(5 * width), 7.f);
    current_level().gather->gather_rows(table.data(), index, out.data(), 5, 5, width * 4);
    for (int64_t r = 0; r < 5; ++r)
      for (int64_t i = 0; i < width; ++i)
        near(out[size_t(r * width + i)], r < 3 ? table[size_t(index[r] * width + i)] : 0.0, 0, "gather_rows");
  }
}

}  // namespace octavo
