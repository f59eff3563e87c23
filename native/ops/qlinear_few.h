// Products by vector instructions: a panel of weights times up to 8 rows at a time. Include after qlinear_x.h.
#pragma once

namespace octavo {
namespace OCTAVO_LEVEL {

// Where results go: row r, output o of a part at out[r * stride + o], outputs below `columns` only.
template <class T>
struct Results {
  T* out;
  int64_t stride, columns;
  const float* bias;  // of this part, or null

  OCTAVO_INLINE F bias_of(const Results& to, int64_t o) {
    return to.bias ? load(to.bias + o, first(to.columns - o)) : zero();
  }
  OCTAVO_INLINE void put(const Results& to, int64_t row, int64_t o, F y) {
    if (o < to.columns) store(to.out + row * to.stride + o, y, first(to.columns - o));
  }
};

// The float steps of kind int8, the same wherever the sum comes from.
OCTAVO_INLINE F scaled_by_row(I sum, F weight_scale, float x_scale, F bias) {
  return fma(mul(as_float(sum), weight_scale), all(x_scale), bias);
}
// Those of one group: y + sum * (scale of weights * scale of x).
OCTAVO_INLINE F add_scaled(F y, I sum, F weight_scale, float x_scale) {
  return fma(as_float(sum), mul(weight_scale, all(x_scale)), y);
}

// Bytes of weights asked for before they are needed, into the second cache: the first one has too few places for lines on
// their way. Nothing beyond the part is asked for.
constexpr int64_t AHEAD = 4096;
OCTAVO_INLINE void ask_for(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }
OCTAVO_INLINE const uint8_t* ahead_of(const uint8_t* p, const uint8_t* end) { return p + AHEAD < end ? p + AHEAD : p; }

template <class T, int R>
static void few_int8(const uint8_t* panel, const uint8_t* end, const float* scales, const Activations& x, int64_t row,
                     int64_t o, const Results<T>& to) {
  I sum[R][2][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][0][v] = sum[r][1][v] = no_sum();
  const int8_t* at = Activations::quads(x, row, 0);
  for (int64_t c = 0; c < x.chunks; ++c, panel += PANEL * TILE_K, at += ROWS * TILE_K) {
    const uint8_t* ahead = ahead_of(panel, end);
#pragma GCC unroll 16
    for (int quad = 0; quad < 16; ++quad) {
      ask_for(ahead + quad * 64);
      ask_for(ahead + 1024 + quad * 64);
      for (int v = 0; v < V; ++v) {
        const Q low = load_quads(panel + quad * 64 + v * 4 * W), high = load_quads(panel + 1024 + quad * 64 + v * 4 * W);
        for (int r = 0; r < R; ++r) {
          const I of_x = same_quad(at + r * TILE_K + quad * 4);
          sum[r][0][v] = dot8(sum[r][0][v], low, of_x);
          sum[r][1][v] = dot8(sum[r][1][v], high, of_x);
        }
      }
    }
  }
  for (int h = 0; h < 2; ++h)
    for (int v = 0; v < V; ++v) {
      const int64_t at_o = o + h * 16 + v * W;
      const F scale = load(scales + at_o), bias = Results<T>::bias_of(to, at_o);
      for (int r = 0; r < R; ++r) {
        const I whole = OFFSET8 ? sub_int(sum[r][h][v], all_int(x.sum[row + r])) : sum[r][h][v];
        Results<T>::put(to, row + r, at_o, scaled_by_row(whole, scale, x.scale[row + r], bias));
      }
    }
}

// The integers of one span of a group (32 inputs, or 16): W outputs from `q`, R rows, onto `sum`.
template <class Form, int R>
OCTAVO_INLINE void few_sums(const uint8_t* q, const int8_t* at, int span, I* sum) {
  if (Form::BITS == 4 && R <= 2) {
    I high_sum[R];
    for (int r = 0; r < R; ++r) high_sum[r] = no_sum();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Q both = load_quads(q + j * 64), low = low_nibbles(both), high = high_nibbles_up(both);
      for (int r = 0; r < R; ++r) {
        sum[r] = dot4(sum[r], low, same_quad(at + r * TILE_K + j * 4));
        high_sum[r] = dot4(high_sum[r], high, same_quad(at + r * TILE_K + 16 + j * 4));
      }
    }
    for (int r = 0; r < R; ++r) sum[r] = add_int(sum[r], down(high_sum[r]));
  } else if (Form::BITS == 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Q both = load_quads(q + j * 64), low = low_nibbles(both), high = high_nibbles(both);
      for (int r = 0; r < R; ++r) {
        sum[r] = dot4(sum[r], low, same_quad(at + r * TILE_K + j * 4));
        sum[r] = dot4(sum[r], high, same_quad(at + r * TILE_K + 16 + j * 4));
      }
    }
  } else {
    constexpr int QUADS = Form::SPAN / 4;
#pragma GCC unroll 8
    for (int j = span * QUADS; j < (span + 1) * QUADS; ++j) {
      const Q weights = load_quads(q + j * 64);
      for (int r = 0; r < R; ++r) sum[r] = dot8(sum[r], weights, same_quad(at + r * TILE_K + j * 4));
    }
  }
}

template <class Form, class T, int R>
static void few_grouped(const uint8_t* panel, const uint8_t* end, const Activations& x, int64_t row, int64_t o,
                        const Results<T>& to) {
  constexpr int SPANS = GROUP / Form::SPAN;
  F y[2][V][R];
  for (int h = 0; h < 2; ++h)
    for (int v = 0; v < V; ++v)
      for (int r = 0; r < R; ++r) y[h][v][r] = Results<T>::bias_of(to, o + h * 16 + v * W);
  const int64_t numbers = row / ROWS * x.groups * ROWS + row % ROWS, groups = x.groups;
  const int32_t* x_sum = SPANS == 1 ? x.sum + numbers : x.half_sum + (row / ROWS * x.groups * 2 * ROWS + row % ROWS);
  const float *x_scale = x.scale + numbers, *scaled_sum = x.scaled_sum + numbers;
  const int8_t* of_x = Activations::quads(x, row, 0);
  for (int64_t g = 0; g < groups; ++g, x_sum += SPANS * ROWS, x_scale += ROWS, scaled_sum += ROWS) {
    const uint8_t* group = Form::group(panel, g);
    const uint16_t* outer = Form::outer(panel, g);
    const int8_t* at = of_x + (g >> 1) * (ROWS * TILE_K) + (g & 1) * GROUP;
    const uint8_t* ahead = ahead_of(group, end);
#pragma GCC unroll 32
    for (int64_t i = 0; i < Form::BYTES; i += 64) ask_for(ahead + i);
    for (int h = 0; h < 2; ++h)
      for (int v = 0; v < V; ++v) {
        const int of = h * 16 + v * W;
        for (int s = 0; s < SPANS; ++s) {
          I sum[R];
          for (int r = 0; r < R; ++r) sum[r] = Form::LEFT ? times<-Form::LEFT>(x_sum + s * ROWS + r) : no_sum();
          few_sums<Form, R>(group + h * Form::HALF + v * 4 * W, at, s, sum);
          const F scale = Form::scale(group, outer, s, of);
          for (int r = 0; r < R; ++r) y[h][v][r] = add_scaled(y[h][v][r], sum[r], scale, x_scale[r]);
        }
        if (Form::MIN) {
          const F minimum = Form::minimum(group, outer, of);
          for (int r = 0; r < R; ++r) y[h][v][r] = fma(minimum, all(scaled_sum[r]), y[h][v][r]);
        }
      }
  }
  for (int h = 0; h < 2; ++h)
    for (int v = 0; v < V; ++v)
      for (int r = 0; r < R; ++r) Results<T>::put(to, row + r, o + h * 16 + v * W, y[h][v][r]);
}

// Most rows at once, by how many registers there are.
constexpr int MOST_INT8 = W == 16 ? 8 : W == 8 ? 2 : 1, MOST_GROUPED = W == 16 ? 8 : W == 8 ? 2 : 1;

// Run `step(row, rows as a type)` over all rows in blocks of 8, 4, 2 and 1; a block never crosses a multiple of 16.
template <int MOST, class Step>
OCTAVO_INLINE void in_blocks(int64_t rows, const Step& step) {
  int64_t row = 0;
  if (MOST >= 8)
    for (; row + 8 <= rows; row += 8) step(row, std::integral_constant<int, MOST >= 8 ? 8 : 1>());
  if (MOST >= 4)
    for (; row + 4 <= rows; row += 4) step(row, std::integral_constant<int, MOST >= 4 ? 4 : 1>());
  if (MOST >= 2)
    for (; row + 2 <= rows; row += 2) step(row, std::integral_constant<int, MOST >= 2 ? 2 : 1>());
  for (; row < rows; ++row) step(row, std::integral_constant<int, 1>());
}

// One panel times all rows; the part's weights end at `end`.
template <class T>
static void few_panel(const QPart& part, int64_t panel, const uint8_t* weights, const uint8_t* end, const Activations& x,
                      const Results<T>& to) {
  const int64_t o = panel * PANEL;
  if (x.by_row)
    in_blocks<MOST_INT8>(x.rows, [&](int64_t row, auto rows) {
      few_int8<T, decltype(rows)::value>(weights, end, (const float*)part.scales, x, row, o, to);
    });
  else
    with_grouped(QKind(part.kind), [&](auto form) {
      in_blocks<MOST_GROUPED>(x.rows, [&](int64_t row, auto rows) {
        few_grouped<decltype(form), T, decltype(rows)::value>(weights, end, x, row, o, to);
      });
    });
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
