// Passes over one row: its largest logit, the mass of its weights, and which candidates stay.
//
// No row is sorted. A first pass keeps the largest logit of every block of 256, so that later passes look only at blocks
// that can hold a candidate; a border between kept and dropped is found by narrowing a bracket, four ways a pass.
// Included by ops/sampling.cpp only.
#pragma once
#include <cfloat>

#include "sampling_vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t BLOCK = 256;
// A weight below e^-50 is lighter than half a unit in the last place of any sum that holds the largest weight, 1.
constexpr float LEAST = -50.f;
constexpr float SMALLEST = -87.33654f;  // the least argument of exp

static int64_t num_blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }
static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

struct Peak {
  float value;
  int64_t at;   // the lowest place that has it
  bool number;  // no element is NaN
};

// Asks for what will be read 8 KiB later: hardware stops guessing at every page's end. Half again as quick
// for logits that come from the third cache. It may lie past the row.
template <class T>
OCTAVO_INLINE void fetch(const T* x) {
  constexpr int AHEAD = 8192, LINE = 64;
  for (int at = 0; W > 1 && at < 2 * W * int(sizeof(T)); at += LINE)
    __builtin_prefetch((const char*)((uintptr_t)x + AHEAD + at), 0, 3);
}

// tops [num_blocks(n)]: the largest of each block.
template <class T>
static Peak find_peak(const T* x, int64_t n, float* tops) {
  Bits odd = 0;
  float best = -INFINITY;
  for (int64_t b = 0; b < num_blocks(n); ++b) {
    const T* from = x + b * BLOCK;
    const int64_t count = least_of(BLOCK, n - b * BLOCK);
    F top = all(-INFINITY);
    if (count == BLOCK) {
      for (int64_t i = 0; i < BLOCK; i += 2 * W) {
        fetch(from + i);
        const F u = load(from + i), v = load(from + i + W);
        odd |= unordered(u, v);
        top = max(top, max(u, v));
      }
    } else {
      for (int64_t i = 0; i < count; i += W) {
        const F u = load_or_least(from + i, count - i);
        odd |= unordered(u, u);
        top = max(top, u);
      }
    }
    tops[b] = highest(top);
    best = best > tops[b] ? best : tops[b];
  }
  if (odd) return {best, 0, false};
  int64_t b = 0;
  while (tops[b] != best) ++b;
  const int64_t end = least_of(n, (b + 1) * BLOCK);
  for (int64_t i = b * BLOCK; i < end; i += W)
    if (const Bits m = equal(load_or_least(x + i, end - i), all(best))) return {best, i + lowest(m), true};
  return {best, b * BLOCK, true};
}

// One row's scaled logits, z = (x - peak) / temperature: differences are divided, since logits overflow at tiny
// temperatures. With peak 0 and temperature 1, the logits themselves.
struct Scaled {
  const float* x;
  int64_t n;
  float peak, temperature;
  const float* tops;

  template <bool DIVIDE>
  F at(int64_t i, int64_t end) const {
    const F d = sub(load_or_least(x + i, end - i), all(peak));
    return DIVIDE ? div(d, all(temperature)) : d;
  }
  float of(float value) const { return (value - peak) / temperature; }
};

// Sum of the weights e^z with z >= least, and of each block's own.
template <bool DIVIDE>
static double weigh_row(const Scaled& row, float least, double* sums) {
  const F floor = all(least > SMALLEST ? least : SMALLEST);
  double mass = 0;
  for (int64_t b = 0; b < num_blocks(row.n); ++b) {
    sums[b] = 0;
    if (!(row.of(row.tops[b]) >= least)) continue;
    const int64_t end = least_of(row.n, (b + 1) * BLOCK);
    D sum = no_mass();
    for (int64_t i = b * BLOCK; i < end; i += W) {
      const F z = row.at<DIVIDE>(i, end);
      sum = plus(sum, wide(where(at_least(z, floor), exp(z), zero())));
    }
    sums[b] = total(sum);
    mass += sums[b];
  }
  return mass;
}

static double weigh_row(const Scaled& row, float least, double* sums) {
  return row.temperature == 1.f ? weigh_row<false>(row, least, sums) : weigh_row<true>(row, least, sums);
}

// Candidates in rising order of their ids: [count], with room for a vector more.
struct Candidates {
  int32_t* ids;
  float* z;
  float* weights;
  int64_t count;
};

template <bool DIVIDE>
static void gather(const Scaled& row, float least, Candidates& c) {
  const F floor = all(least);
  int64_t n = 0;
  for (int64_t b = 0; b < num_blocks(row.n); ++b) {
    if (!(row.of(row.tops[b]) >= least)) continue;
    const int64_t end = least_of(row.n, (b + 1) * BLOCK);
    for (int64_t i = b * BLOCK; i < end; i += W) {
      const F z = row.at<DIVIDE>(i, end);
      const Bits m = at_least(z, floor) & first_bits(end - i);
      if (!m) continue;
      pack(c.z + n, m, z);
      pack_places(c.ids + n, m, i);
      n += ones(m);
    }
  }
  c.count = n;
}

static void gather(const Scaled& row, float least, Candidates& c) {
  if (row.temperature == 1.f)
    gather<false>(row, least, c);
  else
    gather<true>(row, least, c);
}

// Their weights, and the sum.
static double weigh(Candidates& c) {
  D sum = no_mass();
  for (int64_t i = 0; i < c.count; i += W) {
    const F w = exp(load_or_least(c.z + i, c.count - i));
    store(c.weights + i, w);
    sum = plus(sum, first_bits(c.count - i), wide(w));
  }
  return total(sum);
}

// ---- borders ---------------------------------------------------------------------------------------------------

// Keep what is larger than `at`, and the first `equals` of those that are equal to it.
struct Border {
  float at;
  int64_t equals;
};

// Floats as integers in the same order; both zeros are 0.
static int64_t rank_of(float x) {
  int32_t b;
  std::memcpy(&b, &x, 4);
  return b < 0 ? -int64_t(b & 0x7fffffff) : int64_t(b);
}
static float of_rank(int64_t rank) {
  const int32_t b = int32_t(rank < 0 ? -rank : rank) | (rank < 0 ? int32_t(0x80000000) : 0);
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

// A number above x; no subnormal one, which a processor told to flush them would take for zero.
static float next_above(float x) { return x < FLT_MIN && x > -FLT_MIN ? FLT_MIN : of_rank(rank_of(x) + 1); }

// Elements of at least some threshold: how many, and their mass (or again how many, where elements count as 1).
struct Above {
  int64_t count = 0;
  double mass = 0;
};

template <bool MASS>
static void census(const float* z, const float* w, int64_t n, const float* thresholds, Above* found) {
  const F t0 = all(thresholds[0]), t1 = all(thresholds[1]), t2 = all(thresholds[2]);
  int64_t c0 = 0, c1 = 0, c2 = 0;
  D d0 = no_mass(), d1 = no_mass(), d2 = no_mass();
  for (int64_t i = 0; i < n; i += W) {
    const F v = load_or_least(z + i, n - i);
    const Bits real = first_bits(n - i);
    const Bits m0 = at_least(v, t0) & real, m1 = at_least(v, t1) & real, m2 = at_least(v, t2) & real;
    c0 += ones(m0), c1 += ones(m1), c2 += ones(m2);
    if (MASS) {
      const D x = wide(load_or_least(w + i, n - i));
      d0 = plus(d0, m0, x), d1 = plus(d1, m1, x), d2 = plus(d2, m2, x);
    }
  }
  found[0] = {c0, MASS ? total(d0) : double(c0)};
  found[1] = {c1, MASS ? total(d1) : double(c1)};
  found[2] = {c2, MASS ? total(d2) : double(c2)};
}

// Three thresholds strictly between `low` and `high`, evenly by value; by rank once that leads nowhere.
static void split(float low, float high, int round, float* thresholds) {
  constexpr int BY_VALUE = 12;
  const float step = (high - low) * 0.25f;
  for (int i = 0; i < 3; ++i) thresholds[i] = high - step * float(i + 1);
  if (round < BY_VALUE && thresholds[0] < high && thresholds[2] > low) return;
  const int64_t top = rank_of(high), span = top - rank_of(low);
  for (int i = 0; i < 3; ++i) thresholds[i] = of_rank(top - span * (i + 1) / 4);
}

// Insertion sort by falling value, equals in their order.
static void sort_few(float* values, double* weights, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const float v = values[i];
    const double w = weights[i];
    int64_t j = i;
    for (; j > 0 && values[j - 1] < v; --j) values[j] = values[j - 1], weights[j] = weights[j - 1];
    values[j] = v, weights[j] = w;
  }
}

// In falling order (equals in theirs), an element stays while the mass before it is below `target`; MASS false: every
// element weighs 1. Elements are at least `low` and at most `top`; all of them reach `target`.
template <bool MASS>
static Border find_border(const float* z, const float* w, int64_t n, float low, float top, double target) {
  constexpr int64_t FEW = 32;
  float high = next_above(top);  // nothing is as large
  Above at_high, at_low = {n, target};
  for (int round = 0; at_low.count - at_high.count > FEW && rank_of(high) - rank_of(low) > 1; ++round) {
    float thresholds[3];
    Above found[3];
    split(low, high, round, thresholds);
    census<MASS>(z, w, n, thresholds, found);
    int i = 0;
    while (i < 3 && found[i].mass < target) high = thresholds[i], at_high = found[i], ++i;
    if (i < 3) low = thresholds[i], at_low = found[i];
  }
  float values[FEW + W];
  double weights[FEW + W];
  const bool one_value = at_low.count - at_high.count > FEW;  // then all in the bracket are equal to `low`
  double before = at_high.mass;
  Border border = {low, 0};
  int64_t few = 0;
  for (int64_t i = 0; i < n; i += W) {
    const F v = load_or_least(z + i, n - i);
    Bits m = at_least(v, all(low)) & ~at_least(v, all(high)) & first_bits(n - i);
    if (one_value) {
      for (; m && before < target; m &= m - 1, ++border.equals)
        before += MASS ? double(w[i + lowest(m)]) : 1.;
      if (!(before < target)) return border;
    }
    for (; m; m &= m - 1) {
      const int64_t j = i + lowest(m);
      values[few] = z[j], weights[few] = MASS ? double(w[j]) : 1., ++few;
    }
  }
  if (one_value) return border;
  sort_few(values, weights, few);
  int64_t kept = 0;
  while (kept < few && before < target) before += weights[kept++];
  if (!kept) return {high, n};  // rounding: what is above the bracket reaches the target already
  border.at = values[kept - 1];
  for (int64_t i = 0; i < kept; ++i) border.equals += values[i] == border.at;
  return border;
}

// Drops what lies beyond the border, in place. Weights move along where `weighed`.
static void drop(Candidates& c, const Border& border, bool weighed) {
  int64_t n = 0, left = border.equals;
  const F at = all(border.at);
  for (int64_t i = 0; i < c.count; i += W) {
    const F z = load_or_least(c.z + i, c.count - i);
    const Bits real = first_bits(c.count - i);
    Bits same = equal(z, at) & real;
    const int equals = ones(same);
    if (equals <= left) {
      left -= equals;
    } else {
      Bits some = 0;
      for (; left > 0; --left, same &= same - 1) some |= same & (~same + 1);
      same = some;
    }
    const Bits m = (above(z, at) & real) | same;
    if (!m) continue;
    pack(c.z + n, m, z);
    if (weighed) pack(c.weights + n, m, load(c.weights + i));
    pack(c.ids + n, m, c.ids + i);
    n += ones(m);
  }
  c.count = n;
}

// ---- draw ------------------------------------------------------------------------------------------------------

// Place at which the running sum of `weights` first exceeds `target`; never one of weight 0 where another has some.
static int64_t first_above(const float* weights, int64_t n, double target) {
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += double(weights[i]);
    if (weights[i] > 0.f) last = i;
    if (sum > target) return i;
  }
  return last;
}

// The block in which `target` lies, which is then less what comes before.
static int64_t block_above(const double* sums, int64_t blocks, double& target) {
  double before = 0;
  int64_t last = 0;
  double before_last = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (sums[b] > 0) last = b, before_last = before;
    before += sums[b];
    if (before > target) break;
  }
  target -= before_last;
  return last;
}

// The place among candidates at which their running weight first exceeds `uniform` times its total.
static int64_t invert(const Candidates& c, double uniform, double* sums) {
  double mass = 0;
  for (int64_t b = 0; b < num_blocks(c.count); ++b) {
    const int64_t end = least_of(c.count, (b + 1) * BLOCK);
    D sum = no_mass();
    for (int64_t i = b * BLOCK; i < end; i += W)
      sum = plus(sum, first_bits(end - i), wide(load_or_least(c.weights + i, end - i)));
    sums[b] = total(sum);
    mass += sums[b];
  }
  double target = uniform * mass;
  const int64_t from = block_above(sums, num_blocks(c.count), target) * BLOCK;
  return from + first_above(c.weights + from, least_of(BLOCK, c.count - from), target);
}

// The same over a whole row whose blocks were weighed by `weigh_row`.
static int64_t invert(const Scaled& row, float least, double mass, const double* sums, double uniform) {
  double target = uniform * mass;
  const int64_t from = block_above(sums, num_blocks(row.n), target) * BLOCK, end = least_of(row.n, from + BLOCK);
  float weights[BLOCK + W];
  const F floor = all(least > SMALLEST ? least : SMALLEST);
  for (int64_t i = from; i < end; i += W) {
    const F z = row.temperature == 1.f ? row.at<false>(i, end) : row.at<true>(i, end);
    store(weights + (i - from), where(at_least(z, floor), exp(z), zero()));
  }
  return from + first_above(weights, end - from, target);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
