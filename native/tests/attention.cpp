// Attention against a plain loop; alone and in a batch, with and without shared prefixes, to the bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "octavo/attention_plan.h"
#include "octavo/levels.h"
#include "octavo/rotary.h"

namespace octavo {

namespace {

struct Case {
  int64_t heads, kv_heads, dim, block_size, window;
  Type type;
  float softcap = 0;
  bool terms = false;  // slopes and sinks
  Type kv_type = Type::f32;  // s8 or fp8_e4m3; others: `type`
  bool scaled() const { return kv_type == Type::s8 || kv_type == Type::fp8_e4m3; }
  Type stored() const { return scaled() ? kv_type : type; }
};

float noise(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return float(int32_t(state >> 8) - (1 << 23)) / float(1 << 22);
}

struct Pages {
  std::vector<uint8_t> keys, values;
  std::vector<float> key_scales, value_scales;
  std::vector<int32_t> table;
  int64_t width = 0;
};

int64_t bytes_of(Type t) { return t == Type::f32 ? 4 : t == Type::bf16 ? 2 : 1; }

void put(std::vector<uint8_t>& to, int64_t at, float x, Type t) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (t == Type::f32) std::memcpy(&to[size_t(at * 4)], &bits, 4);
  else {
    const auto half = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    std::memcpy(&to[size_t(at * 2)], &half, 2);
  }
}

double get(const std::vector<uint8_t>& from, int64_t at, Type t) {
  uint32_t bits = 0;
  if (t == Type::f32) std::memcpy(&bits, &from[size_t(at * 4)], 4);
  else std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, &from[size_t(at * 2)], 2);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A number of a cache, whose scales have one for each `dim` of them.
double get_scaled(const std::vector<uint8_t>& from, const std::vector<float>& scales, int64_t at, int64_t dim, Type t) {
  const uint8_t x = from[size_t(at)];
  double code = int8_t(x);
  if (t == Type::fp8_e4m3) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    code = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    if (x & 0x80) code = -code;
  }
  return code * double(scales[size_t(at / dim)]);
}

struct Row {
  int32_t context, tokens;
};

// Some rows of a batch, whose tokens stand in `query` from `first` on.
std::vector<uint8_t> attend(const Case& c, const Pages& cache, const std::vector<Row>& rows, const int32_t* table,
                            const uint8_t* query, const std::vector<float>& terms, bool share, int64_t* shared = nullptr) {
  AttentionPlan plan;
  plan.share_prefixes(share);
  std::vector<int32_t> starts{0}, contexts;
  for (const Row& r : rows) {
    starts.push_back(starts.back() + r.tokens);
    contexts.push_back(r.context);
  }
  plan.fill(int64_t(rows.size()), starts.data(), contexts.data(), table, cache.width, cache.width, c.block_size);
  const AttentionCut& cut = plan.cut({c.heads, c.kv_heads, c.dim, c.window, 2, !c.terms});
  std::vector<uint8_t> out(size_t(starts.back() * c.heads * c.dim * bytes_of(c.type)));
  AttentionJob job{};
  job.query = query;
  job.out = out.data();
  job.keys = cache.keys.data();
  job.values = cache.values.data();
  job.key_scales = cache.key_scales.data();
  job.value_scales = cache.value_scales.data();
  job.scale_stride = c.kv_heads * c.block_size;
  job.query_stride = job.out_stride = c.heads * c.dim;
  job.block_stride = c.kv_heads * c.block_size * c.dim;
  job.heads = c.heads;
  job.kv_heads = c.kv_heads;
  job.head_dim = c.dim;
  job.block_size = c.block_size;
  job.window = c.window;
  job.scale = 1.f / std::sqrt(float(c.dim));
  job.softcap = c.softcap;
  job.slopes = c.terms ? terms.data() : nullptr;
  job.sinks = c.terms ? terms.data() + c.heads : nullptr;
  job.type = c.type;
  job.kv_type = c.stored();
  job.tokens = job.used_tokens = starts.back();
  job.rows = cut.rows.data();
  job.num_rows = int64_t(cut.rows.size());
  job.units = cut.units.data();
  job.num_units = int64_t(cut.units.size());
  job.members = cut.members.data();
  job.waits = cut.waits.data();
  job.num_waits = int64_t(cut.waits.size());
  job.most_lines = cut.most_lines;
  job.state_floats = cut.state_floats;
  current_level().attention->run(job);
  if (shared) *shared = plan.shared_partitions();
  return out;
}

void compare(const Case& c, const Pages& cache, const std::vector<Row>& rows, const std::vector<uint8_t>& query,
             const std::vector<uint8_t>& out, const std::vector<float>& terms) {
  const double limit = c.type == Type::f32 ? 2e-5 : 3e-2;
  const auto held = [&](const std::vector<uint8_t>& from, const std::vector<float>& scales, int64_t at) {
    return c.scaled() ? get_scaled(from, scales, at, c.dim, c.kv_type) : get(from, at, c.type);
  };
  int64_t token = 0;
  for (size_t r = 0; r < rows.size(); ++r)
    for (int32_t t = 0; t < rows[r].tokens; ++t, ++token)
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t end = rows[r].context + t + 1, begin = c.window ? std::max<int64_t>(0, end - c.window) : 0;
        const int64_t group = h / (c.heads / c.kv_heads);
        std::vector<double> score, sum(size_t(c.dim), 0.0);
        std::vector<int64_t> at;
        double top = -1e300, total = 0;
        for (int64_t k = begin; k < end; ++k) {
          const int64_t block = cache.table[r * size_t(cache.width) + size_t(k / c.block_size)];
          at.push_back(((block * c.kv_heads + group) * c.block_size + k % c.block_size) * c.dim);
          double s = 0;
          for (int64_t d = 0; d < c.dim; ++d)
            s += get(query, (token * c.heads + h) * c.dim + d, c.type) * held(cache.keys, cache.key_scales, at.back() + d);
          s /= std::sqrt(double(c.dim));
          if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
          if (c.terms) s += double(terms[size_t(h)]) * double(k + 1 - end);
          score.push_back(s);
          top = std::max(top, s);
        }
        for (size_t i = 0; i < score.size(); ++i) {
          const double p = std::exp(score[i] - top);
          total += p;
          for (int64_t d = 0; d < c.dim; ++d) sum[size_t(d)] += p * held(cache.values, cache.value_scales, at[i] + d);
        }
        if (c.terms) total += std::exp(double(terms[size_t(c.heads + h)]) - top);
        for (int64_t d = 0; d < c.dim; ++d) {
          const double want = sum[size_t(d)] / total, got = get(out, (token * c.heads + h) * c.dim + d, c.type);
          if (!(std::fabs(got - want) <= limit)) {
            std::printf("attention: %ld/%ld heads of %ld, block %ld, window %ld, type %d: row %zu (%d+%d) token %d head %ld "
                        "feature %ld: %g, not %g\n", long(c.heads), long(c.kv_heads), long(c.dim), long(c.block_size),
                        long(c.window), int(c.type), r, rows[r].context, rows[r].tokens, t, long(h), long(d), got, want);
            std::exit(1);
          }
        }
      }
}

// What the cache holds is as near to what was written as its type allows.
void compare_written(const Case& c, const Pages& cache, const std::vector<uint8_t>& keys,
                     const std::vector<int64_t>& slots) {
  for (size_t t = 0; t + 1 < slots.size(); ++t)
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      const int64_t from = (int64_t(t) * c.kv_heads + h) * c.dim;
      const int64_t to = ((slots[t] / c.block_size * c.kv_heads + h) * c.block_size + slots[t] % c.block_size) * c.dim;
      double high = 0;
      for (int64_t d = 0; d < c.dim; ++d) high = std::max(high, std::fabs(get(keys, from + d, c.type)));
      for (int64_t d = 0; d < c.dim; ++d) {
        const double want = get(keys, from + d, c.type);
        const double got = get_scaled(cache.keys, cache.key_scales, to + d, c.dim, c.kv_type);
        const double limit = c.kv_type == Type::s8 ? high / 253 : std::max(std::fabs(want) / 15.9, high / 28000);
        if (!(std::fabs(got - want) <= limit)) {
          std::printf("attention: type %d, token %zu head %ld feature %ld holds %g, not %g\n", int(c.kv_type), t, long(h),
                      long(d), got, want);
          std::exit(1);
        }
      }
    }
}

// A row's keys and values, and one of padding.
void fill(const Case& c, Pages& cache, const Row& row, const int32_t* table, uint32_t& seed) {
  const int64_t tokens = row.context + row.tokens, count = (tokens + 1) * c.kv_heads * c.dim;
  std::vector<uint8_t> keys(size_t(count * bytes_of(c.type))), values(keys.size());
  for (int64_t i = 0; i < count; ++i) {
    put(keys, i, noise(seed), c.type);
    put(values, i, noise(seed), c.type);
  }
  std::vector<int64_t> slots;
  for (int64_t k = 0; k < tokens; ++k) slots.push_back(table[k / c.block_size] * c.block_size + k % c.block_size);
  slots.push_back(-1);
  const int64_t stride = c.kv_heads * c.dim, block_stride = stride * c.block_size;
  if (c.scaled()) {
    AttentionWrite w{};
    w.key = keys.data();
    w.value = values.data();
    w.keys = cache.keys.data();
    w.values = cache.values.data();
    w.key_scales = cache.key_scales.data();
    w.value_scales = cache.value_scales.data();
    w.slots = slots.data();
    w.tokens = tokens + 1;
    w.key_stride = w.value_stride = stride;
    w.block_stride = block_stride;
    w.scale_stride = block_stride / c.dim;
    w.kv_heads = c.kv_heads;
    w.block_size = c.block_size;
    w.head_dim = c.dim;
    w.type = c.type;
    w.kv_type = c.kv_type;
    current_level().attention->write(w);
    compare_written(c, cache, keys, slots);
    return;
  }
  const octavo::Cache to{cache.keys.data(), cache.values.data(), c.block_size, block_stride, c.block_size * c.dim, block_stride,
                 c.block_size * c.dim};
  current_level().rotary->write_kv(keys.data(), values.data(), to, slots.data(), tokens + 1, c.kv_heads, c.dim,
                                   {stride, c.dim}, {stride, c.dim}, c.type, c.type);
}

void check(const Case& c, const std::vector<Row>& rows, int64_t common) {
  uint32_t seed = 7;
  Pages cache;
  for (const Row& r : rows)
    cache.width = std::max<int64_t>(cache.width, (r.context + r.tokens + c.block_size - 1) / c.block_size);
  int32_t next = 1 + int32_t(common);
  for (const Row& r : rows)
    for (int64_t b = 0; b < cache.width; ++b) {
      const bool used = b * c.block_size < r.context + r.tokens;
      cache.table.push_back(!used ? 0 : b < common ? 1 + int32_t(b) : next++);
    }
  const int64_t block = c.kv_heads * c.block_size * c.dim;
  const uint8_t nan = 0xff;
  cache.keys.assign(size_t(next * block * bytes_of(c.stored())), nan);
  cache.values = cache.keys;
  if (c.scaled()) cache.key_scales.assign(size_t(next * block / c.dim), NAN);
  cache.value_scales = cache.key_scales;
  for (size_t r = 0; r < rows.size(); ++r) fill(c, cache, rows[r], cache.table.data() + r * size_t(cache.width), seed);
  int64_t tokens = 0;
  for (const Row& r : rows) tokens += r.tokens;
  std::vector<uint8_t> query(size_t(tokens * c.heads * c.dim * bytes_of(c.type)));
  for (int64_t i = 0; i < tokens * c.heads * c.dim; ++i) put(query, i, noise(seed), c.type);
  std::vector<float> terms;
  for (int64_t h = 0; h < 2 * c.heads; ++h) terms.push_back(h < c.heads ? 0.01f * float(h + 1) : 0.3f * float(h - c.heads));

  int64_t shared = 0;
  const auto out = attend(c, cache, rows, cache.table.data(), query.data(), terms, true, &shared);
  compare(c, cache, rows, query, out, terms);
  if ((shared > 0) != (common * c.block_size >= PARTITION && !c.window && !c.terms)) {
    std::printf("attention: %ld partitions were shared\n", long(shared));
    std::exit(1);
  }
  if (attend(c, cache, rows, cache.table.data(), query.data(), terms, false) != out) {
    std::printf("attention: other bits without sharing\n");
    std::exit(1);
  }
  int64_t token = 0;
  const int64_t size = c.heads * c.dim * bytes_of(c.type);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int32_t* table = cache.table.data() + r * size_t(cache.width);
    const auto alone = attend(c, cache, {rows[r]}, table, query.data() + token * size, terms, true);
    if (std::memcmp(alone.data(), out.data() + token * size, alone.size())) {
      std::printf("attention: row %zu (%d+%d) has other bits alone\n", r, rows[r].context, rows[r].tokens);
      std::exit(1);
    }
    for (int32_t t = 0; t < rows[r].tokens; ++t, ++token) {  // and token by token
      const auto one = attend(c, cache, {{rows[r].context + t, 1}}, table, query.data() + token * size, terms, true);
      if (std::memcmp(one.data(), out.data() + token * size, one.size())) {
        std::printf("attention: token %d of row %zu (%d+%d) has other bits as a row of its own\n", t, r,
                    rows[r].context, rows[r].tokens);
        std::exit(1);
      }
    }
  }
}

}  // namespace

void check_attention() {
  const std::vector<Row> ragged{{0, 1}, {0, 37}, {15, 1}, {16, 2}, {255, 1}, {256, 1}, {250, 20}, {517, 3}};
  for (Type type : {Type::f32, Type::bf16}) {
    check({9, 3, 64, 64, 0, type}, ragged, 0);
    check({4, 2, 80, 48, 0, type}, ragged, 0);
    check({2, 1, 24, 16, 33, type}, ragged, 0);
    check({8, 1, 32, 32, 300, type}, ragged, 0);
    check({3, 1, 64, 64, 0, type, 20.f, true}, ragged, 0);
    const std::vector<Row> sharing{{530, 1}, {520, 1}, {600, 1}, {519, 1}, {700, 1}, {515, 1}, {514, 2}};
    check({6, 2, 128, 64, 0, type}, sharing, 8);
    for (Type kv_type : {Type::s8, Type::fp8_e4m3}) {
      check({9, 3, 64, 64, 0, type, 0, false, kv_type}, ragged, 0);
      check({2, 1, 24, 16, 33, type, 0, false, kv_type}, ragged, 0);
      check({3, 1, 64, 64, 0, type, 20.f, true, kv_type}, ragged, 0);
      check({6, 2, 128, 64, 0, type, 0, false, kv_type}, sharing, 8);
    }
  }
}

}  // namespace octavo
