#include "src/server/expert_plan.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/exchange_params.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"
#include "src/device/rank_group.h"
#include "src/model/expert_placement.h"
#include "src/model/shard.h"
#include "src/server/cache_sizes.h"
#include "src/server/ranks.h"

namespace sluice {
namespace {

std::string Bytes(int64_t bytes) { return ApproximateBytes(bytes); }

// Returns the HBM that one sequence of max_context tokens takes under the configured policy.
int64_t LongestSequence(const PlanInput& in) {
  for (const PlanInput::Policy& policy : in.policies) {
    if (policy.name == in.policy && !policy.rooms.empty()) return policy.rooms.back().hbm_bytes;
  }
  return in.layout.BytesFor(in.max_context);
}

// Returns how many times the mean a rank's load is at most.
double Busiest(const std::vector<double>& loads) {
  const double all = std::accumulate(loads.begin(), loads.end(), 0.0);
  const double most = *std::max_element(loads.begin(), loads.end());
  return all > 0 ? most * static_cast<double>(loads.size()) / all : 1;
}

// Returns a line about how evenly the load of the files is spread, as means over layers: with the
// experts where they will be, and in their order without copies.
std::string BalanceText(const ExpertLoad& load, const ExpertShard& shard) {
  double placed = 0, in_order = 0;
  int layers = 0;
  for (const std::vector<int64_t>& of : load) {
    if (of.empty()) continue;
    const ExpertPlacement plain = PlaceExperts(static_cast<int>(of.size()), shard.size, 0);
    placed += Busiest(LoadOfRanks(PlaceExperts(of, shard.size, shard.redundancy), of));
    in_order += Busiest(LoadOfRanks(plain, of));
    ++layers;
  }
  return absl::StrFormat(
      "load        by expert_load the busiest rank of a layer has %.2f times the mean, and %.2f "
      "times with experts in their order and no copies\n",
      placed / layers, in_order / layers);
}

// Returns which experts a rank has in every layer.
std::string ExpertsText(const ExpertPlacement& placement, const ExpertShard& shard, int rank,
                        int routed, bool by_load) {
  if (by_load) return absl::StrFormat("%d of %d experts", shard.each, routed);
  const auto own = placement.OfRank(rank);
  const int share = shard.each - shard.redundancy;
  std::string out = absl::StrFormat("experts %d to %d of %d", own[0], own[0] + share - 1, routed);
  if (shard.redundancy == 0) return out;
  absl::StrAppendFormat(&out, ", copies of %d others from %d on", shard.redundancy,
                        own[static_cast<size_t>(share)]);
  return out;
}

}  // namespace

absl::StatusOr<std::string> ExpertRanksText(const Config& config, const PlanInput& in) {
  const int ranks = RanksOf(config), routed = in.model.latent->experts.routed;
  SLUICE_ASSIGN_OR_RETURN(
      const ExpertShard shard,
      ExpertShardOf(in.model, 0, ranks, static_cast<int>(config.expert_redundancy())));
  SLUICE_ASSIGN_OR_RETURN(const ExpertLoad load, ReadExpertLoad(config.expert_load(), in.model));
  const ExpertPlacement placement = PlaceExperts(routed, ranks, shard.redundancy);
  std::string out;
  for (int rank = 0; rank < ranks; ++rank) {
    absl::StrAppendFormat(
        &out, "%-12s%d of %d: %s, all other weights, and sequences of its own: %s of weights\n",
        rank == 0 ? "rank" : "", rank, ranks,
        ExpertsText(placement, shard, rank, routed, !load.empty()), Bytes(in.weight_bytes));
  }
  if (!load.empty()) absl::StrAppend(&out, BalanceText(load, shard));
  const DType type = config.expert_dispatch() == "fp8" ? DType::kFloat8E4M3 : in.activation_type;
  const int64_t unit =
      kernels::RowUnitOf(in.model.hidden_size, in.model.latent->experts.per_token, type).bytes;
  // All sequences may be on one rank.
  const ExpertExchange step = ExpertExchangeOf(in.model, shard, in.max_sequences, unit);
  absl::StrAppendFormat(&out,
                        "exchange    a step of up to %d rows a rank: %d all-to-alls, %d out of "
                        "up to %s and as many back of up to %s\n",
                        in.max_sequences, 2 * step.layers, step.layers, Bytes(step.dispatch_bytes),
                        Bytes(step.combine_bytes));
  return out;
}

absl::StatusOr<std::string> ExpertGpusText(const Config& config) {
  std::string out = absl::StrFormat(
      "\nGPUs that the checkpoint takes: each with its weights, workspace and batch, what CUDA "
      "needs, and the caches of one sequence of max_context\n  %5s  %12s  %12s  %12s  %12s  %12s\n",
      "GPUs", "weights", "workspace", "batch", "one sequence", "at least");
  for (int ranks = 1; ranks <= kMaxRanks; ranks *= 2) {
    Config other = config;
    other.set_expert_parallel(static_cast<uint32_t>(ranks));
    other.set_rank(0);
    SLUICE_ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(config.model()));
    if (!ExpertShardOf(model, 0, ranks).ok()) break;
    // A rank has no more copies than there are experts of others.
    const int routed = model.latent->experts.routed;
    other.set_expert_redundancy(
        std::min(config.expert_redundancy(), static_cast<uint32_t>(routed - routed / ranks)));
    SLUICE_ASSIGN_OR_RETURN(const PlanInput in, PlanOf(other));
    const int64_t sequence = LongestSequence(in);
    const int64_t beside = in.weight_bytes + in.workspace_bytes + in.batch_bytes + sequence;
    const int64_t least = -LargestHbmBytes(MemoryFound{}, beside);
    absl::StrAppendFormat(&out, "  %5d  %12s  %12s  %12s  %12s  %12s\n", ranks,
                          Bytes(in.weight_bytes), Bytes(in.workspace_bytes), Bytes(in.batch_bytes),
                          Bytes(sequence), Bytes(least));
  }
  return out;
}

}  // namespace sluice
