#include "src/server/expert_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/exchange_params.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"
#include "src/device/rank_group.h"
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

}  // namespace

absl::StatusOr<std::string> ExpertRanksText(const Config& config, const PlanInput& in) {
  const int ranks = RanksOf(config);
  std::string out;
  for (int rank = 0; rank < ranks; ++rank) {
    SLUICE_ASSIGN_OR_RETURN(const ExpertShard shard, ExpertShardOf(in.model, rank, ranks));
    const ShardPart& part = shard.experts;
    absl::StrAppendFormat(&out,
                          "%-12s%d of %d: experts %d to %d of %d, all other weights, and sequences "
                          "of its own: %s of weights\n",
                          rank == 0 ? "rank" : "", rank, ranks, part.first,
                          part.first + part.count - 1, in.model.latent->experts.routed,
                          Bytes(in.weight_bytes));
  }
  const DType type = config.expert_dispatch() == "fp8" ? DType::kFloat8E4M3 : in.activation_type;
  const int64_t unit =
      kernels::RowUnitOf(in.model.hidden_size, in.model.latent->experts.per_token, type).bytes;
  SLUICE_ASSIGN_OR_RETURN(const ExpertShard shard, ExpertShardOf(in.model, 0, ranks));
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
