// See octavo/attention_plan.h.
#include "octavo/attention_plan.h"

#include <algorithm>
#include <cstring>

namespace octavo {

namespace {

// Costs in units of one partition of one KV head read from memory; measured ratios, of no influence on results.
constexpr double PACK = 0.35, TILE = 0.5;  // making a partition ready for many lines; 32 lines against it
constexpr int64_t NARROW = 16;             // lines: up to here K and V are read as they lie
constexpr int64_t MOST_LINES = 512, FEWEST_LINES = 64;
constexpr int32_t FEWEST_SHARERS = 4;
constexpr double UNITS_A_THREAD = 6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

double part_cost(int64_t lines) { return lines <= NARROW ? 1.0 : PACK + TILE * double(ceil_div(lines, 32)); }

}  // namespace

void AttentionPlan::fill(int64_t rows, const int32_t* query_starts, const int32_t* contexts, const int32_t* table,
                         int64_t width, int64_t table_stride, int64_t block_size) {
  rows_.resize(size_t(rows));
  table_.resize(size_t(rows * width));
  tokens_ = rows ? query_starts[rows] : 0;
  block_size_ = block_size;
  for (int64_t r = 0; r < rows; ++r) {
    int32_t* to = table_.data() + r * width;
    std::memcpy(to, table + r * table_stride, size_t(width) * sizeof(int32_t));
    rows_[size_t(r)] = {query_starts[r], query_starts[r + 1] - query_starts[r], contexts[r], to};
  }
  for (AttentionCut& cut : cuts_) cut.made = false;
  find_groups(width);
}

// Rows of one new token with the same blocks in their first partition. What they share beyond it counts as far as all of
// them share it.
void AttentionPlan::find_groups(int64_t width) {
  groups_.clear();
  grouped_.clear();
  shared_parts_.assign(rows_.size(), 0);
  if (!share_ || rows_.size() < size_t(FEWEST_SHARERS) || PARTITION % block_size_) return;
  const int64_t blocks = PARTITION / block_size_;
  for (size_t r = 0; r < rows_.size(); ++r)
    if (rows_[r].tokens == 1 && rows_[r].context >= PARTITION && width >= blocks) grouped_.push_back(int32_t(r));
  const auto bytes = size_t(blocks) * sizeof(int32_t);
  std::stable_sort(grouped_.begin(), grouped_.end(), [&](int32_t a, int32_t b) {
    return std::lexicographical_compare(rows_[size_t(a)].blocks, rows_[size_t(a)].blocks + blocks,
                                        rows_[size_t(b)].blocks, rows_[size_t(b)].blocks + blocks);
  });
  for (size_t at = 0; at < grouped_.size();) {
    const Row& leader = rows_[size_t(grouped_[at])];
    int64_t parts = leader.context / PARTITION;
    size_t end = at + 1;
    for (; end < grouped_.size(); ++end) {
      const Row& row = rows_[size_t(grouped_[end])];
      if (std::memcmp(row.blocks, leader.blocks, bytes)) break;
      int64_t same = 1;
      const int64_t most = std::min(parts, int64_t(row.context) / PARTITION);
      while (same < most && !std::memcmp(row.blocks + same * blocks, leader.blocks + same * blocks, bytes)) ++same;
      parts = same;
    }
    const auto count = int32_t(end - at);
    if (count >= FEWEST_SHARERS) {
      groups_.push_back({int32_t(at), count, int32_t(parts)});
      for (size_t i = at; i < end; ++i) shared_parts_[size_t(grouped_[i])] = int32_t(parts);
    }
    at = end;
  }
}

int64_t AttentionPlan::shared_partitions() const {
  int64_t sum = 0;
  if (last_ < cuts_.size())
    for (const AttentionUnit& unit : cuts_[last_].units)
      if (unit.members > 1 && unit.head_begin == 0) sum += unit.part_end - unit.part_begin;
  return sum;
}

const AttentionCut& AttentionPlan::cut(const AttentionShape& shape) {
  size_t at = 0;
  while (at < cuts_.size() && !(cuts_[at].shape == shape)) ++at;
  if (at == cuts_.size()) {
    cuts_.emplace_back();
    cuts_.back().shape = shape;
  }
  last_ = at;
  AttentionCut& cut = cuts_[at];
  if (cut.made) return cut;

  const int64_t group = shape.heads / shape.kv_heads;
  cut.rows.clear();
  cut.units.clear();
  cut.members.clear();
  cut.waits.assign(rows_.size() * size_t(shape.kv_heads), 0);
  cut.most_lines = cut.state_floats = 0;
  double total = 0;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const Row& row = rows_[r];
    const int64_t oldest = shape.window ? std::max<int64_t>(0, row.context + 1 - shape.window) : 0;
    AttentionRow made{};
    made.first_token = row.first_token;
    made.tokens = row.tokens;
    made.context = row.context;
    made.blocks = row.blocks;
    made.parts_begin = int32_t(oldest / PARTITION);
    made.parts_end = int32_t(ceil_div(row.context + row.tokens, PARTITION));
    made.folded_end = made.parts_end;
    cut.rows.push_back(made);
    cut.members.push_back(int32_t(r));
    total += part_cost(row.tokens * group) * double(made.parts_end - made.parts_begin);
  }
  const double target = std::max(0.5, total * double(shape.kv_heads) / (double(shape.threads) * UNITS_A_THREAD));
  if (shape.cascade && !shape.window)
    for (size_t g = 0; g < groups_.size(); ++g) add_shared(cut, int64_t(g));
  for (size_t r = 0; r < rows_.size(); ++r) add_row(cut, int32_t(r), target);
  // The largest first, so that threads end together.
  const auto cost = [&](const AttentionUnit& u) {
    return part_cost(u.line_end - u.line_begin) * (u.part_end - u.part_begin) * (u.head_end - u.head_begin);
  };
  std::stable_sort(cut.units.begin(), cut.units.end(),
                   [&](const AttentionUnit& a, const AttentionUnit& b) { return cost(a) > cost(b); });
  for (const AttentionUnit& u : cut.units)
    cut.most_lines = std::max(cut.most_lines,
                              ceil_div(u.line_end - u.line_begin, 32) * 32 * (u.head_end - u.head_begin));
  cut.made = true;
  return cut;
}

// One unit a KV head for what the rows of a group share, where that is less work than to read it for each.
void AttentionPlan::add_shared(AttentionCut& cut, int64_t index) const {
  const Group& group = groups_[size_t(index)];
  const int64_t width = cut.shape.heads / cut.shape.kv_heads, lines = group.count * width;
  if (width > NARROW || part_cost(std::max(lines, NARROW + 1)) >= double(group.count)) return;
  const auto first = int32_t(cut.members.size());
  for (int32_t i = group.first; i < group.first + group.count; ++i) {
    AttentionRow& row = cut.rows[size_t(grouped_[size_t(i)])];
    cut.members.push_back(grouped_[size_t(i)]);
    row.parts_begin = group.parts;
    row.shared = 1;
    for (int64_t h = 0; h < cut.shape.kv_heads; ++h) ++cut.waits[size_t(grouped_[size_t(i)] * cut.shape.kv_heads + h)];
  }
  for (int32_t h = 0; h < cut.shape.kv_heads; ++h)
    for (int32_t from = 0; from < group.count; from += int32_t(MOST_LINES / width)) {
      const int32_t count = std::min(group.count - from, int32_t(MOST_LINES / width));
      cut.units.push_back({first + from, count, 0, int32_t(count * width), h, h + 1, 0, group.parts});
    }
}

void AttentionPlan::add_row(AttentionCut& cut, int32_t index, double target) const {
  AttentionRow& row = cut.rows[size_t(index)];
  const int64_t heads = cut.shape.kv_heads, parts = row.parts_end - row.parts_begin;
  const int64_t lines = row.tokens * (cut.shape.heads / heads);
  int64_t step = lines, head_step = 1;
  if (lines <= NARROW) {  // all heads of a partition lie side by side: read them so
    head_step = heads;
    if (double(heads) > target) head_step = std::max<int64_t>(1, int64_t(target));
  } else {
    step = MOST_LINES;
    while (step > FEWEST_LINES && part_cost(step) * double(parts) > target) step /= 2;
  }
  const double cost = part_cost(std::min(step, lines)) * double(head_step);
  int64_t span = std::max<int64_t>(1, int64_t(target / cost));
  if (lines > NARROW && span * 2 > parts) span = parts;
  const int64_t spans = parts ? ceil_div(parts, span) : 0;
  row.folded_end = int32_t(row.shared ? row.parts_begin : std::min<int64_t>(row.parts_begin + span, row.parts_end));
  if (spans > 1 || row.shared) {
    row.slots = 1 + row.parts_end - row.folded_end;
    row.states = cut.state_floats;
    cut.state_floats += row.slots * heads * attention_state_floats(lines, cut.shape.head_dim);
  }
  for (int64_t h = 0; h < heads; h += head_step)
    for (int64_t l = 0; l < lines; l += step)
      for (int64_t p = row.parts_begin; p < row.parts_end; p += span) {
        const int64_t end = std::min(h + head_step, heads);
        cut.units.push_back({index, 1, int32_t(l), int32_t(std::min(l + step, lines)), int32_t(h), int32_t(end),
                             int32_t(p), int32_t(std::min<int64_t>(p + span, row.parts_end))});
        for (int64_t each = h; each < end; ++each) ++cut.waits[size_t(index * heads + each)];
      }
}

}  // namespace octavo
