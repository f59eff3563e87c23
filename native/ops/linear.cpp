// See octavo/linear.h.
#include "octavo/linear.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const LinearTable linear_table;
const LinearTable linear_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
