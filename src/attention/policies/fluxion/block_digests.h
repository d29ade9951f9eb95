// The digests of blocks that policy fluxion keeps beside its caches (kernels::LevelDigests): what
// they are less, where they lie, and when they are made.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/device/device.h"

namespace sluice {

// Returns the arrays of a tier that hold digests, by level. They come before any others.
std::vector<OffloadArray> FluxionDigestArrays(const FluxionShape& shape, bool in_dram);

// Return the digests of the levels that have any, from the tier's first arrays: as operators
// read and write them, and, where they lie in DRAM, as CPU workers read them.
kernels::LevelDigests FluxionDigests(const OffloadTier& tier, const FluxionShape& shape, int layer);
kernels::LevelDigests HostFluxionDigests(const OffloadTier& tier, const FluxionShape& shape,
                                         int layer);

class BlockDigests {
 public:
  // `tier` outlives the result. RESOURCE_EXHAUSTED: there is no memory for the centres.
  static absl::StatusOr<std::unique_ptr<BlockDigests>> Create(Device* device,
                                                              const FluxionShape& shape,
                                                              const OffloadTier* tier);

  // Enqueues the digests of a whole sequence in one layer. Its centres are made anew: the mean of
  // 256 keys of the KV head, spread over the sequence (kernels::KeyCentresParams). They stay until
  // the slot's next call, since scores compare digests with one another.
  void Build(Stream& stream, int layer, const OffloadTier::BulkRow& row) const;
  // Enqueues the digests of what decode rows completed. Keys come from the ring.
  void Extend(Stream& stream, int layer, const KvAttention::Queries& rows) const;

  // Returns the bytes of digests that a row reads at most, in all KV heads of a layer, of a
  // sequence of `tokens` tokens: those of the smallest blocks.
  static int64_t BytesOf(const FluxionShape& shape, int64_t tokens);

 private:
  BlockDigests(Device* device, const FluxionShape& shape, const OffloadTier* tier, Buffer centres)
      : device_(device), shape_(shape), tier_(*tier), centres_(std::move(centres)) {}
  float* Centres(int layer) const {
    return centres_.as<float>() + int64_t{layer} * shape_.slots * shape_.kv_heads * shape_.head_dim;
  }

  Device* const device_;
  const FluxionShape shape_;
  const OffloadTier& tier_;
  const Buffer centres_;  // float [layers][slots][kv_heads][head_dim]
};

}  // namespace sluice
