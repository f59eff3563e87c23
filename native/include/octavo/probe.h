// What the machine itself allows at a level: streaming reads, and the arithmetic of the widest product instructions.
#pragma once
#include "octavo/types.h"

namespace octavo {

struct ProbeTable {
  // Reads all of the memory once, each thread a part of its own. Returns a value that depends on every bit.
  uint64_t (*read)(const void* memory, int64_t num_bytes);
  // Multiplies and adds in registers, `rounds` times in every thread. Return how many operations that were in all
  // threads; a multiplication and its addition count as two.
  double (*multiply_bf16)(int64_t rounds);
  double (*multiply_int8)(int64_t rounds);
};

}  // namespace octavo
