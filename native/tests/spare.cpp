// What is done in spare time is what the system and a plain loop do.
#include "octavo/spare.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <vector>

#include "check.h"

namespace octavo {

namespace {

uint32_t bit_by_bit(const uint8_t* from, int64_t num_bytes) {
  uint32_t rest = 0xffffffffu;
  for (int64_t i = 0; i < num_bytes; ++i) {
    rest ^= from[i];
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? 0xedb88320u : 0);
  }
  return ~rest;
}

}  // namespace

void check_spare() {
  std::vector<uint8_t> bytes(200'003);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i * 2654435761u >> 13);
  must(spare_crc32("123456789", 9) == 0xcbf43926u, "the checksum's known value");
  for (int64_t count : {0, 1, 15, 16, 17, 4097, 200'000})
    for (int64_t start : {0, 1, 3})
      must(spare_crc32(bytes.data() + start, count) == bit_by_bit(bytes.data() + start, count), "a checksum");

  std::FILE* file = std::tmpfile();
  must(file != nullptr, "a file to write to");
  const int number = fileno(file);
  must(spare_write(number, bytes.data(), int64_t(bytes.size())) == int64_t(bytes.size()), "all is written");
  std::vector<uint8_t> back(bytes.size());
  must(pread(number, back.data(), back.size(), 0) == ssize_t(back.size()) && back == bytes, "as it was given");
  must(spare_write(number, bytes.data(), 0) == 0, "nothing is written");
  std::fclose(file);
  must(spare_write(-1, bytes.data(), 10) == -EBADF, "the reason is given");

  const size_t size = 1 << 20;
  auto* memory = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  must(memory != MAP_FAILED, "memory");
  memory[5000] = 7;
  const int64_t done = spare_populate(memory, int64_t(size));
  must(done == 0 || done == -EINVAL || done == -ENOTSUP, "memory is given, or cannot be asked for");
  must(memory[5000] == 7 && memory[size - 1] == 0, "memory holds what it held");
  munmap(memory, size);
}

}  // namespace octavo
