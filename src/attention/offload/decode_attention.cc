#include "src/attention/offload/decode_attention.h"

namespace sluice {

kernels::SparseAttentionParams SparseAttentionOf(const KvAttention::Queries& queries,
                                                 const kernels::PagedCache& cache,
                                                 const kernels::UnitLists& lists,
                                                 const int32_t* places, int32_t unit_tokens,
                                                 float* o, float* lse) {
  kernels::SparseAttentionParams params{};
  params.q = queries.q;
  params.q_stride = queries.stride;
  params.slots = queries.slots;
  params.positions = queries.positions;
  params.cache = cache;
  params.units = lists.units;
  params.places = places;
  params.counts = lists.counts;
  params.o = o;
  params.lse = lse;
  params.capacity = lists.capacity;
  params.unit_tokens = unit_tokens;
  params.rows = queries.rows;
  params.heads = queries.heads;
  params.kv_head_end = cache.kv_heads;
  params.scale = queries.scale;
  return params;
}

kernels::MergeParams MergeOf(const KvAttention::Queries& queries, int32_t head_dim, int32_t parts,
                             const float* o, const float* lse, void* out, kernels::DType out_type) {
  kernels::MergeParams params{};
  params.o = o;
  params.lse = lse;
  params.out = out;
  params.parts = parts;
  params.rows = queries.rows;
  params.heads = queries.heads;
  params.head_dim = head_dim;
  params.out_type = out_type;
  return params;
}

}  // namespace sluice
