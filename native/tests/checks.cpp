// Runs every family's checks at every level this machine has: built with -DOCTAVO_CHECKS=ON under sanitizers.
//
// A check computes a few odd shapes against a plain loop; it ends the program with a line that says what differed.
#include <cstdio>
#include <cstdlib>

#include "octavo/levels.h"

namespace octavo {
void check_norms();
void check_qlinear();
void check_pointwise();
void check_rotary();
void check_gather();
void check_sampling();
void check_linear();
void check_attention();
void check_team();
void check_spare();
}

int main() {
  octavo::check_team();
  octavo::check_spare();
  for (int i = 0; i < octavo::num_levels(); ++i) {
    octavo::use_level(octavo::level(i).name);
    std::printf("%s\n", octavo::current_level().name);
    octavo::check_norms();
    octavo::check_qlinear();
    octavo::check_pointwise();
    octavo::check_rotary();
    octavo::check_gather();
    octavo::check_sampling();
    octavo::check_linear();
    octavo::check_attention();
  }
  return 0;
}
