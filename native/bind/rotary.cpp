// Rotary position embedding, and writing keys and values to the paged cache.
#include "call.h"

namespace octavo {

void bind_rotary(nanobind::module_& m) {
  m.def("rotary", [](Ptr query, Ptr key, Ptr cos_sin, int64_t rows, int64_t query_heads, int64_t key_heads, int64_t dim,
                     int64_t query_row, int64_t query_head, int64_t key_row, int64_t key_head, int type,
                     int cos_sin_type) {
    call("rotary", rows, [=](int64_t n) {
      current_level().rotary->rotary(at<void>(query), at<void>(key), at<void>(cos_sin), n, query_heads, key_heads, dim,
                                     {query_row, query_head}, {key_row, key_head}, Type(type), Type(cos_sin_type));
    });
  });
  m.def("write_kv", [](Ptr key, Ptr value, Ptr key_cache, Ptr value_cache, Ptr slots, int64_t rows, int64_t heads,
                       int64_t dim, int64_t size, int64_t key_row, int64_t key_head, int64_t value_row,
                       int64_t value_head, int64_t key_cache_block, int64_t key_cache_head, int64_t value_cache_block,
                       int64_t value_cache_head, int type, int cache_type) {
    const Cache cache = {at<void>(key_cache), at<void>(value_cache), size,
                         key_cache_block,     key_cache_head,        value_cache_block,
                         value_cache_head};
    call("write_kv", rows, [=](int64_t n) {
      current_level().rotary->write_kv(at<void>(key), at<void>(value), cache, at<int64_t>(slots), n, heads, dim,
                                       {key_row, key_head}, {value_row, value_head}, Type(type), Type(cache_type));
    });
  });
}

}  // namespace octavo
