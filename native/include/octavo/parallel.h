// Work shared among the compute threads: the OpenMP pool, which is PyTorch's own.
//
// Promises: `tasks` are cut into contiguous ranges; with one task or one thread nothing is woken. What is computed must
// not depend on the cut: bits are the same for every number of threads. While a tape is replayed its `Team` does the
// work; else one comes together for the call.
#pragma once
#include <cstdint>
#include <omp.h>

#include "octavo/team.h"

namespace octavo {

constexpr int64_t PIECES_A_THREAD = 8;  // what one thread lags behind, another takes over

// How many threads may work now.
static inline int64_t most_threads() {
  if (const Team* team = Team::current()) return team->size();
  return omp_in_parallel() ? 1 : omp_get_max_threads();
}

// body(begin, end, thread) over [0, tasks), any number of times in each of at most `most_threads()` threads.
// `grain`: fewest tasks worth a thread of their own.
template <class Body>
static inline void parallel(int64_t tasks, int64_t grain, const Body& body) {
  int64_t threads = most_threads();
  if (grain > 1 && threads > tasks / grain) threads = tasks / grain;
  if (threads > tasks) threads = tasks;
  if (threads <= 1) {
    if (tasks > 0) body(int64_t(0), tasks, 0);
    return;
  }
  const int64_t pieces = threads * PIECES_A_THREAD, least = grain / 4 + 1, even = (tasks + pieces - 1) / pieces;
  Team::share(tasks, even < least ? least : even, int(threads),
              [](const void* body, int64_t begin, int64_t end, int thread) {
                (*static_cast<const Body*>(body))(begin, end, thread);
              },
              &body);
}

}  // namespace octavo
