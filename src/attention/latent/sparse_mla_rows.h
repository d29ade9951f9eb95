// SparseMla over all rows of a layer at once, for what keeps its entries in HBM.
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
  mla.q = attention.q;
  mla.q_type = q_type;
  mla.slots = attention.slots;
  mla.cache = cache;
  mla.out = attention.out;
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
