// See octavo/gather.h.
#include "octavo/gather.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const GatherTable gather_table;
const GatherTable gather_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
