// What one step's attention reads, kept at one address from step to step: rows, block tables, and the cut into units.
//
// Promises: `fill` does the work that all layers share, once a step; the cut for a layer's shape is made at its first
// call of a step and kept for the other layers. The cut decides who computes what and never what is computed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "octavo/attention.h"

namespace octavo {

// What the cut depends on besides the rows.
struct AttentionShape {
  int64_t heads, kv_heads, head_dim, window;
  int threads;
  bool cascade;  // false for what only a row of its own can compute
  bool operator==(const AttentionShape& o) const {
    return heads == o.heads && kv_heads == o.kv_heads && head_dim == o.head_dim && window == o.window &&
           threads == o.threads && cascade == o.cascade;
  }
};

struct AttentionCut {
  AttentionShape shape;
  std::vector<AttentionRow> rows;
  std::vector<AttentionUnit> units;
  std::vector<int32_t> members, waits;
  int64_t most_lines = 0, state_floats = 0;
  bool made = false;
};

class AttentionPlan {
 public:
  // query_starts [rows + 1], contexts [rows], table [rows, width]: int32. They are copied.
  void fill(int64_t rows, const int32_t* query_starts, const int32_t* contexts, const int32_t* table, int64_t width,
            int64_t table_stride, int64_t block_size);
  // Rows that share a prefix may be computed together where that reads fewer bytes. Bits are the same.
  void share_prefixes(bool wanted) { share_ = wanted; }
  int64_t tokens() const { return tokens_; }
  int64_t block_size() const { return block_size_; }
  // Partitions that are read once for several rows, in the last cut: for tests and figures.
  int64_t shared_partitions() const;
  const AttentionCut& cut(const AttentionShape& shape);

 private:
  struct Row {
    int32_t first_token, tokens, context;
    const int32_t* blocks;
  };
  struct Group {  // rows whose tables begin alike
    int32_t first, count, parts;  // in grouped_
  };
  void find_groups(int64_t width);
  void add_shared(AttentionCut& cut, int64_t group) const;
  void add_row(AttentionCut& cut, int32_t index, double target) const;

  std::vector<Row> rows_;
  std::vector<int32_t> table_, grouped_, shared_parts_;
  std::vector<Group> groups_;
  std::vector<AttentionCut> cuts_;
  size_t last_ = 0;
  int64_t tokens_ = 0, block_size_ = 0;
  bool share_ = true;
};

}  // namespace octavo
