// Plain types that cross the border between operators and their callers.
#pragma once
#include <cstdint>

namespace octavo {

struct bf16 {
  uint16_t bits;
};

// Types of a tensor's elements, as the Python side numbers them (octavo/ops/native.py: DTYPES).
enum class Type : int32_t { f32 = 0, bf16 = 1, s8 = 2, u8 = 3, fp8_e4m3 = 4, fp8_e5m2 = 5, f16 = 6 };

}  // namespace octavo
