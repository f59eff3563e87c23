// See octavo/team.h.
#include "octavo/team.h"

#include <omp.h>
#include <sched.h>

namespace octavo {

namespace {

thread_local Team* led = nullptr;
thread_local int64_t teams = 0;

// Spins, and offers the core to others now and then.
struct Wait {
  int turns = 0;
  void operator()() {
    constexpr int PAUSES = 32;
    if (++turns % PAUSES == 0) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

}  // namespace

Team* Team::current() { return led; }
int64_t Team::gathered() { return teams; }

void Team::lead(void (*work)(void*), void* data, int most) {
  int threads = omp_get_max_threads();
  if (most > MOST_THREADS) most = MOST_THREADS;
  if (threads > most) threads = most;
  if (threads <= 1 || led || omp_in_parallel()) return work(data);
  Team team(threads);
  ++teams;
#pragma omp parallel num_threads(threads)
  {
    if (omp_get_thread_num() == 0) {
      led = &team;
      work(data);
      led = nullptr;
      team.over();
    } else {
      team.serve(omp_get_thread_num());
    }
  }
}

void Team::share(int64_t tasks, int64_t chunk, int threads, Piece piece, const void* body) {
  if (led) return led->run(tasks, chunk, threads, piece, body);
  auto job = [&] {
    if (led)
      led->run(tasks, chunk, threads, piece, body);
    else  // no thread but this one
      piece(body, 0, tasks, 0);
  };
  using Job = decltype(job);
  lead([](void* data) { (*static_cast<Job*>(data))(); }, &job, threads);
}

void Team::run(int64_t tasks, int64_t chunk, int threads, Piece piece, const void* body) {
  if (threads > size_) threads = size_;
  piece_ = piece;
  body_ = body;
  chunk_ = chunk;
  threads_ = threads;
  for (int t = 0; t < threads; ++t) {
    ranges_[t].next.store(tasks * t / threads, std::memory_order_relaxed);
    ranges_[t].end = tasks * (t + 1) / threads;
  }
  state_.fetch_add(NEXT_JOB + OPEN);
  work(0);
  state_.fetch_and(~OPEN);
  for (Wait wait; state_.load() & INSIDE;) wait();
}

void Team::work(int thread) {
  for (int t = 0; t < threads_; ++t) {
    Range& range = ranges_[(thread + t) % threads_];
    for (;;) {
      const int64_t begin = range.next.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= range.end) break;
      piece_(body_, begin, begin + chunk_ < range.end ? begin + chunk_ : range.end, thread);
    }
  }
}

void Team::serve(int thread) {
  uint64_t done = 0;  // the last job that this thread was in
  for (Wait wait;; wait()) {
    const uint64_t seen = state_.load(std::memory_order_relaxed);
    if (seen & OVER) return;
    if (!(seen & OPEN) || seen / NEXT_JOB == done) continue;
    // Entering and finding the job open is one step: the leader, who closes it first, waits for all who did.
    const uint64_t entered = state_.fetch_add(1);
    if (entered & OPEN) {
      done = entered / NEXT_JOB;
      if (thread < threads_) work(thread);
    }
    state_.fetch_sub(1);
    wait.turns = 0;
  }
}

}  // namespace octavo
