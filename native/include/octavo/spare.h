// Passes over much memory and system calls on it, for what no step waits for: made by a thread of the lowest
// scheduling class, while the caller waits. A thread of Python cannot be of that class itself: it would be held up with
// the interpreter's lock in its hands.
#pragma once
#include <cstdint>

namespace octavo {

// write(2) until all is written: the number of bytes written, or -errno where there were none.
int64_t spare_write(int file, const void* from, int64_t num_bytes);

// CRC-32 as in gzip (RFC 1952) of the bytes.
uint32_t spare_crc32(const void* from, int64_t num_bytes);

// Memory behind whole pages of a mapping, which keep what they hold (MADV_POPULATE_WRITE of madvise(2)): 0, or -errno
// where the system has no such call or no memory.
int64_t spare_populate(void* at, int64_t num_bytes);

}  // namespace octavo
