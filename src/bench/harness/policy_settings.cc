// The table of settings.
#include "src/bench/harness/policy_settings.h"

#include <algorithm>
#include <cstdint>

#include "src/bench/harness/synthetic_predictor.h"

namespace sluice::bench {
namespace {

using Refill = PolicyOptions::Clo::Refill;
using Division = PolicyOptions::Fluxion::Division;

constexpr bool kSkip = true;

constexpr PolicySetting kSettings[] = {
    {"budget", "", true,
     [](PolicyOptions& o, double value) { o.budget_tokens = static_cast<int>(value); }},
    // Values of kernels::GroupReduction: 0 the largest, 1 the mean, 2 the sum of softmaxes.
    {"reduction", "", false,
     [](PolicyOptions& o, double value) {
       o.reduction =
           static_cast<kernels::GroupReduction>(std::clamp(static_cast<int>(value), 0, 2));
     }},
    {"rehearsals", "scout", false,
     [](PolicyOptions& o, double value) { o.rehearsals = static_cast<int>(value); }},
    {"whole", "scout", false,
     [](PolicyOptions& o, double value) { o.scout.attend_whole = value != 0; }},
    {"codes", "scout", false,
     [](PolicyOptions& o, double value) { o.scout.key_codes = value != 0; }},
    {"shortlist", "scout", true,
     [](PolicyOptions& o, double value) { o.scout.shortlist_tokens = static_cast<int>(value); }},
    {"narrowed", "scout", false,
     [](PolicyOptions& o, double value) { o.scout.narrowed = static_cast<float>(value); }},
    {"drift", "scout", false, [](PolicyOptions& o, double value) { o.scout.drift = value != 0; }},
    {"beta", "hgca", false,
     [](PolicyOptions& o, double value) { o.hgca.beta = static_cast<float>(value); }},
    {"following", "hgca", false,
     [](PolicyOptions& o, double value) { o.hgca.following = static_cast<int>(value); }},
    {"alpha", "hgca", false,
     [](PolicyOptions& o, double value) { o.hgca.alpha = static_cast<float>(value); }},
    {"window", "hgca", true,
     [](PolicyOptions& o, double value) { o.hgca.window_tokens = static_cast<int>(value); }},
    // The reduction of the moving average; PolicyOptions refuses 2.
    {"average-reduction", "hgca", false,
     [](PolicyOptions& o, double value) {
       o.hgca.reduction =
           static_cast<kernels::GroupReduction>(std::clamp(static_cast<int>(value), 0, 2));
     }},
    {"rank", "recall", true,
     [](PolicyOptions& o, double value) { o.recall.rank = static_cast<int>(value); }},
    {"margin", "recall", false,
     [](PolicyOptions& o, double value) { o.recall.margin = static_cast<float>(value); }},
    {"divisor", "clo", false,
     [](PolicyOptions& o, double value) { o.clo.budget_divisor = static_cast<int>(value); }},
    {"similarity", "clo", false,
     [](PolicyOptions& o, double value) {
       o.clo.similarity = static_cast<float>(value);
       o.clo.thresholds.clear();  // of a profile
     }},
    // Values of kernels::SimilarityRule: 0 the paper's, 1 the least, 2 the mean.
    {"rule", "clo", false,
     [](PolicyOptions& o, double value) {
       o.clo.rule = static_cast<kernels::SimilarityRule>(std::clamp(static_cast<int>(value), 0, 2));
     }},
    {"refresh", "clo", false, [](PolicyOptions& o, double value) { o.clo.refresh = value != 0; }},
    {"persistent", "clo", false,
     [](PolicyOptions& o, double value) { o.clo.persistent_share = value; }},
    {"prefetchable", "clo", false,
     [](PolicyOptions& o, double value) { o.clo.prefetchable = value; }},
    {"ahead", "clo", false,
     [](PolicyOptions& o, double value) { o.clo.persistent_ahead = value != 0; }},
    {"early", "clo", false, [](PolicyOptions& o, double value) { o.clo.early = value != 0; }},
    {"replace", "clo", false,
     [](PolicyOptions& o, double value) {
       o.clo.refill = value != 0 ? Refill::kReplace : Refill::kDelta;
     }},
    {"bits", "clo", true,
     [](PolicyOptions& o, double value) { o.clo.hash_bits = static_cast<int>(value); }},
    {"levels", "clo", true,
     [](PolicyOptions& o, double value) { o.clo.hash_levels = static_cast<int>(value); }},
    {"centred", "clo", false, [](PolicyOptions& o, double value) { o.clo.centred = value != 0; }},
    {"mover", "clo", false,
     [](PolicyOptions& o, double value) {
       o.clo.mover = static_cast<PolicyOptions::Mover>(static_cast<int>(value));
     },
     "uva,cpu"},
    {"mover-workers", "clo", true,
     [](PolicyOptions& o, double value) { o.clo.mover_workers = static_cast<int>(value); }},
    {"block", "fluxion", true,
     [](PolicyOptions& o, double value) { o.fluxion.fixed_block = static_cast<int>(value); }},
    {"fixed-share", "fluxion", false,
     [](PolicyOptions& o, double value) { o.fluxion.fixed_share = value; }},
    {"device-share", "fluxion", false,
     [](PolicyOptions& o, double value) { o.fluxion.device_share = value; }},
    {"pull", "fluxion", false,
     [](PolicyOptions& o, double value) {
       o.fluxion.placement = value != 0 ? PolicyOptions::Fluxion::Placement::kPull
                                        : PolicyOptions::Fluxion::Placement::kFixed;
     }},
    // The schedules that Fluxion's is compared with (8.3): the CPU alone, whole lists by number and
    // by length; and a share of each list, the default.
    {"schedule", "fluxion", false,
     [](PolicyOptions& o, double value) {
       if (value == 0) o.fluxion.device_share = 0;
       o.fluxion.division = value == 1   ? Division::kHeads
                            : value == 2 ? Division::kLengths
                                         : Division::kEachList;
     },
     "none,uniform,length,parts"},
    // The ablation of skipping and of choosing block sizes (8.3).
    {"streaming", "fluxion-synthetic", false,
     [](PolicyOptions& o, double value) {
       if (value == 0) o.fluxion.predictor = WithoutStreaming(*o.fluxion.predictor);
     }},
    {"level", "fluxion-synthetic", false,
     [](PolicyOptions& o, double value) {
       o.fluxion.predictor = AtOneLevel(*o.fluxion.predictor, static_cast<int>(value));
       o.fluxion.all_levels = true;
     },
     "16,32,64,128"},
    {"hot", "fluxion", false,
     [](PolicyOptions& o, double value) { o.fluxion.resident = value != 0; }},
    {"host-digests", "fluxion", false,
     [](PolicyOptions& o, double value) {
       o.fluxion.digests_in_dram = o.fluxion.all_levels = value != 0;
     }},
    {"share", "scout", false,
     [](PolicyOptions& o, double value) { o.scout.share_limit = static_cast<float>(value); }},
    {"interval", "scout", true,
     [](PolicyOptions& o, double value) {
       o.scout.intervals.assign(static_cast<size_t>(o.hbm->layout().layers),
                                static_cast<int32_t>(value));
     }},
    // The controller decides when to recall, whatever a profile says.
    {"controller", "scout", false,
     [](PolicyOptions& o, double value) {
       if (value != 0) o.scout.intervals.clear();
     }},
    {"ratio", "ess", false,
     [](PolicyOptions& o, double value) { o.ess.sparse_memory_ratio = value; }},
    {"least", "ess", true,
     [](PolicyOptions& o, double value) { o.ess.least_places = static_cast<int>(value); }},
    {"prefetch", "ess", true,
     [](PolicyOptions& o, double value) { o.ess.prefetch = static_cast<int>(value); }},
    {"divide", "ess", false,
     [](PolicyOptions& o, double value) { o.ess.divide_places = value != 0; }},
    {"movers", "ess", true,
     [](PolicyOptions& o, double value) { o.ess.transfer_workers = static_cast<int>(value); }},
    {"mover", "ess", false,
     [](PolicyOptions& o, double value) {
       o.ess.mover = static_cast<PolicyOptions::Mover>(static_cast<int>(value));
     },
     "uva,cpu,auto"},
    {"mover-workers", "ess", true,
     [](PolicyOptions& o, double value) { o.workers = static_cast<int>(value); }},
    {"skip", "ess", false,
     [](PolicyOptions& o, double value) {
       o.ess.probe.skip_transfers = value != 0 ? &kSkip : nullptr;
     }},
    {"row-copies", "ess", false,
     [](PolicyOptions& o, double value) { o.ess.probe.row_copies = value != 0; }},
    {"resident", "scout", true,
     [](PolicyOptions& o, double value) { o.scout.resident_tokens = static_cast<int>(value); }},
};

}  // namespace

absl::Span<const PolicySetting> AllPolicySettings() { return kSettings; }

}  // namespace sluice::bench
