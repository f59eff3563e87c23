// See octavo/gather.h.
#include "octavo/gather.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t GRAIN = 65536;  // bytes worth a thread of their own

static void gather_rows(const void* table, const int64_t* index, void* out, int64_t rows, int64_t table_rows,
                        int64_t row_bytes) {
  parallel(rows, row_bytes >= GRAIN ? 1 : (GRAIN + row_bytes - 1) / row_bytes, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      char* to = (char*)out + r * row_bytes;
      if (index[r] >= 0 && index[r] < table_rows)
        std::memcpy(to, (const char*)table + index[r] * row_bytes, size_t(row_bytes));
      else
        std::memset(to, 0, size_t(row_bytes));
    }
  });
}

extern const GatherTable gather_table;
const GatherTable gather_table = {gather_rows};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
