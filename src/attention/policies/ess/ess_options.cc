#include "src/attention/policies/ess/ess_options.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/latent/latent_views.h"
#include "src/attention/policies/ess/pool_division.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

// The part of what a row selects that is fetched ahead: 512 of 2,048 entries. With more, no fewer
// were missed (README.md, "Fetching for the next step").
constexpr int kPrefetchedPart = 4;

// Checks the option divide_places.
absl::Status CheckDivision(const PolicyOptions& o) {
  if (o.ess.sparse_memory_ratio == 0) {
    return absl::InvalidArgumentError(
        "ess_divide_places: with ess_sparse_memory_ratio 0 (auto) pools have no fixed number of KV "
        "slots to divide, since each sequence gets its share of HBM: set that ratio, or leave "
        "ess_divide_places off");
  }
  const CacheLayout& layout = o.dram->layout();
  const std::vector<double> ratios = ProfiledRatios(o.ess.profile, o.max_context, layout.layers);
  if (ratios.size() < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ess_divide_places: expected a policy_profile with misses at two ratios below 1, of the "
        "context nearest to max_context (",
        o.max_context, "), found ", ratios.size(),
        ": measure them with sluice-profile --ratios A,B,..., or leave ess_divide_places off"));
  }
  if (o.name != "ess") return absl::OkStatus();  // With offload-naive nothing stays in a place.
  const EssPoolShape shape =
      EssShapeOf(o, layout.layers, layout.kinds[kLatentKind].block_tokens, 0);
  const int64_t mean = shape.PlacesOf(o.max_context);
  if (shape.shares.empty()) {
    Log(LogLevel::kWarn,
        "policy ess: KV slots are not divided among layers, since there are no more of them than "
        "the fewest that were profiled, or there is one for each token",
        {{"setting", "ess_divide_places"},
         {"context", o.max_context},
         {"places", mean},
         {"least_profiled_ratio", ratios.front()}});
    return absl::OkStatus();
  }
  const std::vector<int64_t> places = shape.PlacesByLayer(o.max_context);
  const auto [least, most] = std::minmax_element(places.begin(), places.end());
  Log(LogLevel::kInfo, "policy ess: KV slots are divided among layers by the profile",
      {{"context", o.max_context}, {"places", mean}, {"least", *least}, {"most", *most}});
  return absl::OkStatus();
}

// Checks that steps may have the rows of drafts.
absl::Status CheckDrafts(const PolicyOptions& o) {
  const int drafts = o.rows_per_sequence - 1;
  if (drafts == 0) return absl::OkStatus();
  if (o.ess.prefetch > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ess_prefetch: ", o.ess.prefetch,
        " entries for the next step, but with drafts (speculation) a step's rows are not known to "
        "count: take 0, or --speculation none"));
  }
  const int most =
      (o.ess.lru && o.name == "ess" ? kernels::kMaxNewTokens : kernels::kMaxQueryPositions) - 1;
  if (drafts <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("speculation_tokens: expected at most ", most,
                                                 " with policy ", o.name, ", found ", drafts));
}

// Checks that drafts do not keep the longest sequence out of HBM.
absl::Status CheckDraftHeadroom(const PolicyOptions& o, const EssTier& tier) {
  EssPoolShape without = tier.shape();
  without.rows = 1;
  const EssPoolShape& shape = tier.shape();
  if (o.hbm->CouldEverFit(shape.HbmTokens(o.max_context)) ||
      !o.hbm->CouldEverFit(without.HbmTokens(o.max_context))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "speculation_tokens: a step with ", o.rows_per_sequence - 1, " drafts of a sequence needs ",
      shape.NeededPlaces(o.max_context),
      " KV slots in each layer, and hbm_bytes holds no sequence ", "of max_context tokens (",
      o.max_context, ") that has as many, but one with ", without.PlacesOf(o.max_context),
      ": lower --speculation-tokens or --max-context, or raise --hbm-bytes"));
}

}  // namespace

void DecideEssByProfile(int layers, PolicyOptions* options) {
  PolicyOptions::Ess& ess = options->ess;
  const size_t ratios = ProfiledRatios(ess.profile, options->max_context, layers).size();
  if (ess.divide_by_profile) ess.divide_places = ess.sparse_memory_ratio > 0 && ratios >= 2;
  if (ess.prefetch_by_profile) {
    ess.prefetch =
        ratios > 0 && options->rows_per_sequence == 1 ? options->index_top_k / kPrefetchedPart : 0;
  }
}

absl::Status CheckEssOptions(const PolicyOptions& o) {
  if (!HasIndexKeys(o.dram->layout()) || o.index_top_k == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("policy: ", o.name,
                     " needs a model with latent caches and an indexer (deepseek_v32): take "
                     "--policy full"));
  }
  const double ratio = o.ess.sparse_memory_ratio;
  if (!(ratio >= 0 && ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ess_sparse_memory_ratio: expected a number from 0 (auto) to 1, found ", ratio));
  }
  if (o.ess.prefetch < 0 || o.ess.prefetch > o.index_top_k) {
    return absl::InvalidArgumentError(
        absl::StrCat("ess_prefetch: expected 0 (none) to the ", o.index_top_k,
                     " entries that a row of this model selects, found ", o.ess.prefetch));
  }
  if (o.ess.prefetch > 0 && (!o.ess.lru || o.name != "ess")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ess_prefetch: ", o.ess.prefetch,
        " entries for the next step, but no entry is kept until then: take 0, or policy "
        "ess with ess_lru"));
  }
  SLUICE_RETURN_IF_ERROR(CheckDrafts(o));
  if (o.ess.mover != PolicyOptions::Mover::kUva &&
      (o.workers < 1 || o.workers > Mailbox::kMaxWorkers)) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy_workers: a mover by way of the CPU takes 1 to ", Mailbox::kMaxWorkers,
                     ", found ", o.workers));
  }
  if (o.ess.divide_places) SLUICE_RETURN_IF_ERROR(CheckDivision(o));
  for (const PagePool* pool : {o.hbm, o.dram}) {
    // The lists of entries to fetch number the entries of all layers together, in 32 bits.
    const int64_t entries = pool->Capacity()[kLatentKind] * pool->layout().layers;
    if (entries <= INT32_MAX) continue;
    return absl::InvalidArgumentError(absl::StrCat(pool->name(), "_bytes: expected at most ",
                                                   INT32_MAX, " latent entries with policy ",
                                                   o.name, ", found ", entries));
  }
  return absl::OkStatus();
}

absl::Status CheckEssHeadroom(const PolicyOptions& o, const EssTier& tier) {
  constexpr int64_t kLeast = 2;
  if (tier.max_tokens() >= kLeast) return CheckDraftHeadroom(o, tier);
  const Footprint least = tier.FootprintOf(kLeast, kLeast);
  const auto bytes = [](const PagePool& pool, const TokensByKind& tokens) {
    return absl::StrCat(pool.layout().BytesFor(tokens), " bytes of ", pool.name());
  };
  return absl::InvalidArgumentError(absl::StrCat(
      o.hbm->CouldEverFit(least.hbm_tokens) ? "dram_bytes" : "hbm_bytes",
      ": too few for one sequence with policy ", o.name, ", which takes ",
      bytes(*o.hbm, least.hbm_tokens), " and ", bytes(*o.dram, least.dram_tokens),
      " at least; both are divided between kinds of caches as sequences of max_context tokens take "
      "them: raise it, or lower --max-context"));
}

OverlapPlan::Options OverlapOptionsOf(const PolicyOptions& options, const EssPoolShape& shape,
                                      int decode_rows) {
  const CacheLayout& layout = options.hbm->layout();
  OverlapPlan::Options plan;
  plan.layers = layout.layers;
  plan.max_rows = decode_rows;
  plan.overlap = options.ess.overlap;
  plan.prefetch = options.ess.prefetch > 0;
  plan.profile = options.ess.profile;
  plan.rates = plan.profile.rates;
  // The profile has no rates, or those of another device.
  if (plan.rates.device != options.device->name()) {
    plan.rates = AssumedRates(layout.kinds[kLatentKind].bytes_per_token,
                              layout.kinds[kIndexKind].bytes_per_token);
  }
  if (const int processors = options.device->Processors(); processors > 0) {
    plan.rates.spared_share =
        std::min(options.ess.transfer_workers / static_cast<double>(processors), 1.0);
  }
  plan.selected = static_cast<double>(options.index_top_k);
  plan.context = options.max_context;
  // The plan's context is no longer than what was profiled.
  for (const MissProfile::Point& point : plan.profile.points) {
    const bool within = point.context <= options.max_context;
    if (&point == plan.profile.points.data()) plan.context = 0;
    if (within) plan.context = std::max(plan.context, point.context);
  }
  if (plan.context == 0) plan.context = options.max_context;
  const int64_t places = shape.PlacesOf(plan.context);
  if (!shape.shares.empty()) {
    plan.profile.points = {{plan.context, shape.ratio, 1, ExpectedMisses(options, shape)}};
  }
  plan.ratio = static_cast<double>(places) / static_cast<double>(plan.context);
  // Pools that begin cold or keep nothing miss whatever their size is.
  if (!options.ess.warm_up || !options.ess.lru) plan.ratio = std::min(plan.ratio, 0.999);
  return plan;
}

}  // namespace sluice
