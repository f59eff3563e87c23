// The compute threads while a tape is replayed: one OpenMP region over all of its operators.
//
// Promises: an operator's work begins at once in the thread that leads, and the others join when they see it: a thread
// that sleeps or that the system has given to a neighbour is waited for only when it has begun a piece. Waiting threads
// give their core to whoever wants it. What is computed must not depend on who computes it.
// Does not know: operators (see `parallel` of octavo/parallel.h, their only way here).
//
// An OpenMP region of its own for each operator waits at its end for every thread, however late: with three regions a
// millisecond, a thread that overslept or was descheduled held the others up for a third of a decode step.
#pragma once
#include <atomic>
#include <cstdint>

namespace octavo {

class Team {
 public:
  static constexpr int MOST_THREADS = 256;
  using Piece = void (*)(const void* body, int64_t begin, int64_t end, int thread);

  // The team that this thread leads, or null.
  static Team* current();

  // work(data) in this thread, which leads up to `most` threads meanwhile. `work` must not throw. Within a parallel
  // region, under another team's lead or with one thread it just runs.
  static void lead(void (*work)(void*), void* data, int most = MOST_THREADS);

  // How many teams have come together under this thread's lead so far.
  static int64_t gathered();

  int size() const { return size_; }

  // piece(body, begin, end, thread) over all of [0, tasks), `chunk` tasks at a time, by up to `threads` of the team that
  // this thread leads, or of one that comes together for it. Each thread has a range of its own and then takes from the
  // others'. Returns when all is done.
  static void share(int64_t tasks, int64_t chunk, int threads, Piece piece, const void* body);

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  explicit Team(int size) : size_(size) {}
  void run(int64_t tasks, int64_t chunk, int threads, Piece piece, const void* body);
  void serve(int thread);  // until the team is over
  void work(int thread);   // on the job, until nothing of it is left
  void over() { state_.fetch_or(OVER); }

  // Threads beside the leader that are in the job; whether they may still enter; whether all is over; which job it is.
  static constexpr uint64_t INSIDE = 0xffff, OPEN = 1 << 16, OVER = 1 << 17, NEXT_JOB = 1 << 18;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) Piece piece_ = nullptr;
  const void* body_ = nullptr;
  int64_t chunk_ = 1;
  int threads_ = 0;
  const int size_;
  Range ranges_[MOST_THREADS];
};

}  // namespace octavo
