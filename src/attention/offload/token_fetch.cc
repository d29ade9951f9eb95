#include "src/attention/offload/token_fetch.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/offload_policy.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
namespace {

constexpr int32_t kUnitTokens = 1;

}  // namespace

TokenFetch::TokenFetch(const PolicyOptions& options, OffloadTier* tier, int32_t most_selected)
    : options_(options),
      tier_(tier),
      kernels_(options.device->kernels()),
      kv_heads_(options.hbm->layout().kinds[0].heads),
      head_dim_(tier->Home(0).head_dim),
      most_selected_(most_selected),
      most_resident_(tier->PlacesOf(options.max_context)) {}

absl::StatusOr<std::unique_ptr<TokenFetch>> TokenFetch::Create(const PolicyOptions& options,
                                                               OffloadTier* tier,
                                                               int64_t most_selected,
                                                               PolicyOptions::Mover mover,
                                                               int mover_workers) {
  auto made = std::unique_ptr<TokenFetch>(
      new TokenFetch(options, tier, static_cast<int32_t>(most_selected)));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  RowMover::Options of_mover = made->MoverOptions();
  of_mover.kind = mover;
  of_mover.workers = mover_workers;
  SLUICE_ASSIGN_OR_RETURN(made->mover_, RowMover::Create(of_mover));
  return made;
}

RowMover::Options TokenFetch::MoverOptions() const {
  RowMover::Options mover;
  mover.device = options_.device;
  mover.slots = options_.slots;
  mover.max_rows = OffloadPolicy::MaxDecodeRows(options_);
  mover.kv_heads = static_cast<int>(kv_heads_);
  mover.capacity = most_selected_;
  mover.home = tier_->Home(0);
  mover.resident = options_.hbm->base(0);
  mover.deadline = options_.worker_deadline;
  return mover;
}

absl::Status TokenFetch::Allocate() {
  const int64_t rows = OffloadPolicy::MaxDecodeRows(options_), lists = rows * kv_heads_;
  const BufferAllocator lists_of_tokens(options_.device,
                                        absl::StrCat("lists of tokens of ", options_.name));
  const BufferAllocator results(options_.device, absl::StrCat("results of ", options_.name));
  SLUICE_RETURN_IF_ERROR(AllocateScored(&bring_));
  if (!tier_->options().persistent.empty()) SLUICE_RETURN_IF_ERROR(AllocateScored(&add_));
  for (Buffer* units : {&chosen_[0].source_units, &chosen_[0].target_units,
                        &chosen_[1].source_units, &chosen_[1].target_units}) {
    SLUICE_RETURN_IF_ERROR(
        lists_of_tokens.Words(MemoryKind::kDevice, lists * most_selected_, units));
  }
  for (Chosen& chosen : chosen_) {
    for (Buffer* units : {&chosen.units, &chosen.places}) {
      SLUICE_RETURN_IF_ERROR(
          lists_of_tokens.Words(MemoryKind::kDevice, lists * most_resident_, units));
    }
  }
  for (Buffer* counts :
       {&chosen_[0].counts, &chosen_[0].moves, &chosen_[1].counts, &chosen_[1].moves}) {
    SLUICE_RETURN_IF_ERROR(lists_of_tokens.Words(MemoryKind::kDevice, lists, counts));
  }
  SLUICE_RETURN_IF_ERROR(
      results.Words(MemoryKind::kDevice, rows * options_.heads * head_dim_, &o_));
  SLUICE_RETURN_IF_ERROR(results.Words(MemoryKind::kDevice, rows * options_.heads, &lse_));
  return absl::OkStatus();
}

absl::Status TokenFetch::AllocateScored(Scored* scored) const {
  const int64_t lists = OffloadPolicy::MaxDecodeRows(options_) * kv_heads_;
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(options_.device, absl::StrCat("scores of ", options_.name))
          .Words(MemoryKind::kDevice, lists * options_.max_context, &scored->scores));
  const BufferAllocator selected(options_.device,
                                 absl::StrCat("lists of tokens of ", options_.name));
  for (Buffer* units : {&scored->units, &scored->missing_units}) {
    SLUICE_RETURN_IF_ERROR(selected.Words(MemoryKind::kDevice, lists * most_selected_, units));
  }
  for (Buffer* counts : {&scored->counts, &scored->missing_counts, &scored->due}) {
    SLUICE_RETURN_IF_ERROR(selected.Words(MemoryKind::kDevice, lists, counts));
  }
  const CacheLayout& layout = options_.hbm->layout();
  SLUICE_RETURN_IF_ERROR(
      selected.Words(MemoryKind::kDevice, int64_t{layout.layers} * options_.slots, &scored->since));
  SLUICE_ASSIGN_OR_RETURN(scored->counters,
                          SelectionCounters::Create(options_.device, options_.slots, layout));
  return absl::OkStatus();
}

kernels::TopKParams TokenFetch::Selection(const Queries& queries, Use use) const {
  kernels::TopKParams params{};
  params.scores = scores(use);
  params.score_stride = options_.max_context;
  params.slots = queries.slots;
  params.positions = queries.positions;
  params.selected = SelectedOf(Of(use));
  params.rows = queries.rows;
  params.kv_heads = static_cast<int32_t>(kv_heads_);
  params.unit_tokens = kUnitTokens;
  params.k = most_selected_;
  // Tokens in the ring are in HBM anyway, so attending to them costs no fetch.
  params.last_units = static_cast<int32_t>(tier_->options().ring_blocks * tier_->block_tokens());
  params.margin = std::numeric_limits<float>::infinity();
  return params;
}

void TokenFetch::Bring(Stream& stream, Stream& fetches, int layer, const Queries& predicted,
                       const Rule& rule) {
  kernels::SplitParams find = SplitOf(layer, predicted, bring_);
  find.wanted = rule.selected;
  find.forget = rule.forget;
  kernels_.Split(stream, find);
  GivePlaces(stream, layer, predicted);
  // Now every selected token has a place, since there are as many places as a row may select. What
  // else lies in HBM costs no fetch.
  kernels::SplitParams list = SplitOf(layer, predicted, bring_);
  list.wanted = rule.offloaded;
  list.whole = rule.whole;
  list.by_place = rule.whole && rule.by_place;
  kernels_.Split(stream, list);
  // The layer before and the next Bring go on while the tokens are fetched.
  fetches.After(stream);
  const Chosen& chosen = ChosenOf(layer);
  mover_->Move(fetches, layer,
               {predicted.slots, chosen.source_units.as<int32_t>(),
                chosen.target_units.as<int32_t>(), chosen.moves.as<int32_t>(), predicted.rows});
}

void TokenFetch::Add(Stream& stream, int layer, const Queries& queries, const int32_t* persistent) {
  kernels::SplitParams list = SplitOf(layer, queries, add_);
  list.wanted = persistent;
  kernels_.Split(stream, list);
  Count(stream, layer, queries, add_);
}

PolicyStatistics TokenFetch::Statistics() const {
  PolicyStatistics sums = bring_.counters->Sum();
  if (add_.counters == nullptr) return sums;
  const PolicyStatistics added = add_.counters->Sum();
  for (size_t layer = 0; layer < sums.layers.size(); ++layer) {
    PolicyStatistics::Layer& of = sums.layers[layer];
    of.resident_selected = added.layers[layer].selected;
    if (of.steps > 0) continue;  // Bring counted the steps
    of.steps = added.layers[layer].steps;
    of.link_bytes = added.layers[layer].link_bytes;
  }
  return sums;
}

void TokenFetch::Attend(Stream& stream, int layer, const Queries& queries, void* out,
                        kernels::DType out_type) {
  const Chosen& chosen = ChosenOf(layer);
  const kernels::PagedCache cache = tier_->Places(layer);
  auto* const o = o_.as<float>();
  auto* const lse = lse_.as<float>();
  kernels_.SparseAttention(
      stream, SparseAttentionOf(queries, cache, Attended(chosen), chosen.places.as<int32_t>(),
                                kUnitTokens, o, lse));
  // One part: the merge converts it to out_type.
  kernels_.Merge(stream, MergeOf(queries, cache.head_dim, 1, o, lse, out, out_type));
}

kernels::SplitParams TokenFetch::SplitOf(int layer, const Queries& queries, const Scored& scored) {
  Chosen& chosen = ChosenOf(layer);
  kernels::SplitParams params{};
  params.residency = tier_->Residency(layer);
  params.slots = queries.slots;
  params.positions = queries.positions;
  params.selected = SelectedOf(scored);
  params.resident = Attended(chosen);
  params.places = chosen.places.as<int32_t>();
  params.missing = MissingOf(scored);
  params.rows = queries.rows;
  params.kv_heads = static_cast<int32_t>(kv_heads_);
  params.unit_tokens = kUnitTokens;
  return params;
}

void TokenFetch::Count(Stream& stream, int layer, const Queries& queries, const Scored& scored) {
  kernels::RecallDueParams due{};  // always due
  due.slots = queries.slots;
  due.selected = SelectedOf(scored);
  due.missing = MissingOf(scored);
  due.since = scored.since.as<int32_t>() + int64_t{layer} * options_.slots;
  due.counters = scored.counters->of(layer);
  due.due = scored.due.as<int32_t>();
  due.rows = queries.rows;
  due.kv_heads = static_cast<int32_t>(kv_heads_);
  due.unit_tokens = kUnitTokens;
  due.budget_units = options_.budget_tokens;
  due.interval = 1;
  kernels_.RecallDue(stream, due);
}

void TokenFetch::GivePlaces(Stream& stream, int layer, const Queries& predicted) {
  Count(stream, layer, predicted, bring_);
  kernels::RecallParams recall{};
  recall.residency = tier_->Residency(layer);
  recall.slots = predicted.slots;
  recall.positions = predicted.positions;
  recall.missing = MissingOf(bring_);
  recall.home = tier_->Home(layer);
  recall.resident = tier_->Places(layer);
  const Chosen& chosen = ChosenOf(layer);
  recall.source_units = chosen.source_units.as<int32_t>();
  recall.target_units = chosen.target_units.as<int32_t>();
  recall.move_counts = chosen.moves.as<int32_t>();
  recall.counters = counters(layer);
  recall.rows = predicted.rows;
  recall.kv_heads = static_cast<int32_t>(kv_heads_);
  recall.unit_tokens = kUnitTokens;
  kernels_.Recall(stream, recall);
}

}  // namespace sluice
