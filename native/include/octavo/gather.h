// Rows of a table by index: token embeddings, rotary cos and sin.
#pragma once
#include <cstdint>

namespace octavo {

struct GatherTable {
  // out[r] = table[index[r]], `row_bytes` each, both contiguous; an index outside 0 .. table_rows gives zeros.
  void (*gather_rows)(const void* table, const int64_t* index, void* out, int64_t rows, int64_t table_rows,
                      int64_t row_bytes);
};

}  // namespace octavo
