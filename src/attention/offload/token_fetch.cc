#include "src/attention/offload/token_fetch.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/decode_attention.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
namespace {

constexpr int32_t kUnitTokens = 1;

}  // namespace

TokenFetch::TokenFetch(const PolicyOptions& options, OffloadTier* tier, const Shape& shape)
    : options_(options),
      tier_(tier),
      kernels_(options.device->kernels()),
      kv_heads_(options.hbm->layout().kinds[0].heads),
      head_dim_(tier->Home(0).head_dim),
      rows_(shape.rows),
      most_selected_(static_cast<int32_t>(shape.most_selected)),
      most_resident_(tier->PlacesOf(options.max_context)) {}

absl::StatusOr<std::unique_ptr<TokenFetch>> TokenFetch::Create(const PolicyOptions& options,
                                                               OffloadTier* tier,
                                                               const Shape& shape) {
  auto made = std::unique_ptr<TokenFetch>(new TokenFetch(options, tier, shape));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  SLUICE_ASSIGN_OR_RETURN(made->mover_, RowMover::Create(made->MoverOptions(shape)));
  return made;
}

RowMover::Options TokenFetch::MoverOptions(const Shape& shape) const {
  RowMover::Options mover;
  mover.kind = shape.mover;
  mover.workers = shape.mover_workers;
  mover.device = options_.device;
  mover.slots = options_.slots;
  mover.max_rows = shape.rows;
  mover.lists_per_row = static_cast<int>(kv_heads_);
  mover.capacity = most_selected_;
  // A unit is the index of a token's K row, as Bring writes it. Its V row lies behind the K rows of
  // its block, in HBM as in the home.
  const kernels::PagedCache home = tier_->Home(0);
  mover.source = home.base;
  mover.target = options_.hbm->base(0);
  mover.unit_bytes = static_cast<int32_t>(home.head_dim * SizeOf(home.type));
  mover.parts = 2;
  mover.part_pitch = int64_t{home.block_tokens} * mover.unit_bytes;
  mover.deadline = options_.worker_deadline;
  return mover;
}

absl::Status TokenFetch::Allocate() {
  const int64_t lists = rows_ * kv_heads_;
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
      SLUICE_RETURN_IF_ERROR(lists_of_tokens.Words(MemoryKind::kDevice, lists * capacity(), units));
    }
  }
  for (Buffer* counts :
       {&chosen_[0].counts, &chosen_[0].moves, &chosen_[1].counts, &chosen_[1].moves}) {
    SLUICE_RETURN_IF_ERROR(lists_of_tokens.Words(MemoryKind::kDevice, lists, counts));
  }
  SLUICE_RETURN_IF_ERROR(
      results.Words(MemoryKind::kDevice, rows_ * options_.heads * head_dim_, &o_));
  SLUICE_RETURN_IF_ERROR(results.Words(MemoryKind::kDevice, rows_ * options_.heads, &lse_));
  return absl::OkStatus();
}

absl::Status TokenFetch::AllocateScored(Scored* scored) const {
  const int64_t lists = rows_ * kv_heads_;
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(options_.device, absl::StrCat("scores of ", options_.name))
          .Words(MemoryKind::kDevice, lists * options_.max_context, &scored->scores));
  SLUICE_ASSIGN_OR_RETURN(
      scored->counters,
      SelectionCounters::Create(options_.device, options_.slots, options_.hbm->layout()));
  return absl::OkStatus();
}

kernels::TopKParams TokenFetch::Selection(const Queries& queries, Use use) const {
  kernels::TopKParams params{};
  params.scores = scores(use);
  params.score_stride = options_.max_context;
  params.slots = queries.slots;
  params.positions = queries.positions;
  params.rows = queries.rows;
  params.kv_heads = static_cast<int32_t>(kv_heads_);
  params.unit_tokens = kUnitTokens;
  params.k = most_selected_;
  // Tokens in the ring are in HBM anyway, so attending to them costs no fetch.
  params.last_units = static_cast<int32_t>(tier_->options().ring_blocks * tier_->block_tokens());
  params.margin = std::numeric_limits<float>::infinity();
  return params;
}

kernels::BringParams TokenFetch::BringOf(int layer, const kernels::TopKParams& select,
                                         const Scored& scored) {
  Chosen& chosen = ChosenOf(layer);
  kernels::BringParams params{};
  params.select = select;
  params.residency = tier_->Residency(layer);
  params.resident = Attended(chosen);
  params.places = chosen.places.as<int32_t>();
  params.counters = scored.counters->of(layer);
  return params;
}

void TokenFetch::Bring(Stream& stream, Stream& fetches, int layer, const Queries& predicted,
                       const kernels::TopKParams& select, const Rule& rule) {
  kernels::BringParams bring = BringOf(layer, select, bring_);
  const Chosen& chosen = ChosenOf(layer);
  bring.listed = rule.listed;
  bring.whole = rule.whole;
  bring.by_place = rule.by_place;
  bring.forget = rule.forget;
  bring.home = tier_->Home(layer);
  bring.cache = tier_->Places(layer);
  bring.source_units = chosen.source_units.as<int32_t>();
  bring.target_units = chosen.target_units.as<int32_t>();
  bring.move_counts = chosen.moves.as<int32_t>();
  bring.move_capacity = most_selected_;
  kernels_.Bring(stream, bring);
  // The layer before and the next Bring go on while the tokens are fetched.
  fetches.After(stream);
  mover_->Move(fetches, layer % RowMover::kSides,
               {predicted.slots, chosen.source_units.as<int32_t>(),
                chosen.target_units.as<int32_t>(), chosen.moves.as<int32_t>(), predicted.rows});
}

void TokenFetch::Add(Stream& stream, int layer, const kernels::TopKParams& select) {
  kernels::BringParams bring = BringOf(layer, select, add_);
  bring.listed = select.wanted;
  kernels_.Bring(stream, bring);
}

PolicyStatistics TokenFetch::Statistics() const {
  PolicyStatistics sums = bring_.counters->Sum();
  if (add_.counters == nullptr) return sums;
  const PolicyStatistics added = add_.counters->Sum();
  for (size_t layer = 0; layer < sums.layers.size(); ++layer) {
    PolicyStatistics::Layer& of = sums.layers[layer];
    of.resident_selected += added.layers[layer].resident_selected;
    if (of.steps > 0) continue;  // Bring counted the steps
    of.steps = added.layers[layer].steps;
    of.link_bytes = added.layers[layer].link_bytes;
  }
  return sums;
}

void TokenFetch::Attend(Stream& stream, int layer, const Queries& queries, const int32_t* wanted) {
  const Chosen& chosen = ChosenOf(layer);
  kernels::SparseAttentionParams params =
      SparseAttentionOf(queries, tier_->Places(layer), Attended(chosen),
                        chosen.places.as<int32_t>(), kUnitTokens, o_.as<float>(), lse_.as<float>());
  params.wanted = wanted;
  kernels_.SparseAttention(stream, params);
}

void TokenFetch::Finish(Stream& stream, const Queries& queries, void* out,
                        kernels::DType out_type) {
  // One part: the merge converts it to out_type.
  kernels_.Merge(stream, MergeOf(queries, static_cast<int32_t>(head_dim_), 1, o_.as<float>(),
                                 lse_.as<float>(), out, out_type));
}

}  // namespace sluice
