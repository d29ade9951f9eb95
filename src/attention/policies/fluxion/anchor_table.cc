#include "src/attention/policies/fluxion/anchor_table.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/attention/policies/fluxion/block_digests.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<AnchorTable> AnchorTable::Create(Device* device, const FluxionShape& shape) {
  AnchorTable made(shape);
  const BufferAllocator allocator(device, "fluxion's anchors");
  const int64_t slots = int64_t{shape.layers} * shape.slots;
  const std::pair<Buffer*, int64_t> sizes[] = {{&made.kv_, slots * made.kv_numbers()},
                                               {&made.heads_, slots * made.head_numbers()},
                                               {&made.resident_, slots}};
  for (const auto& [buffer, words] : sizes) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, buffer));
  }
  const int64_t most = std::max(made.kv_numbers(), made.head_numbers());
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, most, &made.nothing_));
  std::fill_n(made.nothing_.as<float>(), most, std::numeric_limits<float>::quiet_NaN());
  return made;
}

kernels::FluxionAnchors AnchorTable::Of(int layer) const {
  const int64_t slots = int64_t{layer} * shape_.slots;
  return {kv_.as<float>() + slots * kv_numbers(), heads_.as<float>() + slots * head_numbers(),
          resident_.as<float>() + slots};
}

std::vector<AnchorTable::Piece> AnchorTable::PiecesOf(int layer, int slot) const {
  const kernels::FluxionAnchors anchors = Of(layer);
  return {{anchors.kv + slot * kv_numbers(), kv_numbers()},
          {anchors.heads + slot * head_numbers(), head_numbers()},
          {anchors.resident + slot, 1}};
}

void AnchorTable::Forget(Stream& stream, int layer, int slot) const {
  for (const Piece& piece : PiecesOf(layer, slot)) {
    stream.Copy(piece.at, nothing_.data(), static_cast<size_t>(piece.count) * sizeof(float));
  }
}

std::vector<Stream::CopyOp> AnchorTable::CopiesFrom(const AnchorTable& other, int slot) const {
  std::vector<Stream::CopyOp> copies;
  for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
    const std::vector<Piece> to = PiecesOf(layer, slot), from = other.PiecesOf(layer, slot);
    for (size_t i = 0; i < to.size(); ++i) {
      copies.push_back({to[i].at, from[i].at, static_cast<size_t>(to[i].count) * sizeof(float)});
    }
  }
  return copies;
}

absl::StatusOr<AnchorMeter> AnchorMeter::Create(Device* device, const FluxionShape& shape,
                                                const OffloadTier* tier, int64_t max_context,
                                                double tau) {
  AnchorMeter made(device, shape, tier, tau);
  const int64_t bytes = kernels::AnchorScratchBytes(max_context, shape.heads, shape.head_dim);
  SLUICE_RETURN_IF_ERROR(BufferAllocator(device, "what fluxion measures of an anchor")
                             .Array(MemoryKind::kDevice, bytes, 1, &made.scratch_));
  return made;
}

void AnchorMeter::Measure(Stream& stream, int layer, const float* q, const int32_t* slots,
                          const int32_t* positions, const AnchorTable& to) const {
  kernels::AnchorStatisticsParams params{};
  params.q = q;
  params.q_stride = int64_t{shape_.heads} * shape_.head_dim;
  params.slots = slots;
  params.positions = positions;
  params.cache = tier_->Home(layer);
  params.digests = FluxionDigests(*tier_, shape_, layer);
  params.anchors = to.Of(layer);
  params.scratch = scratch_.as<float>();
  params.rows = 1;
  params.heads = shape_.heads;
  params.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  params.tau = tau_;
  device_->kernels().AnchorStatistics(stream, params);
}

}  // namespace sluice
