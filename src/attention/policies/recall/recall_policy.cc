#include "src/attention/policies/recall/recall_policy.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/offload/token_fetch.h"
#include "src/attention/policies/recall/projection.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr int32_t kUnitTokens = 1;
constexpr int kRingBlocks = 1;
constexpr size_t kPartialKeys = 0;  // the policy's one array

class RecallPolicy : public OffloadPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionPolicy>> Create(const PolicyOptions& options);
  ~RecallPolicy() override { AwaitWarmUps(); }

  bool LooksAhead(int layer) const override { return !tier().dense(layer); }
  bool FollowsDrift() const override { return options().recall.drift; }
  int rehearsals() const override { return options().rehearsals; }

  PolicyStatistics Statistics() const override { return fetch_->Statistics(); }
  int64_t MetadataBytes(int64_t tokens) const override {  // partial keys
    return tokens * shape_.kv_heads * shape_.rank * SizeOf(kernels::DType::kBFloat16);
  }

  // Speculation and prefetch (InfiniGen, 4.3): selects the tokens with the highest partial scores,
  // where there is a margin only those that come within it of the largest, and fetches all of them
  // to HBM.
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    Score(stream, layer, predicted);
    kernels::TopKParams select = fetch_->Selection(predicted);
    select.margin = Margin(layer);
    TokenFetch::Rule rule;
    rule.whole = !options().recall.fetch_all;
    rule.forget = options().recall.fetch_all;
    fetch_->Bring(stream, LayerBranch(stream, layer), layer, predicted, select, rule);
  }

 protected:
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    stream.After(LayerBranch(stream, layer));
    fetch_->Attend(stream, layer, queries);
    fetch_->Finish(stream, queries, out, out_type);
  }

  // Rows attend to every token that has a place, whatever its score. Under fetch_all only the ring
  // is sure to have one.
  int64_t SparseExactTokens() const override {
    return options().recall.fetch_all ? kRingBlocks * tier().block_tokens()
                                      : fetch_->most_resident();
  }

  void Settle(Stream& stream, int layer, const Queries& rows) override {
    ExtendPartialKeys(stream, layer, tier().Ring(layer), rows.slots, nullptr, rows.positions,
                      rows.rows);
    if (!options().recall.fetch_all) Retain(stream, layer, rows);
  }

  // Under fetch_all nothing is placed before the first step, because it would be forgotten then.
  std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                               const SelectionHints& hints) override {
    std::vector<std::vector<int32_t>> units = OffloadPolicy::FirstUnits(slot, tokens, hints);
    if (options().recall.fetch_all) std::fill(units.begin(), units.end(), std::vector<int32_t>());
    return units;
  }

  void BuildArrays(Stream& stream, int /*slot*/, int64_t /*tokens*/,
                   const OffloadTier::BulkRow& row) override {
    for (int layer = tier().options().dense_layers; layer < layers(); ++layer) {
      ExtendPartialKeys(stream, layer, tier().Home(layer), row.slots, row.first_positions,
                        row.positions, 1);
    }
  }

 private:
  RecallPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier, Buffer written,
               const ProjectionShape& shape, std::unique_ptr<TokenFetch> fetch, Buffer projection)
      : OffloadPolicy(options, std::move(tier), std::move(written)),
        shape_(shape),
        fetch_(std::move(fetch)),
        projection_(std::move(projection)) {}

  int layers() const { return options().hbm->layout().layers; }
  const float* Projection(int layer) const {
    return projection_.as<float>() + layer * shape_.kv_heads * shape_.head_dim * shape_.rank;
  }

  // Extends the partial keys by positions [first, position] of each row.
  void ExtendPartialKeys(Stream& stream, int layer, const kernels::PagedCache& keys,
                         const int32_t* slots, const int32_t* first, const int32_t* positions,
                         int32_t rows) {
    kernels::PartialKeysParams params{};
    params.cache = keys;
    params.projection = Projection(layer);
    params.partial = tier().Array(layer, kPartialKeys);
    params.slots = slots;
    params.first_positions = first;
    params.positions = positions;
    params.rows = rows;
    kernels().PartialKeys(stream, params);
  }

  void Score(Stream& stream, int layer, const Queries& predicted) {
    kernels::PartialScoresParams params{};
    params.q = predicted.q;
    params.q_stride = predicted.stride;
    params.slots = predicted.slots;
    params.positions = predicted.positions;
    params.projection = Projection(layer);
    params.partial = tier().Array(layer, kPartialKeys);
    params.scores = fetch_->scores();
    params.score_stride = options().max_context;
    params.rows = predicted.rows;
    params.heads = predicted.heads;
    params.head_dim = tier().Home(layer).head_dim;
    params.scale = predicted.scale;
    params.reduction = options().reduction;
    kernels().PartialScores(stream, params);
  }

  // Returns how far below the largest score of a list a selected token may lie.
  float Margin(int layer) const {
    const PolicyOptions::Recall& recall = options().recall;
    if (recall.margin > 0) return recall.margin;
    return recall.margins.empty() ? std::numeric_limits<float>::infinity()
                                  : recall.margins[static_cast<size_t>(layer)];
  }

  const ProjectionShape shape_;
  const std::unique_ptr<TokenFetch> fetch_;
  const Buffer projection_;  // float [layers][kv_heads][head_dim][rank]
};

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> RecallPolicy::Create(
    const PolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kv = layout.kinds[0];
  ProjectionShape shape;
  shape.layers = layout.layers;
  shape.kv_heads = kv.heads;
  shape.head_dim = kv.part_bytes[0] / SizeOf(kv.element_type);
  SLUICE_ASSIGN_OR_RETURN(
      shape.rank,
      ProjectionRank(shape.layers, shape.kv_heads, shape.head_dim,
                     static_cast<int64_t>(options.recall.projection.size()), options.recall.rank));
  if (!options.recall.margins.empty() && std::ssize(options.recall.margins) != layout.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy ", options.name, ": expected margins of ", layout.layers,
                     " layers, found ", options.recall.margins.size()));
  }
  const int64_t ring = int64_t{kRingBlocks} * kv.block_tokens;
  if (options.budget_tokens <= ring) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget_tokens: policy ", options.name, " always attends to the newest ", ring,
                     " tokens, a block of block_tokens: expected more than that, found ",
                     options.budget_tokens));
  }
  OffloadTierOptions tier_options;
  tier_options.device = options.device;
  tier_options.hbm = options.hbm;
  tier_options.dram = options.dram;
  tier_options.slots = options.slots;
  tier_options.max_context = options.max_context;
  tier_options.dense_layers = std::min(options.dense_layers, layout.layers);
  tier_options.ring_blocks = kRingBlocks;
  // The ring is beside the budget. Every chosen token finds a place, and so does the one that
  // leaves the ring: the tokens of the ring are among those chosen.
  tier_options.recall_blocks = options.budget_tokens / kv.block_tokens;
  tier_options.unit_tokens = kUnitTokens;
  tier_options.arrays = {
      {"partial keys", 1, static_cast<int32_t>(shape.rank), kernels::DType::kBFloat16}};
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> tier, OffloadTier::Create(tier_options));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<TokenFetch> fetch,
      TokenFetch::Create(
          options, tier.get(),
          {.most_selected = std::min<int64_t>(options.budget_tokens,
                                              kv.BlocksFor(options.max_context) * kv.block_tokens),
           .rows = MaxDecodeRows(options)}));
  SLUICE_ASSIGN_OR_RETURN(Buffer projection,
                          Uploaded(options.device,
                                   options.recall.projection.empty() ? PlainProjection(shape)
                                                                     : options.recall.projection,
                                   "recall's projection"));
  return std::unique_ptr<AttentionPolicy>(
      new RecallPolicy(options, std::move(tier), std::move(written), shape, std::move(fetch),
                       std::move(projection)));
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewRecallPolicy(const PolicyOptions& options) {
  return RecallPolicy::Create(options);
}

}  // namespace sluice
