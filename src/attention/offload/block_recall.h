// The way of whole blocks from host caches to their places in HBM, for policies whose units are
// blocks. Only the engine's thread may call it.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/offload_tier.h"

namespace sluice {

class BlockRecall {
 public:
  // Makes the scratch for lists of up to `capacity` blocks, of up to `rows` rows. Fetch must be
  // called on one stream at a time. `tier` outlives the result. RESOURCE_EXHAUSTED: there is no
  // memory.
  static absl::StatusOr<BlockRecall> Create(const OffloadTier& tier, int rows, int32_t capacity);

  // Gives the missing blocks of the due rows (`due` null: of every row) places in HBM and copies
  // them there. The tables change at once, so whoever reads them next must come after this on the
  // stream. `counters` may be null.
  void Fetch(Stream& stream, int layer, const KvAttention::Queries& queries,
             const kernels::UnitLists& missing, const int32_t* due,
             kernels::SparseCounters* counters) const;

 private:
  explicit BlockRecall(const OffloadTier& tier) : tier_(&tier) {}

  const OffloadTier* tier_;
  Buffer sources_, targets_, move_counts_;  // int32 [lists][capacity] twice, [lists]
};

}  // namespace sluice
