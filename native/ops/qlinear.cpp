// See octavo/qlinear.h.
#include "octavo/qlinear.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const QLinearTable qlinear_table;
const QLinearTable qlinear_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
