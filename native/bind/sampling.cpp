// From logits to tokens: argmax, penalties, masks, truncation, draw, log-probabilities.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>

#include "call.h"
#include "octavo/sampling_counts.h"

namespace nb = nanobind;

namespace octavo {

static Logits logits_at(Ptr data, int type, int64_t rows, int64_t vocab, int64_t limit, int64_t stride) {
  return {at<void>(data), Type(type), rows, vocab, limit, stride};
}

// Counts change here, on one thread; the operator reads them on many.
static void update_counts(const SampleCall& call) {
  for (int64_t i = 0; i < call.logits.rows; ++i)
    if (const CountedTokens* counts = call.params[i].counts)
      static_cast<TokenCounts*>(const_cast<CountedTokens*>(counts))
          ->update(call.token_ids + call.slots[i] * call.token_stride, call.lengths[i], call.params[i].num_prompt);
}

void bind_sampling(nb::module_& m) {
  nb::class_<TokenCounts>(m, "TokenCounts")
      .def(nb::init<bool>())
      .def("update", [](TokenCounts& counts, Ptr tokens, int64_t length, int64_t num_prompt) {
        counts.update(at<int32_t>(tokens), length, num_prompt);
      })
      .def("items", [](const TokenCounts& counts) {
        std::vector<std::pair<int32_t, float>> items;
        for (int64_t i = 0; i < counts.size; ++i) items.emplace_back(counts.ids[i], counts.times[i]);
        return items;
      })
      .def_prop_ro("address", [](TokenCounts& counts) { return Ptr(static_cast<CountedTokens*>(&counts)); });

  // Offsets of SampleRow's fields, its size last: what octavo/sampling/state.py lays out must be the same.
  m.def("sample_row_layout", [] {
    return std::vector<size_t>{
        offsetof(SampleRow, top_p), offsetof(SampleRow, min_p), offsetof(SampleRow, top_k), offsetof(SampleRow, seed),
        offsetof(SampleRow, sample_index), offsetof(SampleRow, min_tokens), offsetof(SampleRow, num_prompt),
        offsetof(SampleRow, allowed), offsetof(SampleRow, num_allowed), offsetof(SampleRow, ends),
        offsetof(SampleRow, num_ends), offsetof(SampleRow, bias_ids), offsetof(SampleRow, bias_values),
        offsetof(SampleRow, num_bias), offsetof(SampleRow, bad_words), offsetof(SampleRow, num_bad_words),
        offsetof(SampleRow, counts), offsetof(SampleRow, temperature), offsetof(SampleRow, floor),
        offsetof(SampleRow, repetition), offsetof(SampleRow, frequency), offsetof(SampleRow, presence),
        offsetof(SampleRow, logprobs), offsetof(SampleRow, prompt_logprobs), offsetof(SampleRow, greedy),
        offsetof(SampleRow, restricted), sizeof(SampleRow)};
  });

  m.def("sample", [](Ptr logits, int type, int64_t rows, int64_t vocab, int64_t limit, int64_t stride, Ptr params,
                     Ptr token_ids, int64_t token_stride, Ptr slots, Ptr lengths, Ptr bitmask, int64_t bitmask_stride,
                     Ptr tokens, Ptr failures, Ptr ids, Ptr values, Ptr ranks, int64_t columns, int scores) {
    const SampleCall call = {logits_at(logits, type, rows, vocab, limit, stride),
                             at<SampleRow>(params),
                             at<int32_t>(token_ids),
                             token_stride,
                             at<int32_t>(slots),
                             at<int64_t>(lengths),
                             at<int32_t>(bitmask),
                             bitmask_stride,
                             at<int32_t>(tokens),
                             at<Failure>(failures),
                             {at<int32_t>(ids), at<float>(values), at<int32_t>(ranks), columns, Scores(scores)}};
    update_counts(call);
    return current_level().sampling->sample(call);
  });

  m.def("score", [](Ptr logits, int type, int64_t rows, int64_t vocab, int64_t limit, int64_t stride, Ptr chosen,
                    Ptr ids, Ptr values, Ptr ranks, int64_t columns, int scores) {
    current_level().sampling->score(logits_at(logits, type, rows, vocab, limit, stride), at<int64_t>(chosen),
                                    {at<int32_t>(ids), at<float>(values), at<int32_t>(ranks), columns, Scores(scores)});
  });
}

}  // namespace octavo
