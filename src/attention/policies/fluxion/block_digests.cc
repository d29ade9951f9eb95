#include "src/attention/policies/fluxion/block_digests.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

std::vector<OffloadArray> FluxionDigestArrays(const FluxionShape& shape, bool in_dram) {
  std::vector<OffloadArray> arrays;
  for (int level = 0; level < shape.digest_levels; ++level) {
    OffloadArray& digests = arrays.emplace_back();
    digests.tokens_per_row = kernels::LevelTokens(level);
    digests.name = absl::StrCat("digests of ", digests.tokens_per_row, " tokens");
    digests.dim = shape.digest_dim();
    digests.type = kernels::DType::kFloat8E4M3;
    if (in_dram) digests.place = OffloadArray::Place::kDram;
  }
  return arrays;
}

namespace {

using ArrayOf = kernels::PagedRows (OffloadTier::*)(int layer, size_t index) const;

kernels::LevelDigests DigestsOf(const OffloadTier& tier, ArrayOf array, const FluxionShape& shape,
                                int layer) {
  kernels::LevelDigests digests{};
  for (int level = 0; level < shape.digest_levels; ++level) {
    digests.of[level] = (tier.*array)(layer, static_cast<size_t>(level));
  }
  return digests;
}

}  // namespace

kernels::LevelDigests FluxionDigests(const OffloadTier& tier, const FluxionShape& shape,
                                     int layer) {
  return DigestsOf(tier, &OffloadTier::Array, shape, layer);
}

kernels::LevelDigests HostFluxionDigests(const OffloadTier& tier, const FluxionShape& shape,
                                         int layer) {
  return DigestsOf(tier, &OffloadTier::HostArray, shape, layer);
}

absl::StatusOr<std::unique_ptr<BlockDigests>> BlockDigests::Create(Device* device,
                                                                   const FluxionShape& shape,
                                                                   const OffloadTier* tier) {
  const BufferAllocator allocator(device, "the centres of keys");
  const int64_t values = int64_t{shape.layers} * shape.slots * shape.kv_heads * shape.head_dim;
  Buffer centres;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, values, &centres));
  return std::unique_ptr<BlockDigests>(new BlockDigests(device, shape, tier, std::move(centres)));
}

void BlockDigests::Build(Stream& stream, int layer, const OffloadTier::BulkRow& row) const {
  device_->kernels().KeyCentres(stream,
                                {tier_.Home(layer), row.slots, row.positions, Centres(layer), 1});
  kernels::LevelDigestsParams params{};
  params.cache = tier_.Home(layer);
  params.digests = FluxionDigests(tier_, shape_, layer);
  params.centres = Centres(layer);
  params.slots = row.slots;
  params.first_positions = row.first_positions;
  params.positions = row.positions;
  params.rows = 1;
  device_->kernels().LevelDigests(stream, params);
}

void BlockDigests::Extend(Stream& stream, int layer, const KvAttention::Queries& rows) const {
  kernels::LevelDigestsParams params{};
  params.cache = tier_.Ring(layer);
  params.digests = FluxionDigests(tier_, shape_, layer);
  params.centres = Centres(layer);
  params.slots = rows.slots;
  params.positions = rows.positions;
  params.rows = rows.rows;
  device_->kernels().LevelDigests(stream, params);
}

int64_t BlockDigests::BytesOf(const FluxionShape& shape, int64_t tokens) {
  constexpr int64_t kTokens = kernels::LevelTokens(0);
  return shape.kv_heads * ((tokens + kTokens - 1) / kTokens) * int64_t{shape.digest_dim()};
}

}  // namespace sluice
