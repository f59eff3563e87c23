// See octavo/sampling.h. The stations of OUT-2, a row at a time.
#include "octavo/sampling.h"

#include <cstdlib>

#include "octavo/parallel.h"
#include "sampling_select.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// A thread's scratch for one row; grown, never given back before the thread ends.
struct Room {
  float *edited = nullptr, *line = nullptr, *tops = nullptr;
  double* sums = nullptr;
  Candidates found = {nullptr, nullptr, nullptr, 0};
  uint32_t *keys = nullptr, *more_keys = nullptr;
  int32_t* more_ids = nullptr;

  ~Room() { std::free(memory_); }
  void fit(int64_t vocab) {
    if (vocab <= vocab_) return;
    constexpr int64_t ARRAYS = 9;
    const int64_t width = (vocab + 2 * BLOCK + 15) / 16 * 16;  // floats; what is stored past the end is a vector at most
    std::free(memory_);
    memory_ = std::aligned_alloc(64, size_t(width * ARRAYS * 4));
    if (!memory_) std::abort();  // a few hundred kilobytes: nothing could go on
    vocab_ = vocab;
    float* at = (float*)memory_;
    const auto next = [&] { return at += width, at - width; };
    edited = next(), line = next(), tops = next();
    found.ids = (int32_t*)next(), found.z = next(), found.weights = next();
    keys = (uint32_t*)next(), more_keys = (uint32_t*)next(), more_ids = (int32_t*)next();
    sums = (double*)(tops + width / 4);  // both have an element a block
  }

 private:
  void* memory_ = nullptr;
  int64_t vocab_ = 0;
};

static Room& room(int64_t vocab) {
  static thread_local Room mine;
  mine.fit(vocab);
  return mine;
}

// ---- randomness ------------------------------------------------------------------------------------------------

// Philox-4x32-10 (Salmon et al., 2011) as octavo/sampling/draw.py has it: 53 random bits in [0, 1).
static double uniform_of(const SampleRow& p, int64_t position) {
  uint32_t c[4] = {uint32_t(position), 0, uint32_t(p.sample_index), uint32_t(uint64_t(p.sample_index) >> 32)};
  uint32_t k0 = uint32_t(p.seed), k1 = uint32_t(p.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    std::memcpy(c, next, sizeof(c));
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (double(c[0] >> 5) * 67108864. + double(c[1] >> 6)) / 9007199254740992.;
}

// ---- station 3 and 4 -------------------------------------------------------------------------------------------

static bool is_edited(const SampleCall& call, const SampleRow& p, int64_t position) {
  return call.bitmask || p.restricted || p.num_bad_words || p.num_bias || p.counts ||
         (p.num_ends && position < p.min_tokens);
}

template <class T>
static void copy_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i, first(n - i)), first(n - i));
}

template <class T>
static void copy_allowed(const T* from, int64_t n, const int32_t* words, float* to) {
  for (int64_t i = 0; i < n; i += W) {
    const Bits m = (uint32_t(words[i / 32]) >> (i % 32)) & EVERY;
    store(to + i, where(m, load(from + i, first(n - i)), all(-INFINITY)), first(n - i));
  }
}

static void allow_only(const SampleRow& p, int64_t n, float* x, float* kept) {
  for (int64_t i = 0; i < p.num_allowed; ++i) kept[i] = x[p.allowed[i]];
  for (int64_t i = 0; i < n; i += W) store(x + i, all(-INFINITY), first(n - i));
  for (int64_t i = 0; i < p.num_allowed; ++i) x[p.allowed[i]] = kept[i];
}

// Forbids the last id of each sequence whose other ids are the last known tokens.
static void forbid_words(const SampleRow& p, const int32_t* known, int64_t length, float* x) {
  const int64_t* word = p.bad_words;
  for (int64_t w = 0; w < p.num_bad_words; ++w) {
    const int64_t head = *word++ - 1;
    bool now = head <= length;
    for (int64_t i = 0; now && i < head; ++i) now = word[i] == known[length - head + i];
    if (now) x[word[head]] = -INFINITY;
    word += head + 1;
  }
}

// Repetition as in Keskar et al., 2019 (CTRL); no finite logit becomes infinite.
static void penalize(const SampleRow& p, int64_t n, float* x) {
  constexpr float LARGEST = 1e38f;
  const float factor = p.repetition > FLT_MIN ? p.repetition : FLT_MIN;
  for (int64_t i = 0; i < p.counts->size; ++i) {
    const int32_t id = p.counts->ids[i];
    if (id < 0 || id >= n) continue;
    const float times = p.counts->times[i], fixed = p.frequency * times + (times > 0 ? p.presence : 0.f);
    float v = x[id];
    if (v > 0) {
      v /= factor;
      v = v < LARGEST ? v : LARGEST;
    } else {
      v *= factor;
    }
    x[id] = v - fixed;
  }
}

static void edit(const SampleCall& call, int64_t i, int64_t position, float* x, float* spare) {
  const SampleRow& p = call.params[i];
  const int64_t n = call.logits.limit;
  const bool bf16s = call.logits.type == Type::bf16;
  const char* from = (const char*)call.logits.data + i * call.logits.stride * (bf16s ? 2 : 4);
  if (call.bitmask) {
    const int32_t* words = call.bitmask + i * call.bitmask_stride;
    bf16s ? copy_allowed((const bf16*)from, n, words, x) : copy_allowed((const float*)from, n, words, x);
  } else {
    bf16s ? copy_row((const bf16*)from, n, x) : copy_row((const float*)from, n, x);
  }
  if (p.restricted) allow_only(p, n, x, spare);
  if (p.num_bad_words) forbid_words(p, call.token_ids + call.slots[i] * call.token_stride, call.lengths[i], x);
  if (position < p.min_tokens)
    for (int64_t j = 0; j < p.num_ends; ++j) x[p.ends[j]] = -INFINITY;
  for (int64_t j = 0; j < p.num_bias; ++j) x[p.bias_ids[j]] += p.bias_values[j];
  if (p.counts) penalize(p, n, x);
}

// ---- stations 6 to 9 -------------------------------------------------------------------------------------------

// The least scaled logit among the k largest is not below this: k blocks have an element of at least that.
static float bound_of_top(const Scaled& row, int64_t k, float least) {
  const int64_t blocks = num_blocks(row.n);
  if (k > blocks) return least;
  float top = -INFINITY;
  for (int64_t b = 0; b < blocks; ++b) top = row.tops[b] > top ? row.tops[b] : top;
  const float bound = row.of(find_border<false>(row.tops, nullptr, blocks, -INFINITY, top, double(k)).at);
  return bound > least ? bound : least;
}

// What top-k and top-p leave, in rising order of ids.
static void truncate(const Scaled& row, const SampleRow& p, float least, Room& room) {
  Candidates& c = room.found;
  double bound;
  if (p.top_k > 0 && p.top_k < row.n) {
    const float from = bound_of_top(row, p.top_k, least);
    gather(row, from, c);
    if (c.count > p.top_k) drop(c, find_border<false>(c.z, nullptr, c.count, from, 0.f, double(p.top_k)), false);
    least = from;
    bound = p.top_p * weigh(c);
  } else {
    bound = p.top_p * weigh_row(row, least, room.sums);
    const float levels[3] = {-4.f, -10.f, least};  // few tokens hold the mass of most rows
    for (const float level : levels) {
      if (level < least) continue;
      gather(row, level, c);
      if (weigh(c) < bound && level > least) continue;
      least = level;
      break;
    }
  }
  if (p.top_p < 1.) drop(c, find_border<true>(c.z, c.weights, c.count, least, 0.f, bound), true);
}

// `line`: where processed scores are wanted, what is left of the scaled logits (the largest is 0, unless logits are asked for).
static int64_t draw(const Scaled& row, const SampleRow& p, double uniform, Scores scores, float* line, Room& room) {
  const bool truncated = (p.top_k > 0 && p.top_k < row.n) || p.top_p < 1.;
  const float negligible = line ? -FLT_MAX : LEAST, least = p.floor > negligible ? p.floor : negligible;
  int64_t token;
  if (truncated) {
    truncate(row, p, least, room);
    token = room.found.ids[invert(room.found, uniform, room.sums)];
  } else {
    token = invert(row, least, weigh_row(row, least, room.sums), room.sums, uniform);
  }
  if (!line) return token;
  const auto value = [&](int64_t i) {
    return row.of(row.x[i]) + (scores == Scores::processed_logits ? row.peak / row.temperature : 0.f);
  };
  for (int64_t i = 0; i < row.n; ++i) line[i] = !truncated && row.of(row.x[i]) >= least ? value(i) : -INFINITY;
  for (int64_t i = 0; truncated && i < room.found.count; ++i) line[room.found.ids[i]] = value(room.found.ids[i]);
  return token;
}

// ---- log-probabilities -----------------------------------------------------------------------------------------

// Falling by value, equals by rising id: a stable radix sort, 11 bits a pass.
static void sort_all(Candidates& c, Room& room) {
  constexpr int DIGIT = 11, PASSES = 3, SIZE = 1 << DIGIT;
  uint32_t starts[PASSES][SIZE] = {};
  for (int64_t i = 0; i < c.count; ++i) {
    const float canonical = c.z[i] + 0.f;  // both zeros are equal
    uint32_t b;
    std::memcpy(&b, &canonical, 4);
    b = b >> 31 ? b : ~b & 0x7fffffffu;  // falling
    room.keys[i] = b;
    for (int pass = 0; pass < PASSES; ++pass) ++starts[pass][(b >> (DIGIT * pass)) & (SIZE - 1)];
  }
  uint32_t *from = room.keys, *to = room.more_keys;
  int32_t *from_ids = c.ids, *to_ids = room.more_ids;
  for (int pass = 0; pass < PASSES; ++pass) {
    uint32_t before = 0;
    for (uint32_t& start : starts[pass]) {
      const uint32_t count = start;
      start = before, before += count;
    }
    for (int64_t i = 0; i < c.count; ++i) {
      const uint32_t place = starts[pass][(from[i] >> (DIGIT * pass)) & (SIZE - 1)]++;
      to[place] = from[i], to_ids[place] = from_ids[i];
    }
    uint32_t* keys = from;
    from = to, to = keys;
    int32_t* ids = from_ids;
    from_ids = to_ids, to_ids = ids;
  }
  std::memcpy(c.ids, from_ids, size_t(c.count) * 4);  // three passes end in the other buffer
}

// The ids of the k largest, by (value falling, id rising), in room.found.
static void top_ids(const Scaled& row, float top, int64_t k, Room& room) {
  Candidates& c = room.found;
  const float from = bound_of_top(row, k, -INFINITY);
  gather(row, from, c);
  if (c.count > k) drop(c, find_border<false>(c.z, nullptr, c.count, from, top, double(k)), false);
  if (c.count > 64) return sort_all(c, room);
  for (int64_t i = 1; i < c.count; ++i) {
    const float v = c.z[i];
    const int32_t id = c.ids[i];
    int64_t j = i;
    for (; j > 0 && c.z[j - 1] < v; --j) c.z[j] = c.z[j - 1], c.ids[j] = c.ids[j - 1];
    c.z[j] = v, c.ids[j] = id;
  }
}

static int32_t rank_in(const Scaled& row, float mine) {
  int64_t larger = 0;
  for (int64_t b = 0; b < num_blocks(row.n); ++b) {
    if (!(row.tops[b] > mine)) continue;
    const int64_t end = least_of(row.n, (b + 1) * BLOCK);
    for (int64_t i = b * BLOCK; i < end; i += W)
      larger += ones(above(load_or_least(row.x + i, end - i), all(mine)) & first_bits(end - i));
  }
  return int32_t(larger + 1);
}

// One line: `x` [vocab], of which ids below `limit` are listed. Nothing of use for a row that is not finite.
static void score_line(const float* x, int64_t vocab, int64_t limit, int64_t chosen, int64_t columns, int64_t index,
                       const ScoreLines& lines, Room& room) {
  int32_t* ids = lines.ids + index * lines.columns;
  float* values = lines.values + index * lines.columns;
  Peak peak = find_peak(x, vocab, room.tops);
  ids[0] = int32_t(chosen), lines.ranks[index] = 1;
  if (!peak.number || !std::isfinite(peak.value)) {
    for (int64_t i = 0; i < columns; ++i) ids[i] = int32_t(i ? 0 : chosen), values[i] = NAN;
    return;
  }
  const bool as_logits = lines.scores == Scores::raw_logits || lines.scores == Scores::processed_logits;
  const float origin = peak.value;
  double norm = 0;
  if (!as_logits) norm = std::log(weigh_row(Scaled{x, vocab, origin, 1.f, room.tops}, LEAST, room.sums));
  if (limit < vocab) peak = find_peak(x, limit, room.tops);
  const Scaled listed = {x, limit, 0.f, 1.f, room.tops};
  lines.ranks[index] = rank_in(listed, x[chosen]);
  if (columns > 1) {
    top_ids(listed, peak.value, columns - 1, room);
    std::memcpy(ids + 1, room.found.ids, size_t(columns - 1) * 4);
  }
  for (int64_t i = 0; i < columns; ++i)
    values[i] = as_logits ? x[ids[i]] : float(double(x[ids[i]] - origin) - norm);
}

static const float* raw_row(const Logits& logits, int64_t i, float* room) {
  if (logits.type != Type::bf16) return (const float*)logits.data + i * logits.stride;
  copy_row((const bf16*)logits.data + i * logits.stride, logits.vocab, room);
  return room;
}

static int64_t grain_of(const Logits& logits) { return logits.vocab >= 16384 ? 1 : 1 + 16384 / (logits.vocab + 1); }

static void score(const Logits& logits, const int64_t* chosen, const ScoreLines& lines) {
  parallel(logits.rows, grain_of(logits), [&](int64_t begin, int64_t end, int) {
    Room& mine = room(logits.vocab);
    for (int64_t i = begin; i < end; ++i)
      score_line(raw_row(logits, i, mine.line), logits.vocab, logits.limit, chosen[i], lines.columns, i, lines, mine);
  });
}

// ---- rows ------------------------------------------------------------------------------------------------------

static Failure failure_of(const Peak& peak) {
  if (!peak.number || peak.value == INFINITY) return Failure::not_finite;
  return peak.value == -INFINITY ? Failure::nothing_left : Failure::none;
}

static Failure sample_row(const SampleCall& call, int64_t i, Room& room) {
  const SampleRow& p = call.params[i];
  const Logits& logits = call.logits;
  const int64_t n = logits.limit, position = call.lengths[i] - p.num_prompt;
  const bool edited = is_edited(call, p, position), scored = call.lines.columns && p.logprobs;
  const bool processed = scored && (call.lines.scores == Scores::processed_logprobs ||
                                    call.lines.scores == Scores::processed_logits);
  if (logits.type == Type::bf16 && p.greedy && !edited && !scored) {
    const Peak peak = find_peak((const bf16*)logits.data + i * logits.stride, n, room.tops);
    call.tokens[i] = int32_t(peak.at);
    return failure_of(peak);
  }
  const float* x = room.edited;
  if (edited)
    edit(call, i, position, room.edited, room.line);
  else
    x = raw_row(logits, i, room.edited);
  const Peak peak = find_peak(x, n, room.tops);
  const Failure failure = failure_of(peak);
  int64_t token = peak.at;
  const float* line = x;
  if (failure == Failure::none && !p.greedy) {
    const Scaled row = {x, n, peak.value, p.temperature, room.tops};
    token = draw(row, p, uniform_of(p, position), call.lines.scores, processed ? room.line : nullptr, room);
    if (processed) line = room.line;
  }
  call.tokens[i] = int32_t(token);
  if (!scored) return failure;
  if (processed)
    score_line(line, n, n, token, p.logprobs, i, call.lines, room);
  else
    score_line(edited ? raw_row(logits, i, room.line) : x, logits.vocab, n, token, p.logprobs, i, call.lines, room);
  return failure;
}

static int64_t sample(const SampleCall& call) {
  parallel(call.logits.rows, grain_of(call.logits), [&](int64_t begin, int64_t end, int) {
    Room& mine = room(call.logits.vocab);
    for (int64_t i = begin; i < end; ++i) call.failures[i] = sample_row(call, i, mine);
  });
  int64_t failed = 0;
  for (int64_t i = 0; i < call.logits.rows; ++i) failed += call.failures[i] != Failure::none;
  return failed;
}

extern const SamplingTable sampling_table;
const SamplingTable sampling_table = {sample, score};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
