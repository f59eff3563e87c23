// See octavo/pointwise.h.
#include "octavo/pointwise.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const PointwiseTable pointwise_table;
const PointwiseTable pointwise_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
