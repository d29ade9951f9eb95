#include "src/attention/policies/recall/recall_policy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/offload/selection_counters.h"
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

  PolicyStatistics Statistics() const override { return workspace_.counters->Sum(); }
  int64_t MetadataBytes(int64_t tokens) const override {  // partial keys
    return tokens * shape_.kv_heads * shape_.rank * SizeOf(kernels::DType::kBFloat16);
  }

  // Speculation and prefetch (InfiniGen, 4.3): selects the tokens with the highest partial scores,
  // where there is a margin only those that come within it of the largest, and fetches all of them
  // to HBM.
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    Score(stream, layer, predicted);
    Select(stream, layer, predicted);
    const kernels::UnitLists missing = Lists(workspace_.missing, workspace_.missing_counts);
    const bool keeps = !options().recall.fetch_all;
    Split(stream, layer, predicted, missing, /*forget=*/!keeps, /*whole=*/false);
    GivePlaces(stream, layer, predicted, missing);
    // Now every chosen token has a place: there are as many places as the budget has tokens. What
    // else lies in HBM costs no fetch, so it is attended to as well.
    Split(stream, layer, predicted, missing, /*forget=*/false, /*whole=*/keeps);
    Stream& fetches = LayerBranch(stream, layer);
    fetches.After(stream);
    Fetch(fetches, layer, predicted.rows);
  }

 protected:
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    stream.After(LayerBranch(stream, layer));
    const Chosen& chosen = ChosenOf(layer);
    const kernels::PagedCache cache = tier().Places(layer);
    auto* const o = workspace_.o.as<float>();
    auto* const lse = workspace_.lse.as<float>();
    kernels().SparseAttention(
        stream, SparseAttentionOf(queries, cache, Attended(chosen), chosen.places.as<int32_t>(),
                                  kUnitTokens, o, lse));
    // One part: the merge converts it to out_type.
    kernels().Merge(stream, MergeOf(queries, cache.head_dim, 1, o, lse, out, out_type));
  }

  // Rows attend to every token that has a place, whatever its score. Under fetch_all only the ring
  // is sure to have one.
  int64_t SparseExactTokens() const override {
    return options().recall.fetch_all ? kRingBlocks * tier().block_tokens() : capacities_.resident;
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
  // The tokens that a layer needs, from Ahead to AttendSparse, and how they come to HBM. The Ahead
  // of the next layer comes between the two.
  struct Chosen {
    Buffer units, places, counts;              // int32 [lists][resident] twice, [lists]
    Buffer source_units, target_units, moves;  // int32 [lists][selected] twice, [lists]
  };

  // Capacities of lists, in tokens.
  struct Capacities {
    int32_t selected = 0;  // the budget, or the longest sequence
    int32_t resident = 0;  // every place
  };

  // Scratch of one Ahead.
  struct Workspace {
    Buffer projection;                 // float [layers][kv_heads][head_dim][rank]
    Buffer scores;                     // float [lists][max_context]
    Buffer selected, selected_counts;  // int32 [lists][selected], [lists]
    Buffer missing, missing_counts;    // the same
    Buffer since, due;                 // int32 [layers][slots], [rows]
    std::array<Chosen, 2> chosen;      // by a layer's parity
    Buffer o, lse;                     // float [rows][heads][head_dim], [rows][heads]
    std::unique_ptr<SelectionCounters> counters;
  };

  RecallPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier, Buffer written,
               const ProjectionShape& shape, const Capacities& capacities, Workspace workspace)
      : OffloadPolicy(options, std::move(tier), std::move(written)),
        shape_(shape),
        capacities_(capacities),
        workspace_(std::move(workspace)) {}
  static absl::StatusOr<Workspace> NewWorkspace(const PolicyOptions& options,
                                                const ProjectionShape& shape,
                                                const Capacities& capacities);

  int layers() const { return options().hbm->layout().layers; }
  Chosen& ChosenOf(int layer) { return workspace_.chosen[static_cast<size_t>(layer) % 2]; }
  kernels::UnitLists Lists(const Buffer& units, const Buffer& counts) const {
    return {units.as<int32_t>(), counts.as<int32_t>(), capacities_.selected};
  }
  kernels::UnitLists Attended(const Chosen& chosen) const {
    return {chosen.units.as<int32_t>(), chosen.counts.as<int32_t>(), capacities_.resident};
  }
  const float* Projection(int layer) const {
    return workspace_.projection.as<float>() +
           layer * shape_.kv_heads * shape_.head_dim * shape_.rank;
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
    params.scores = workspace_.scores.as<float>();
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

  void Select(Stream& stream, int layer, const Queries& predicted) {
    kernels::TopKParams params{};
    params.scores = workspace_.scores.as<float>();
    params.score_stride = options().max_context;
    params.slots = predicted.slots;
    params.positions = predicted.positions;
    params.selected = Lists(workspace_.selected, workspace_.selected_counts);
    params.rows = predicted.rows;
    params.kv_heads = kv().heads;
    params.unit_tokens = kUnitTokens;
    params.k = capacities_.selected;
    // Tokens in the ring are in HBM anyway, so attending to them costs no fetch.
    params.last_units = static_cast<int32_t>(kRingBlocks * tier().block_tokens());
    params.margin = Margin(layer);
    kernels().TopK(stream, params);
  }

  void Split(Stream& stream, int layer, const Queries& predicted, const kernels::UnitLists& missing,
             bool forget, bool whole) {
    Chosen& chosen = ChosenOf(layer);
    kernels::SplitParams params{};
    params.residency = tier().Residency(layer);
    params.slots = predicted.slots;
    params.positions = predicted.positions;
    params.selected = Lists(workspace_.selected, workspace_.selected_counts);
    params.resident = Attended(chosen);
    params.places = chosen.places.as<int32_t>();
    params.missing = missing;
    params.rows = predicted.rows;
    params.kv_heads = kv().heads;
    params.unit_tokens = kUnitTokens;
    params.whole = whole;
    params.forget = forget;
    kernels().Split(stream, params);
  }

  // Gives every missing token a place in HBM.
  void GivePlaces(Stream& stream, int layer, const Queries& predicted,
                  const kernels::UnitLists& missing) {
    kernels::RecallDueParams due{};  // always due; the operator also counts
    due.slots = predicted.slots;
    due.selected = Lists(workspace_.selected, workspace_.selected_counts);
    due.missing = missing;
    due.since = workspace_.since.as<int32_t>() + int64_t{layer} * options().slots;
    due.counters = workspace_.counters->of(layer);
    due.due = workspace_.due.as<int32_t>();
    due.rows = predicted.rows;
    due.kv_heads = kv().heads;
    due.unit_tokens = kUnitTokens;
    due.budget_units = options().budget_tokens;
    due.interval = 1;
    kernels().RecallDue(stream, due);

    kernels::RecallParams recall{};
    recall.residency = tier().Residency(layer);
    recall.slots = predicted.slots;
    recall.positions = predicted.positions;
    recall.missing = missing;
    recall.home = tier().Home(layer);
    recall.resident = tier().Places(layer);
    const Chosen& chosen = ChosenOf(layer);
    recall.source_units = chosen.source_units.as<int32_t>();
    recall.target_units = chosen.target_units.as<int32_t>();
    recall.move_counts = chosen.moves.as<int32_t>();
    recall.counters = due.counters;
    recall.rows = predicted.rows;
    recall.kv_heads = kv().heads;
    recall.unit_tokens = kUnitTokens;
    kernels().Recall(stream, recall);
  }

  // Fetches K and V of those tokens. The layer before and the next Ahead go on meanwhile.
  void Fetch(Stream& stream, int layer, int32_t rows) {
    const Chosen& chosen = ChosenOf(layer);
    const kernels::PagedCache home = tier().Home(layer), resident = tier().Places(layer);
    const int64_t row_bytes = int64_t{home.head_dim} * SizeOf(home.type);
    const int64_t values = home.block_tokens * row_bytes;  // V of a block, after its K
    for (const int64_t part : {int64_t{0}, values}) {
      kernels::TransferParams move{};
      move.source = static_cast<const uint8_t*>(home.base) + part;
      move.target = static_cast<uint8_t*>(resident.base) + part;
      move.source_pitch = move.target_pitch = row_bytes;
      move.source_units = chosen.source_units.as<int32_t>();
      move.target_units = chosen.target_units.as<int32_t>();
      move.counts = chosen.moves.as<int32_t>();
      move.lists = rows * kv().heads;
      move.capacity = capacities_.selected;
      move.unit_bytes = static_cast<int32_t>(row_bytes);
      kernels().Transfer(stream, move);
    }
  }

  const ProjectionShape shape_;
  const Capacities capacities_;
  Workspace workspace_;
};

// Copies the projection to device memory.
absl::Status Upload(Device* device, const std::vector<float>& values, Buffer* target) {
  const size_t bytes = values.size() * sizeof(float);
  SLUICE_ASSIGN_OR_RETURN(*target,
                          device->Allocate(MemoryKind::kDevice, bytes, "recall's projection"));
  SLUICE_ASSIGN_OR_RETURN(Buffer staged,
                          device->Allocate(MemoryKind::kPinned, bytes, "recall's projection"));
  std::memcpy(staged.data(), values.data(), bytes);
  const std::unique_ptr<Stream> stream = device->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = device->NewEvent();
  stream->Copy(target->data(), staged.data(), bytes);
  stream->Record(*done);
  done->Wait();
  return device->Health();
}

}  // namespace

absl::StatusOr<RecallPolicy::Workspace> RecallPolicy::NewWorkspace(const PolicyOptions& options,
                                                                   const ProjectionShape& shape,
                                                                   const Capacities& capacities) {
  Workspace w;
  SLUICE_RETURN_IF_ERROR(
      Upload(options.device,
             options.recall.projection.empty() ? PlainProjection(shape) : options.recall.projection,
             &w.projection));
  const int64_t rows = MaxDecodeRows(options), lists = rows * shape.kv_heads;
  const BufferAllocator lists_of_tokens(options.device, "recall's lists of tokens");
  const BufferAllocator results(options.device, "recall's results");
  SLUICE_RETURN_IF_ERROR(BufferAllocator(options.device, "recall's scores")
                             .Words(MemoryKind::kDevice, lists * options.max_context, &w.scores));
  for (Buffer* units :
       {&w.selected, &w.missing, &w.chosen[0].source_units, &w.chosen[0].target_units,
        &w.chosen[1].source_units, &w.chosen[1].target_units}) {
    SLUICE_RETURN_IF_ERROR(
        lists_of_tokens.Words(MemoryKind::kDevice, lists * capacities.selected, units));
  }
  for (Chosen& chosen : w.chosen) {
    for (Buffer* units : {&chosen.units, &chosen.places}) {
      SLUICE_RETURN_IF_ERROR(
          lists_of_tokens.Words(MemoryKind::kDevice, lists * capacities.resident, units));
    }
  }
  for (Buffer* counts : {&w.selected_counts, &w.missing_counts, &w.chosen[0].counts,
                         &w.chosen[0].moves, &w.chosen[1].counts, &w.chosen[1].moves, &w.due}) {
    SLUICE_RETURN_IF_ERROR(lists_of_tokens.Words(MemoryKind::kDevice, lists, counts));
  }
  SLUICE_RETURN_IF_ERROR(BufferAllocator(options.device, "recall's counters")
                             .Words(MemoryKind::kDevice, shape.layers * options.slots, &w.since));
  SLUICE_RETURN_IF_ERROR(
      results.Words(MemoryKind::kDevice, rows * options.heads * shape.head_dim, &w.o));
  SLUICE_RETURN_IF_ERROR(results.Words(MemoryKind::kDevice, rows * options.heads, &w.lse));
  SLUICE_ASSIGN_OR_RETURN(
      w.counters, SelectionCounters::Create(options.device, options.slots, options.hbm->layout()));
  return w;
}

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
  Capacities capacities;
  capacities.resident = tier->PlacesOf(options.max_context);
  capacities.selected = static_cast<int32_t>(std::min<int64_t>(
      options.budget_tokens, kv.BlocksFor(options.max_context) * kv.block_tokens));
  SLUICE_ASSIGN_OR_RETURN(Workspace workspace, NewWorkspace(options, shape, capacities));
  return std::unique_ptr<AttentionPolicy>(new RecallPolicy(
      options, std::move(tier), std::move(written), shape, capacities, std::move(workspace)));
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewRecallPolicy(const PolicyOptions& options) {
  return RecallPolicy::Create(options);
}

}  // namespace sluice
