// See octavo/rotary.h.
#include "octavo/rotary.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const RotaryTable rotary_table;
const RotaryTable rotary_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
