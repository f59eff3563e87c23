// Sampling against plain loops: greedy, a nucleus, a bitmask, penalties, log-probabilities, damaged rows.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "octavo/levels.h"
#include "octavo/sampling_counts.h"

namespace octavo {

static void fail(const char* what, long width, long row) {
  std::printf("sampling: %s, width %ld, row %ld\n", what, width, row);
  std::exit(1);
}

namespace {

// Rows of one width, each with parameters of its own, as a step asks for them.
struct Batch {
  int64_t rows, width;
  std::vector<float> logits, values;
  std::vector<SampleRow> params;
  std::vector<int32_t> token_ids, slots, tokens, ids, ranks, bitmask;
  std::vector<int64_t> lengths;
  std::vector<Failure> failures;
  int64_t columns;

  Batch(int64_t n, int64_t wide, int64_t lines) : rows(n), width(wide), columns(lines) {
    const size_t count = size_t(n), line = size_t(n * lines);
    logits.resize(size_t(n * wide));
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = 4.f * float(std::sin(double(i) * 0.7));
    SampleRow one = {};
    one.top_p = 1, one.temperature = 1, one.floor = -INFINITY, one.repetition = 1, one.logprobs = int32_t(lines);
    params.assign(count, one);
    token_ids.assign(size_t(n * 8), 1), tokens.assign(count, -1);
    for (int64_t i = 0; i < n; ++i) slots.push_back(int32_t(i)), lengths.push_back(8);
    failures.assign(count, Failure::none);
    ids.assign(line, 0), ranks.assign(count, 0), values.assign(line, 0);
  }
  int64_t run(Scores scores = Scores::raw_logprobs) {
    const SampleCall call = {{logits.data(), Type::f32, rows, width, width, width}, params.data(), token_ids.data(), 8,
                             slots.data(), lengths.data(), bitmask.empty() ? nullptr : bitmask.data(),
                             (width + 31) / 32, tokens.data(), failures.data(),
                             {ids.data(), values.data(), ranks.data(), columns, scores}};
    return current_level().sampling->sample(call);
  }
  const float* row(int64_t i) const { return logits.data() + i * width; }
  int64_t best(int64_t i) const { return std::max_element(row(i), row(i) + width) - row(i); }
};

}  // namespace

static void check_greedy(int64_t width) {
  Batch batch(5, width, std::min<int64_t>(width, 4));
  for (SampleRow& p : batch.params) p.greedy = true;
  if (batch.run()) fail("a sound row failed", width, 0);
  for (int64_t i = 0; i < batch.rows; ++i) {
    double mass = 0;
    for (int64_t j = 0; j < width; ++j) mass += std::exp(double(batch.row(i)[j]));
    const double want = batch.row(i)[batch.best(i)] - std::log(mass);
    const float got = batch.values[size_t(i * batch.columns)];
    if (batch.tokens[size_t(i)] != batch.best(i)) fail("not the first of the largest", width, long(i));
    if (std::fabs(got - want) > 1e-4 || batch.ranks[size_t(i)] != 1) fail("log-probability", width, long(i));
    for (int64_t k = 2; k < batch.columns; ++k)
      if (batch.values[size_t(i * batch.columns + k)] > batch.values[size_t(i * batch.columns + k - 1)])
        fail("log-probabilities do not fall", width, long(i));
  }
}

static void check_drawn(int64_t width) {
  for (const Scores scores : {Scores::raw_logprobs, Scores::processed_logits}) {
    Batch batch(64, width, 1);
    for (int64_t i = 0; i < batch.rows; ++i) {
      SampleRow& p = batch.params[size_t(i)];
      p.seed = uint64_t(i) << 33, p.temperature = 0.3f + 0.2f * float(i % 4);
      p.top_k = i % 3 ? 0 : width / 2, p.top_p = i % 2 ? 0.6 : 1.;
    }
    if (batch.run(scores)) fail("a sound row failed", width, 0);
    for (int64_t i = 0; i < batch.rows; ++i) {
      const SampleRow& p = batch.params[size_t(i)];
      const int64_t token = batch.tokens[size_t(i)];
      if (token < 0 || token >= width) fail("no token of this vocabulary", width, long(i));
      double before = 0, mass = 0;
      int64_t larger = 0;
      for (int64_t j = 0; j < width; ++j) {
        const double weight = std::exp((batch.row(i)[j] - batch.row(i)[batch.best(i)]) / double(p.temperature));
        const bool above = batch.row(i)[j] > batch.row(i)[token];
        larger += above, before += above ? weight : 0, mass += weight;
      }
      if (p.top_p < 1 && before > p.top_p * mass * 1.00001) fail("outside the nucleus", width, long(i));
      if (p.top_k && larger >= p.top_k) fail("not among the k largest", width, long(i));
    }
  }
}

static void check_edits(int64_t width) {
  Batch batch(4, width, 0);
  std::vector<TokenCounts*> counts;
  batch.bitmask.assign(size_t(4 * ((width + 31) / 32)), -1);
  const int64_t only[1] = {width - 1};
  for (int64_t i = 0; i < 4; ++i) {
    SampleRow& p = batch.params[size_t(i)];
    p.greedy = true, p.repetition = 1.5f, p.presence = 100.f;
    const int64_t best = batch.best(i);
    if (i == 0) batch.bitmask[size_t(best / 32)] &= ~int32_t(1u << (best % 32));
    if (i == 1) p.restricted = true, p.allowed = only, p.num_allowed = 1;
    counts.push_back(new TokenCounts(false));
    if (i == 2) {
      const int32_t token = int32_t(best);
      counts.back()->update(&token, 1, 0);
    }
    p.counts = counts.back();
  }
  const int64_t failed = batch.run();
  if (failed != (width == 1)) fail("how many failed", width, long(failed));
  if (width > 1 && batch.tokens[0] == batch.best(0)) fail("a token that its mask forbids", width, 0);
  if (batch.tokens[1] != width - 1) fail("a token that is not allowed", width, 1);
  if (width > 1 && batch.tokens[2] == batch.best(2)) fail("a token that was penalized away", width, 2);
  if (batch.tokens[3] != batch.best(3)) fail("an untouched row", width, 3);
  for (TokenCounts* c : counts) delete c;
}

static void check_damaged(int64_t width) {
  Batch batch(3, width, std::min<int64_t>(width, 3));
  batch.logits[size_t(width - 1)] = NAN;
  batch.logits[size_t(width)] = INFINITY;
  std::fill(batch.logits.begin() + 2 * width, batch.logits.end(), -INFINITY);
  for (const double top_p : {1., 0.9}) {
    for (SampleRow& p : batch.params) p.top_p = top_p;
    if (batch.run() != 3) fail("damaged rows that did not fail", width, 0);
    if (batch.failures[0] != Failure::not_finite || batch.failures[1] != Failure::not_finite ||
        batch.failures[2] != Failure::nothing_left)
      fail("the reason of a failure", width, 0);
  }
}

void check_sampling() {
  for (int64_t width : {1, 3, 16, 255, 256, 257, 2000}) {
    check_greedy(width);
    check_drawn(width);
    check_edits(width);
    check_damaged(width);
  }
}

}  // namespace octavo
