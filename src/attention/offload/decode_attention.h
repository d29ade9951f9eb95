// Parameters of the operators with which decode rows attend to units of their caches.
#pragma once

#include <cstdint>

#include "kernels/sparse_params.h"
#include "src/attention/kv_attention.h"

namespace sluice {

// Returns the parameters of attention of `queries`, for every KV head of `cache`, to the units of
// `lists`. `places` [lists][capacity] says where in `cache` a unit lies; null: the unit is its own
// place. Results go to `o` [rows][heads][head_dim] and `lse` [rows][heads].
kernels::SparseAttentionParams SparseAttentionOf(const KvAttention::Queries& queries,
                                                 const kernels::PagedCache& cache,
                                                 const kernels::UnitLists& lists,
                                                 const int32_t* places, int32_t unit_tokens,
                                                 float* o, float* lse);

// Returns the parameters that merge `parts` partial results of `queries`, `o`
// [parts][rows][heads][head_dim] and `lse` [parts][rows][heads], into `out` of `out_type`.
kernels::MergeParams MergeOf(const KvAttention::Queries& queries, int32_t head_dim, int32_t parts,
                             const float* o, const float* lse, void* out, kernels::DType out_type);

}  // namespace sluice
