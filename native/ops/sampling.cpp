// See octavo/sampling.h.
#include "octavo/sampling.h"

#include "octavo/parallel.h"
#include "octavo/vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

extern const SamplingTable sampling_table;
const SamplingTable sampling_table = {0};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
