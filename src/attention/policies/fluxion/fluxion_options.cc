#include "src/attention/policies/fluxion/fluxion_options.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/base/status_macros.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

// GB/s at which the device attends over a PCIe 5 link, and at which a worker attends, inside a step
// with homes of 64 GiB (README.md).
constexpr double kLinkRate = 17, kWorkerRate = 4.7;

// Limits of the operators on a GPU: query heads of a KV head in AnchorStatistics, and the tokens of
// a row in SelectUnion, less one block.
constexpr int32_t kMostGroup = 8;
constexpr int64_t kMostTokens = (int64_t{1} << 20) - kernels::LevelTokens(0);

absl::Status OutOfRange(const PolicyOptions& options, const char* field,
                        const std::string& expected, double found) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": policy ", options.name, " expected ", expected, ", found ", found));
}

int32_t LevelOf(int block_tokens) {
  int32_t level = 0;
  while (kernels::LevelTokens(level) < block_tokens) ++level;
  return level;
}

int32_t HeadDim(const CacheKind& kv) {
  return static_cast<int32_t>(kv.part_bytes[0] / SizeOf(kv.element_type));
}

// Where workers select, the device learns of a list only when it is given a part of it, and what it
// brings to HBM is chosen from lists that it has.
absl::Status CheckPublishedForm(const PolicyOptions& options) {
  const PolicyOptions::Fluxion& fluxion = options.fluxion;
  if (fluxion.device_share > 0) {
    return OutOfRange(options, "fluxion_device_share",
                      "0 where digests lie in DRAM, since the device does not know the lists that "
                      "it would share (it may pull)",
                      fluxion.device_share);
  }
  if (fluxion.division != PolicyOptions::Fluxion::Division::kEachList) {
    return absl::InvalidArgumentError(
        "fluxion_placement: whole lists are assigned only where digests lie in HBM");
  }
  if (fluxion.resident) {
    return OutOfRange(options, "hot",
                      "0 where digests lie in DRAM, since the device has no lists to recall from",
                      1);
  }
  return absl::OkStatus();
}

absl::Status CheckPlacement(const PolicyOptions& options) {
  const PolicyOptions::Fluxion& fluxion = options.fluxion;
  if (fluxion.digests_in_dram) SLUICE_RETURN_IF_ERROR(CheckPublishedForm(options));
  if (fluxion.placement == PolicyOptions::Fluxion::Placement::kFixed) return absl::OkStatus();
  if (fluxion.device_share >= 0) {
    return OutOfRange(options, "fluxion_device_share",
                      "none where fluxion_placement is pull, which has no fixed share",
                      fluxion.device_share);
  }
  if (fluxion.division != PolicyOptions::Fluxion::Division::kEachList) {
    return absl::InvalidArgumentError(
        "fluxion_placement: whole lists are assigned only where it is fixed");
  }
  constexpr int kMost = Mailbox::kMaxWorkers - 1;
  if (options.workers > kMost) {
    return OutOfRange(options, "policy_workers",
                      absl::StrCat("at most ", kMost,
                                   " where fluxion_placement is pull, whose arbiter is one more"),
                      options.workers);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFluxionOptions(const PolicyOptions& options) {
  const CacheKind& kv = options.hbm->layout().kinds[0];
  const PolicyOptions::Fluxion& fluxion = options.fluxion;
  if (kv.block_tokens != 16 && kv.block_tokens != 32 && kv.block_tokens != 64) {
    return OutOfRange(options, "block_tokens", "16, 32 or 64", kv.block_tokens);
  }
  if (options.budget_tokens < kernels::kFluxionSinkTokens) {
    return OutOfRange(options, "budget_tokens",
                      absl::StrCat("at least ", kernels::kFluxionSinkTokens,
                                   ", the first tokens, which always lie in HBM"),
                      options.budget_tokens);
  }
  if (fluxion.device_share > 1) {
    return OutOfRange(options, "fluxion_device_share", "at most 1", fluxion.device_share);
  }
  SLUICE_RETURN_IF_ERROR(CheckPlacement(options));
  if (fluxion.fixed_block != 0 && (fluxion.fixed_block < kv.block_tokens ||
                                   fluxion.fixed_block > kernels::kFluxionLargestBlock ||
                                   fluxion.fixed_block % kv.block_tokens != 0 ||
                                   (fluxion.fixed_block & (fluxion.fixed_block - 1)) != 0)) {
    return OutOfRange(options, "fluxion_fixed_block",
                      absl::StrCat("0, or a power of two from block_tokens (", kv.block_tokens,
                                   ") to ", kernels::kFluxionLargestBlock),
                      fluxion.fixed_block);
  }
  if (!(fluxion.fixed_share >= 0 && fluxion.fixed_share <= 1)) {
    return OutOfRange(options, "fluxion_fixed_share", "0 to 1", fluxion.fixed_share);
  }
  if (options.max_context > kMostTokens) {
    return OutOfRange(options, "max_context", absl::StrCat("at most ", kMostTokens),
                      options.max_context);
  }
  if (fluxion.predictor == nullptr) return absl::OkStatus();
  if (options.heads > kMostGroup * kv.heads) {
    return OutOfRange(options, "fluxion_predictor",
                      absl::StrCat("at most ", kMostGroup, " query heads for each KV head"),
                      static_cast<double>(options.heads) / kv.heads);
  }
  return ValidFluxionPredictor(*fluxion.predictor, "fluxion_predictor");
}

FluxionShape FluxionShapeOf(const PolicyOptions& options, int rows) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kv = layout.kinds[0];
  FluxionShape shape;
  shape.layers = layout.layers;
  shape.dense_layers = std::min(options.dense_layers, layout.layers);
  shape.slots = options.slots;
  shape.rows = rows;
  shape.heads = options.heads;
  shape.kv_heads = kv.heads;
  shape.head_dim = HeadDim(kv);
  shape.unit_tokens = kv.block_tokens;
  shape.first_level = LevelOf(kv.block_tokens);
  const PolicyOptions::Fluxion& fluxion = options.fluxion;
  shape.plan_first = fluxion.fixed_block == 0 ? shape.first_level : LevelOf(fluxion.fixed_block);
  shape.plan_last = shape.plan_first;
  if (fluxion.all_levels) {
    if (fluxion.fixed_block == 0) shape.plan_last = kernels::kFluxionLevels - 1;
    shape.digest_levels = kernels::kFluxionLevels;
  }
  shape.most_units = static_cast<int32_t>(kv.BlocksFor(options.max_context));
  shape.sink_units = kernels::kFluxionSinkTokens / kv.block_tokens;
  shape.ring_units =
      (kernels::kFluxionLocalTokens + kernels::kFluxionLargestBlock) / kv.block_tokens;
  const auto budget = static_cast<int32_t>(kv.BlocksFor(options.budget_tokens));
  const int32_t hot = options.fluxion.resident ? budget : shape.sink_units;
  shape.resident_units =
      shape.ring_units + std::max(std::min(hot, shape.most_units), shape.sink_units);
  return shape;
}

float FluxionDeviceShare(const PolicyOptions& options) {
  if (options.fluxion.placement == PolicyOptions::Fluxion::Placement::kPull) return 0;
  if (options.fluxion.digests_in_dram) return 0;
  if (options.fluxion.device_share >= 0) return static_cast<float>(options.fluxion.device_share);
  return static_cast<float>(kLinkRate / (kLinkRate + kWorkerRate * options.workers));
}

}  // namespace sluice
