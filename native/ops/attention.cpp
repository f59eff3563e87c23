// See octavo/attention.h.
#include "octavo/attention.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const AttentionTable attention_table;
const AttentionTable attention_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
