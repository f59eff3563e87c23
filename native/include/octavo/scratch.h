// Working memory of a thread, grown and kept; much of it lies in large pages. Include it in ops/*.cpp only.
//
// Each use has a `Tag` type of its own, so that two never get the same memory.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int64_t LARGE_PAGE = 2 << 20;

struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
  void* take(int64_t num_bytes) {
    if (num_bytes > size) {
      std::free(memory);
      const int64_t page = num_bytes < LARGE_PAGE ? 4096 : LARGE_PAGE;
      size = (num_bytes + num_bytes / 4 + page - 1) / page * page;
      memory = std::aligned_alloc(size_t(page), size_t(size));
      if (!memory) {  // where one step's working memory is refused nothing can go on
        std::fprintf(stderr, "octavo: the system refuses %ld bytes of working memory\n", long(size));
        std::abort();
      }
#if defined(MADV_HUGEPAGE)
      if (page == LARGE_PAGE) madvise(memory, size_t(size), MADV_HUGEPAGE);  // where they are refused small ones serve
#endif
    }
    return memory;
  }
};

// This thread's memory for `Tag`: its content is what the last use left, as long as it has not grown.
template <class Tag>
static inline void* scratch(int64_t num_bytes) {
  static thread_local Scratch kept;
  return kept.take(num_bytes);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
