// See octavo/qlinear.h.
#include "octavo/qlinear.h"

#include <type_traits>

#include "octavo/parallel.h"
#include "octavo/vec.h"
// in this order: each builds on the ones before
#include "qlinear_layout.h"
#include "qlinear_x.h"
#include "qlinear_few.h"
#include "qlinear_tiles.h"
#include "qlinear_pack.h"

namespace octavo {
namespace OCTAVO_LEVEL {

static int64_t packed_bytes(QKind kind, int64_t columns, int64_t k) {
  return blocks_of(columns, PANEL) * panel_bytes(kind, k);
}

static Scratch& scratch_for_x() {
  static thread_local Scratch kept;
  return kept;
}
static Scratch& scratch_for_weights() {
  static thread_local Scratch kept;
  return kept;
}

// Rows from which tiles are faster than dot products.
constexpr int64_t TILES_INT8 = 5, TILES_GROUPED = 12;

// Rows that are multiplied before others are begun, so that what is read of them again comes from the second cache.
static int64_t rows_in_turn(const Activations& x) {
#if OCTAVO_LEVEL_AMX
  if (x.rows >= (x.by_row ? TILES_INT8 : TILES_GROUPED)) return rows_at_once(x);
#endif
  return x.rows;
}

// Panels `begin` .. `end` of a part times rows `first_row` .. `last_row`.
template <class T>
static void multiply_panels(const QPart& part, int64_t begin, int64_t end, const Activations& x, int64_t first_row,
                            int64_t last_row, const Results<T>& to) {
#if OCTAVO_LEVEL_AMX
  if (x.by_row && x.rows >= TILES_INT8)
    return tiles_int8(part, begin, end, x, first_row, last_row, to, scratch_for_weights());
  if (!x.by_row && x.rows >= TILES_GROUPED)
    return with_grouped(QKind(part.kind), [&](auto form) {
      tiles_grouped<decltype(form), T>(part, begin, end, x, first_row, last_row, to, scratch_for_weights());
    });
#endif
  const int64_t size = panel_bytes(QKind(part.kind), x.k);
  const uint8_t* packed = (const uint8_t*)part.packed;
  const uint8_t* after = packed + blocks_of(part.columns, PANEL) * size;
  for (int64_t p = begin; p < end; ++p) few_panel(part, p, packed + p * size, after, x, to);
}

template <class T>
static void multiply_all(const QPart* parts, int64_t num_parts, const float* bias, const Activations& x, T* out,
                         int64_t stride) {
  int64_t panels = 0;
  for (int64_t i = 0; i < num_parts; ++i) panels += blocks_of(parts[i].columns, PANEL);
  const int64_t in_turn = rows_in_turn(x);
  for (int64_t row = 0; row < x.rows; row += in_turn)
    parallel(panels, 1, [&](int64_t begin, int64_t end, int) {
      int64_t before = 0;  // panels of the parts gone by
      for (int64_t i = 0; i < num_parts && before < end; ++i) {
        const QPart& part = parts[i];
        const int64_t own = blocks_of(part.columns, PANEL);
        const int64_t from = begin > before ? begin - before : 0, until = end - before < own ? end - before : own;
        if (from < until)
          multiply_panels(part, from, until, x, row, x.rows - row < in_turn ? x.rows : row + in_turn,
                          Results<T>{out + part.first, stride, part.columns, bias ? bias + part.first : nullptr});
        before += own;
      }
    });
}

static void multiply(const QPart* parts, int64_t num_parts, const float* bias, const void* x, Type x_type,
                     int64_t x_stride, void* out, Type out_type, int64_t out_stride, int64_t rows, int64_t k) {
  if (rows <= 0) return;
  const Activations rounded = Activations::in(scratch_for_x(), rows, k, QKind(parts[0].kind) == QKind::int8);
  if (x_type == Type::bf16)
    round_rows(rounded, (const bf16*)x, x_stride);
  else
    round_rows(rounded, (const float*)x, x_stride);
  if (out_type == Type::bf16)
    multiply_all(parts, num_parts, bias, rounded, (bf16*)out, out_stride);
  else
    multiply_all(parts, num_parts, bias, rounded, (float*)out, out_stride);
}

extern const QLinearTable qlinear_table;
const QLinearTable qlinear_table = {packed_bytes, pack, multiply, quantize_int8, quantize_int4};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
