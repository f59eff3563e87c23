// Working memory of a thread, grown and kept. Include it in ops/*.cpp only.
//
// Each use has a `Tag` type of its own, so that two never get the same memory.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace octavo {
namespace OCTAVO_LEVEL {

struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
  void* take(int64_t num_bytes) {
    if (num_bytes > size) {
      std::free(memory);
      size = (num_bytes + num_bytes / 4 + 4095) / 4096 * 4096;
      memory = std::aligned_alloc(4096, size_t(size));
      if (!memory) {  // where one step's working memory is refused nothing can go on
        std::fprintf(stderr, "octavo: the system refuses %ld bytes of working memory\n", long(size));
        std::abort();
      }
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
