// See octavo/spare.h.
#include "octavo/spare.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <thread>

// Linux 5.14 has it; the headers that a wheel is built with may be older.
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

namespace octavo {

namespace {

// Of one call: a thread of any class keeps its core until its call ends, or the clock next ticks.
constexpr int64_t PIECE = 64 << 10;

// Sixteen bytes at a time, one table for each place ("slicing", Kounavis and Berry 2005).
struct CrcTables {
  uint32_t of[16][256];

  CrcTables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? 0xedb88320u : 0);
      of[0][byte] = rest;
    }
    for (int place = 1; place < 16; ++place)
      for (int byte = 0; byte < 256; ++byte)
        of[place][byte] = (of[place - 1][byte] >> 8) ^ of[0][of[place - 1][byte] & 0xff];
  }

  uint32_t crc(const uint8_t* from, int64_t num_bytes) const {
    uint32_t rest = 0xffffffffu;
    for (; num_bytes >= 16; num_bytes -= 16, from += 16) {
      uint8_t bytes[16];
      std::memcpy(bytes, from, 16);
      for (int i = 0; i < 4; ++i) bytes[i] ^= uint8_t(rest >> (8 * i));
      rest = 0;
      for (int i = 0; i < 16; ++i) rest ^= of[15 - i][bytes[i]];
    }
    for (; num_bytes > 0; --num_bytes, ++from) rest = (rest >> 8) ^ of[0][(rest ^ *from) & 0xff];
    return ~rest;
  }
};

// Where the system has no such class, or no more threads, the work is done all the same.
template <class Work>
int64_t in_spare_time(Work work) {
  int64_t result = 0;
  try {
    std::thread thread([&] {
#if defined(SCHED_IDLE)
      sched_param none{};
      pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
#endif
      result = work();
    });
    thread.join();
  } catch (const std::exception&) {
    result = work();
  }
  return result;
}

}  // namespace

uint32_t spare_crc32(const void* from, int64_t num_bytes) {
  static const CrcTables tables;
  return uint32_t(in_spare_time([=]() -> int64_t { return tables.crc(static_cast<const uint8_t*>(from), num_bytes); }));
}

int64_t spare_write(int file, const void* from, int64_t num_bytes) {
  return in_spare_time([=]() -> int64_t {
    int64_t done = 0;
    while (done < num_bytes) {
      const int64_t piece = std::min(PIECE, num_bytes - done);
      const ssize_t count = write(file, static_cast<const char*>(from) + done, size_t(piece));
      if (count > 0)
        done += count;
      else if (count == 0 || errno != EINTR)
        return done ? done : (count ? -int64_t(errno) : 0);
    }
    return done;
  });
}

int64_t spare_populate(void* at, int64_t num_bytes) {
#if defined(MADV_POPULATE_WRITE)
  return in_spare_time([=]() -> int64_t {
    for (int64_t done = 0; done < num_bytes; done += PIECE)
      if (madvise(static_cast<char*>(at) + done, size_t(std::min(PIECE, num_bytes - done)), MADV_POPULATE_WRITE))
        return -int64_t(errno);
    return 0;
  });
#else
  (void)at, (void)num_bytes;
  return -int64_t(ENOTSUP);
#endif
}

}  // namespace octavo
