// Which levels this machine can run. See octavo/levels.h.
#include "octavo/levels.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

OCTAVO_DECLARE_TABLES(scalar)
#if OCTAVO_HAS_AVX2
OCTAVO_DECLARE_TABLES(avx2)
OCTAVO_DECLARE_TABLES(avx512)
OCTAVO_DECLARE_TABLES(avx512_bf16)
OCTAVO_DECLARE_TABLES(amx)
#endif

namespace {

constexpr int MOST = 5;
struct Found {
  Level levels[MOST];
  int count = 0;
  const Level* used = nullptr;
  void add(const Level& found) { levels[count++] = found; }
};

#if OCTAVO_HAS_AVX2
// What the processor has and the system saves on a task switch: cpuid leaves 7.0 and 7.1, register XCR0.
struct Cpu {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
  Cpu() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool saves = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
    if (!saves) return;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = (low & 0x6) == 0x6 && fma && f16c && (b & (1u << 5));
    const unsigned need_b = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
    avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & need_b) == need_b && (c & (1u << 11));  // and VNNI
    const unsigned need_d = (1u << 22) | (1u << 24) | (1u << 25);  // AMX: bf16, tile, int8
    const bool tiles = (low & 0x60000) == 0x60000 && (d & need_d) == need_d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    avx512_bf16 = avx512 && (a & (1u << 5));
    amx = avx512_bf16 && tiles && request_tiles();
  }
};
#endif

Found& found() {  // the one global of the native core
  static Found all = [] {
    Found f;
    f.add({"scalar", OCTAVO_TABLES(scalar)});
#if OCTAVO_HAS_AVX2
    const Cpu cpu;
    if (cpu.avx2) f.add({"avx2", OCTAVO_TABLES(avx2)});
    if (cpu.avx512) f.add({"avx512", OCTAVO_TABLES(avx512)});
    if (cpu.avx512_bf16) f.add({"avx512_bf16", OCTAVO_TABLES(avx512_bf16)});
    if (cpu.amx) f.add({"amx", OCTAVO_TABLES(amx)});
#endif
    return f;
  }();
  if (!all.used) all.used = &all.levels[all.count - 1];
  return all;
}

}  // namespace

bool request_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
  return false;
#endif
}

int num_levels() { return found().count; }
const Level& level(int index) { return found().levels[index]; }
const Level& current_level() { return *found().used; }
bool use_level(const char* name) {
  Found& f = found();
  for (int i = 0; i < f.count; ++i)
    if (!std::strcmp(f.levels[i].name, name)) {
      f.used = &f.levels[i];
      return true;
    }
  return false;
}

}  // namespace octavo
