// See octavo/attention.h. Kernels compute partitions; here is what hands them out and puts their states together.
#include "octavo/attention.h"

#include <cstdlib>

#include "attention_float.h"
#include "attention_pairs.h"
#include "attention_write.h"
#include "octavo/parallel.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Memory of one thread, kept from call to call.
struct Scratch {
  float* floats = nullptr;
  int64_t size = 0;
  float* take(int64_t count) {
    if (count > size) {
      std::free(floats);
      size = round_up(count, 1024);
      floats = (float*)std::aligned_alloc(64, size_t(size) * sizeof(float));
    }
    return floats;
  }
  ~Scratch() { std::free(floats); }
};

struct Shared {
  float* states;
  int32_t* waits;
  int64_t next;
};

static float* state_base(const AttentionJob& job, Shared& shared, const AttentionRow& row, int64_t head, int64_t slot) {
  const int64_t lines = row.tokens * (job.heads / job.kv_heads);
  return shared.states + row.states + (slot * job.kv_heads + head) * attention_state_floats(lines, job.head_dim);
}

// A unit's lines: arrays of `most` 32-bit values each in `room`.
static Unit unit_of(const AttentionJob& job, const AttentionUnit& u, int32_t* room, int64_t most_lines) {
  Unit unit;
  unit.group = job.heads / job.kv_heads;
  unit.lines = u.line_end - u.line_begin;
  unit.head_begin = u.head_begin;
  unit.head_end = u.head_end;
  int32_t *tokens = room, *begins = room + most_lines, *ends = begins + most_lines;
  uint8_t* places = (uint8_t*)(ends + most_lines);
  unit.tokens = tokens;
  unit.begins = begins;
  unit.ends = ends;
  unit.places = places;
  const AttentionRow& head_row = job.rows[job.members[u.first_member]];
  unit.blocks = head_row.blocks;
  for (int64_t i = 0; i < unit.lines; ++i) {
    const int64_t line = u.line_begin + i;
    const AttentionRow& row = u.members > 1 ? job.rows[job.members[u.first_member + line / unit.group]] : head_row;
    const int64_t token = u.members > 1 ? 0 : line / unit.group;
    tokens[i] = int32_t(row.first_token + token);
    ends[i] = int32_t(row.context + token + 1);
    begins[i] = job.window ? int32_t(most(0, ends[i] - job.window)) : 0;
    places[i] = uint8_t(line % unit.group);
  }
  return unit;
}

static void give_line(const AttentionJob& job, State s, int64_t token, int64_t query_head, bool paired) {
  const F factor = all(share(*s.highest, *s.weights, job.sinks ? job.sinks + query_head : nullptr));
  const int64_t at = token * job.out_stride + query_head * job.head_dim;
  if (job.type == Type::bf16) give(s.sums, (bf16*)job.out + at, job.head_dim, factor, paired);
  else give(s.sums, (float*)job.out + at, job.head_dim, factor, paired);
}

// Merge all slots of a row and KV head in rising order, and give the answer.
static void finish(const AttentionJob& job, Shared& shared, const AttentionRow& row, int64_t head, bool paired) {
  const int64_t group = job.heads / job.kv_heads, lines = row.tokens * group, wide = round_up(job.head_dim, 32);
  const State whole = State::at(state_base(job, shared, row, head, 0), lines, wide);
  for (int64_t slot = 1; slot < row.slots; ++slot)
    merge(whole, State::at(state_base(job, shared, row, head, slot), lines, wide), lines, wide, wide);
  for (int64_t i = 0; i < lines; ++i)
    give_line(job, whole.from(i, wide), row.first_token + i / group, head * group + i % group, paired);
}

static void arrived(const AttentionJob& job, Shared& shared, int64_t row, int64_t head, bool paired) {
  if (__atomic_sub_fetch(&shared.waits[row * job.kv_heads + head], 1, __ATOMIC_ACQ_REL) == 0)
    finish(job, shared, job.rows[row], head, paired);
}

template <class Kernel>
static void run_unit(const AttentionJob& job, const AttentionUnit& u, Shared& shared, float* scratch, int64_t most_lines) {
  const int64_t wide = round_up(job.head_dim, 32), heads = u.head_end - u.head_begin;
  const Unit unit = unit_of(job, u, (int32_t*)scratch, most_lines);
  scratch += round_up(4 * most_lines, 64);
  const int64_t room = attention_state_floats(unit.lines, job.head_dim);
  float* running = scratch;
  scratch += round_up(heads * room, 64);
  Kernel kernel(job, unit, scratch);

  const int64_t row_index = job.members[u.first_member];
  const AttentionRow& row = job.rows[row_index];
  const bool direct = u.members == 1 && row.slots == 0;
  const bool in_slots = u.members == 1 && !direct;
  for (int64_t p = u.part_begin; p < u.part_end; ++p) {
    const int64_t slot = p < row.folded_end ? 0 : p - row.folded_end + 1;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row_lines = row.tokens * unit.group;
      const State into =
          in_slots ? State::at(state_base(job, shared, row, u.head_begin + h, slot), row_lines, wide).from(u.line_begin, wide)
                   : State::at(running + h * room, unit.lines, wide);
      if (p == u.part_begin || (in_slots && slot > 0)) clear(into, unit.lines, wide);
      const bool more = h + 1 < heads || p + 1 < u.part_end;  // what is read next, for whom it helps to know
      const int64_t next_head = h + 1 < heads ? h + 1 : 0, next = h + 1 < heads ? p : p + 1;
      kernel.run(u.head_begin + h, p, into, u.head_begin + next_head, more ? next : -1);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = u.head_begin + h;
    if (in_slots) {
      arrived(job, shared, row_index, head, Kernel::paired);
      continue;
    }
    const State mine = State::at(running + h * room, unit.lines, wide);
    if (direct) {
      for (int64_t i = 0; i < unit.lines; ++i)
        give_line(job, mine.from(i, wide), unit.tokens[i], unit.query_head(job, head, i), Kernel::paired);
      continue;
    }
    for (int64_t m = 0; m < u.members; ++m) {  // what members share, to the first slot of each
      const int64_t member = job.members[u.first_member + m];
      const State to = State::at(state_base(job, shared, job.rows[member], head, 0), unit.group, wide);
      const State from = mine.from(m * unit.group, wide);
      clear(to, unit.group, wide);
      merge(to, from, unit.group, wide, wide);
      arrived(job, shared, member, head, Kernel::paired);
    }
  }
}

// A thread that keeps tiles in use is slower to switch away from.
OCTAVO_INLINE void leave_tiles() {
#if defined(OCTAVO_LEVEL_AMX)
  release_tiles();
#endif
}

template <class Kernel>
static void run_all(const AttentionJob& job, Shared& shared) {
  const int64_t wide = round_up(job.head_dim, 32);
  const int64_t most_lines = job.most_lines;
  const int64_t floats = round_up(4 * most_lines, 64) + most_lines * (wide + 2) + 32 * job.kv_heads + 64 +
                         most(Kernel::scratch_floats(job), Kernel::ForFew::scratch_floats(job));
  // Who comes takes units until none is left.
  const int64_t threads = job.num_units < most_threads() ? job.num_units : most_threads();
  parallel(threads, 1, [&](int64_t, int64_t, int) {
    static thread_local Scratch mine;
    float* scratch = mine.take(floats);
    for (;;) {
      const int64_t at = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
      if (at >= job.num_units) break;
      const AttentionUnit& u = job.units[at];
      if (u.line_end - u.line_begin <= Kernel::FEW) run_unit<typename Kernel::ForFew>(job, u, shared, scratch, most_lines);
      else run_unit<Kernel>(job, u, shared, scratch, most_lines);
    }
    leave_tiles();
  });
}

static void run(const AttentionJob& job) {
  static thread_local Scratch mine;
  const int64_t waits = job.num_waits;
  float* room = mine.take(job.state_floats + waits + 64);
  Shared shared{room, (int32_t*)(room + round_up(job.state_floats, 16)), 0};
  std::memcpy(shared.waits, job.waits, size_t(waits) * sizeof(int32_t));
  const int64_t size = job.type == Type::bf16 ? 2 : 4, row = job.heads * job.head_dim * size;
  for (int64_t token = job.used_tokens; token < job.tokens; ++token)
    std::memset((char*)job.out + token * job.out_stride * size, 0, size_t(row));
#if defined(__AVX512BF16__)
  if (job.type == Type::bf16) {
    if (job.kv_type == Type::bf16) run_all<PairKernel<Type::bf16>>(job, shared);
    else if (job.kv_type == Type::s8) run_all<PairKernel<Type::s8>>(job, shared);
    else run_all<PairKernel<Type::fp8_e4m3>>(job, shared);
    return;
  }
#endif
  if (job.kv_type == Type::bf16) run_all<FloatKernel<bf16>>(job, shared);
  else run_all<FloatKernel<float>>(job, shared);
}

extern const AttentionTable attention_table;
const AttentionTable attention_table = {run, write};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
