// Work shared among the compute threads: the OpenMP pool, which is PyTorch's own.
//
// Promises: `tasks` are cut into contiguous ranges, one a thread; with one task or one thread nothing is woken. What is
// computed must not depend on the cut: bits are the same for every number of threads.
#pragma once
#include <cstdint>
#include <omp.h>

namespace octavo {

// body(begin, end, thread), at most omp_get_max_threads() times. `grain`: fewest tasks worth a thread of their own.
template <class Body>
static inline void parallel(int64_t tasks, int64_t grain, const Body& body) {
  int64_t threads = omp_get_max_threads();
  if (grain > 1 && threads > tasks / grain) threads = tasks / grain;
  if (threads > tasks) threads = tasks;
  if (threads <= 1 || omp_in_parallel()) {
    if (tasks > 0) body(int64_t(0), tasks, 0);
    return;
  }
#pragma omp parallel num_threads(int(threads))
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t begin = tasks * me / all, end = tasks * (me + 1) / all;
    if (begin < end) body(begin, end, int(me));
  }
}

// Waits for the other threads of a `together`.
struct Meet {
  bool alone;
  void operator()() const {
    if (alone) return;
#pragma omp barrier
  }
};

// body(thread, threads, meet) once in each of at most `most` threads, for work in phases: what is written before
// `meet()` may be read by all after it. Every thread must call `meet` equally often.
template <class Body>
static inline void together(int64_t most, const Body& body) {
  int64_t threads = omp_get_max_threads();
  if (threads > most) threads = most;
  if (threads <= 1 || omp_in_parallel()) {
    body(int64_t(0), int64_t(1), Meet{true});
    return;
  }
#pragma omp parallel num_threads(int(threads))
  body(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()), Meet{omp_get_num_threads() == 1});
}

}  // namespace octavo
