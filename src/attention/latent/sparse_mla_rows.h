// SparseMla over all rows of a call at once, for what keeps its entries in HBM.
#pragma once

#include <cstdint>

#include "kernels/latent_params.h"
#include "src/attention/latent_attention.h"
#include "src/device/device.h"

namespace sluice {

// Returns the parameters of SparseMla over all rows of `attention`, whose entries lie in `cache`;
// `q_type` is the kernel set's activation type. The caller adds the lists of entries.
inline kernels::SparseMlaParams SparseMlaOfRows(const LatentAttention::Params& attention,
                                                const kernels::PagedLatents& cache,
                                                kernels::DType q_type, const Buffer& scratch) {
  kernels::SparseMlaParams mla{};
  const int64_t first = attention.first_row;
  mla.q = static_cast<const uint8_t*>(attention.q) +
          first * attention.heads * (cache.rank + cache.rope) * SizeOf(q_type);
  mla.q_type = q_type;
  mla.slots = attention.slots + first;
  mla.cache = cache;
  mla.out = static_cast<uint8_t*>(attention.out) +
            first * attention.heads * cache.rank * SizeOf(attention.out_type);
  mla.out_type = attention.out_type;
  mla.scratch = scratch.data();
  mla.scratch_bytes = static_cast<int64_t>(scratch.bytes());
  mla.rows = attention.rows;
  mla.decode_rows = attention.decode_rows;
  mla.heads = attention.heads;
  mla.scale = attention.scale;
  return mla;
}

}  // namespace sluice
