// AMX tiles. Include it in ops/*.cpp only; it is empty at every level but amx.
//
// GCC 12's intrinsics do not say that they read or write memory. These are for loops over registers: `fence` before the
// first load of what was written by other code, and after the last store.
#pragma once
#include <cstdint>
#include <cstring>

#include "octavo/vec.h"

#if defined(OCTAVO_LEVEL_AMX)

#define OCTAVO_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)))
// The same for what is not wanted soon again. The first cache then keeps what it has: a block of 2 x 2 tiles fed from the
// second cache ran at 76 % of the peak with the plain load for both sides, at 90 % with this one for both, and at 100 % with
// the plain one for a side that fits into the first cache and this one for the other.
#define OCTAVO_TILE_LOAD_ONCE(tile, from, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)))
#define OCTAVO_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define OCTAVO_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
// sum += rows of a by columns of b. bf16 pairs into float32; bytes, unsigned (U) or signed (S), first those of a.
#define OCTAVO_TILE_DOT(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define OCTAVO_TILE_DOT_U8S8(sum, a, b) asm volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define OCTAVO_TILE_DOT_S8U8(sum, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define OCTAVO_TILE_DOT_S8S8(sum, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

namespace octavo {
namespace OCTAVO_LEVEL {

OCTAVO_INLINE void fence() { asm volatile("" ::: "memory"); }

// Tiles 0 1 / 2 3 for sums, 4 and 5 for the upper and the lower rows, 6 and 7 for 16 columns each. Rows of 64 bytes.
OCTAVO_INLINE void shape_tiles(int upper, int lower) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, none[14] = {0};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {0};
  } shape;
  const uint8_t rows[8] = {uint8_t(upper), uint8_t(upper), uint8_t(lower), uint8_t(lower),
                           uint8_t(upper), uint8_t(lower), 16, 16};
  std::memcpy(shape.rows, rows, 8);
  asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}
// Without it a task switch saves and restores 8 KiB of tiles.
OCTAVO_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

#endif
