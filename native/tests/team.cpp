// Every task of every job is done once, whoever comes, with more threads than there are cores too.
#include "octavo/team.h"

#include <omp.h>

#include <vector>

#include "check.h"
#include "octavo/parallel.h"

namespace octavo {

namespace {

struct Jobs {
  int64_t done = 0;
  void run() {
    std::vector<int> times;
    const int64_t most = most_threads();
    for (int64_t job = 0; job < 2000; ++job) {
      const int64_t tasks = job * 7919 % 97, grain = job % 5;
      times.assign(size_t(tasks), 0);
      parallel(tasks, grain, [&](int64_t begin, int64_t end, int thread) {
        must(begin < end && end <= tasks && thread < most, "a piece lies within its job");
        for (int64_t i = begin; i < end; ++i) __atomic_fetch_add(&times[size_t(i)], 1, __ATOMIC_RELAXED);
      });
      for (int64_t i = 0; i < tasks; ++i) must(times[size_t(i)] == 1, "each task is done once");
      done += tasks;
    }
  }
};

}  // namespace

void check_team() {
  const int before = omp_get_max_threads();
  for (int threads : {1, 2, 3, 8}) {
    omp_set_num_threads(threads);
    Jobs alone, led, nested;
    alone.run();
    Team::lead([](void* jobs) { static_cast<Jobs*>(jobs)->run(); }, &led);
    must(Team::current() == nullptr, "a team ends with its work");
    Team::lead(
        [](void* jobs) {
          const Team* mine = Team::current();
          Team::lead([](void* inner) { static_cast<Jobs*>(inner)->run(); }, jobs);
          must(Team::current() == mine, "a team within a team is the same one");
        },
        &nested);
    must(led.done == alone.done && nested.done == alone.done, "teams do all that one thread does");
  }
  omp_set_num_threads(before);
}

}  // namespace octavo
