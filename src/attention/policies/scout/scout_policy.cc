#include "src/attention/policies/scout/scout_policy.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/selection_counters.h"
#include "src/attention/policies/scout/block_selection.h"
#include "src/attention/policies/scout/first_blocks.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

struct Scratch {
  // The blocks that a layer attends to and those that it recalls, int32. Each layer has its own,
  // since recalls may lag behind by as many layers as there are.
  Buffer resident, places;  // [layers][lists][resident_blocks]
  Buffer missing;           // [layers][lists][budget_blocks]
  Buffer counts;            // [layers][2][lists]: counts of resident, of missing
  Buffer due;               // [layers][rows]
  Buffer since;             // int32 [layers][slots] steps since the last recall
  Buffer first_since;       // int32 [1 + layers], pinned: first values of `since`: 0, or by layer
  // float [2][2][rows][heads][head_dim], by a layer's parity: the workers' answer to a layer may
  // come before the layer before has merged its own.
  Buffer o;
  // float [layers][2][rows][heads], kept so that the parts of a layer can be read afterwards
  Buffer lse;
};

// Returns the steps from one recall of a layer to the next; 0: the controller decides.
int32_t IntervalOf(const PolicyOptions::Scout& scout, int layer) {
  if (!scout.recall) return std::numeric_limits<int32_t>::max();
  return scout.intervals.empty() ? 0 : scout.intervals[static_cast<size_t>(layer)];
}

struct Parts {
  std::unique_ptr<BlockSelection> selection;  // for the rows of steps
  std::unique_ptr<FirstBlocks> first;
  std::unique_ptr<SelectionCounters> counters;
  std::unique_ptr<CoAttention> workers;
};

class ScoutPolicyImpl : public ScoutPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<ScoutPolicy>> Create(const PolicyOptions& options);
  ScoutPolicyImpl(const PolicyOptions& options, const ScoutShape& shape,
                  std::unique_ptr<OffloadTier> tier, Buffer written, Scratch scratch, Parts parts)
      : ScoutPolicy(options, std::move(tier), std::move(written)),
        shape_(shape),
        scratch_(std::move(scratch)),
        parts_(std::move(parts)),
        selection_(*parts_.selection),
        first_(*parts_.first),
        counters_(*parts_.counters),
        workers_(*parts_.workers),
        hinted_(static_cast<size_t>(shape.slots)) {}

  ~ScoutPolicyImpl() override {
    // A warm-up under way uses the members.
    AwaitWarmUps();
  }

  PolicyStatistics Statistics() const override { return counters_.Sum(); }
  // Every block's digest is read once, and that of a shortlisted block again, with its key codes.
  int64_t MetadataBytes(int64_t tokens) const override {
    const int64_t digest = int64_t{2} * shape_.head_dim * SizeOf(kv().element_type);
    const int64_t codes = int64_t{shape_.block_tokens} * 2 *
                          kernels::KeyCodeWords(shape_.head_dim) *
                          static_cast<int64_t>(sizeof(int32_t));
    const int64_t blocks = kv().BlocksFor(tokens);
    const int64_t shortlist = kernels::KOfRow(shape_.least_shortlist, shape_.shortlist_blocks,
                                              static_cast<int32_t>(blocks));
    return shape_.kv_heads * (blocks * digest + std::min(blocks, shortlist) * (digest + codes));
  }
  const float* parts_lse(int layer) const override { return lse(layer); }

  // one row, because it reads the whole cache
  int last_rows_wanted(int64_t /*total*/) const override {
    return options().recompute_last == PolicyOptions::RecomputeLast::kOn ? 1 : 0;
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    OffloadPolicy::BeginStep(stream, slots, positions);
    first_.queries().BeginStep(slots, positions);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    OffloadPolicy::Attend(stream, layer, params);
    if (!tier().dense(layer)) first_.queries().Keep(stream, layer, params);
    if (layer == shape_.layers - 1) first_.queries().EndStep(stream);
  }

  bool LooksAhead(int layer) const override {
    return options().scout.layer_ahead && !tier().dense(layer);
  }

  bool FollowsDrift() const override { return options().scout.drift; }
  int rehearsals() const override { return options().scout.layer_ahead ? options().rehearsals : 0; }

  // Algorithm 1, lines 5 to 7, for layer i + 1; the model has made the queries of line 4.
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    Select(stream, layer, predicted);
    workers_.Start(stream, layer, predicted, Missing(layer), tier().HostHome(layer));
    LayerBranch(stream, layer).After(stream);
  }

 protected:
  SlotWorkers* slot_workers() const override { return &workers_.workers(); }
  // Algorithm 1, lines 9 to 13, then section 3.4.
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    Stream& answers = LayerBranch(stream, layer);
    if (LooksAhead(layer)) {
      stream.After(answers);  // the lists are complete
    } else {
      // Both selection and CPU attention use the real queries, so the CPU begins only now.
      Select(stream, layer, queries);
      answers.After(stream);
      workers_.Start(answers, layer, queries, Missing(layer), tier().HostHome(layer));
    }
    AttendResident(stream, layer, queries);
    const int64_t values = int64_t{queries.rows} * queries.heads;
    workers_.Finish(answers, layer, queries.slots, queries.rows,
                    o(layer) + values * shape_.head_dim, lse(layer) + values);
    stream.After(answers);
    kernels().Merge(stream,
                    MergeOf(queries, shape_.head_dim, 2, o(layer), lse(layer), out, out_type));
  }

  // While every block has a KV slot nothing is left to predicted queries. If the CPU gets the real
  // ones it may have a part of what is selected.
  int64_t SparseExactTokens() const override {
    const int64_t resident =
        options().scout.attend_whole ? tier().PlacesOf(options().max_context) : kScoutRingBlocks;
    const int64_t selected = options().scout.layer_ahead ? 0 : shape_.budget_blocks;
    return std::max(resident, selected) * shape_.block_tokens;
  }
  // The recall comes after the layer's attention, which reads the places that the recall takes. The
  // next step reads the tables that it changes.
  void Settle(Stream& stream, int layer, const Queries& rows) override {
    ExtendDigests(stream, layer, rows);
    // Before Fetch, which must not take the place.
    if (options().scout.attend_whole) Retain(stream, layer, rows);
    selection_.Fetch(stream, layer, rows, Missing(layer), Due(layer), counters_.of(layer));
  }

  std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                               const SelectionHints& hints) override {
    hinted_[static_cast<size_t>(slot)] = !hints.empty();
    std::vector<std::vector<int32_t>> units = OffloadPolicy::FirstUnits(slot, tokens, hints);
    // If not every block has a place, all places but the first block's are left to the blocks that
    // BuildArrays finds important.
    if (first_.queries().Knows(slot, tokens)) {
      for (std::vector<int32_t>& of_head : units) {
        if (std::ssize(of_head) > kScoutFirstBlocks &&
            std::ssize(of_head) < UnitsBeforeRing(tokens)) {
          of_head.erase(of_head.begin() + kScoutFirstBlocks, of_head.end());
        }
      }
    }
    return units;
  }

  // If nothing is known of which blocks are important, the first places hold the newest ones, and
  // the first recall is in the first step, whatever the interval. (The controller finds that step's
  // share too large by itself.)
  void BuildArrays(Stream& stream, int slot, int64_t tokens,
                   const OffloadTier::BulkRow& row) override {
    const bool knows = first_.queries().Knows(slot, tokens);
    const bool warm = knows || hinted_[static_cast<size_t>(slot)];
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      kernels::DigestParams digest{};
      digest.cache = tier().Home(layer);
      digest.digests = tier().Array(layer, kScoutDigests);
      digest.slots = row.slots;
      digest.first_positions = row.first_positions;
      digest.positions = row.positions;
      digest.rows = 1;
      if (shape_.shortlist_blocks > 0) digest.codes = tier().Array(layer, kScoutKeyCodes);
      kernels().Digest(stream, digest);
      if (knows) first_.Fetch(stream, layer, slot, row);
      const int32_t* const first_since = scratch_.first_since.as<int32_t>();
      stream.Copy(since(layer) + slot, first_since + (warm ? 0 : 1 + layer), sizeof(int32_t));
    }
    first_.queries().PromptEnded(slot);
  }

  void Joined(int slot) override { first_.queries().Joined(slot); }

 private:
  int32_t* since(int layer) const {
    return scratch_.since.as<int32_t>() + int64_t{layer} * options().slots;
  }
  float* lse(int layer) const {
    return scratch_.lse.as<float>() + layer * 2 * int64_t{shape_.rows} * shape_.heads;
  }
  float* o(int layer) const {
    return scratch_.o.as<float>() +
           layer % 2 * 2 * int64_t{shape_.rows} * shape_.heads * shape_.head_dim;
  }
  int64_t lists() const { return int64_t{shape_.rows} * shape_.kv_heads; }
  kernels::UnitLists Resident(int layer) const {
    return {scratch_.resident.as<int32_t>() + layer * lists() * shape_.resident_blocks,
            scratch_.counts.as<int32_t>() + layer * 2 * lists(), shape_.resident_blocks};
  }
  int32_t* Places(int layer) const {
    return scratch_.places.as<int32_t>() + layer * lists() * shape_.resident_blocks;
  }
  kernels::UnitLists Missing(int layer) const {
    return {scratch_.missing.as<int32_t>() + layer * lists() * shape_.budget_blocks,
            scratch_.counts.as<int32_t>() + (layer * 2 + 1) * lists(), shape_.budget_blocks};
  }
  int32_t* Due(int layer) const {
    return scratch_.due.as<int32_t>() + int64_t{layer} * shape_.rows;
  }

  // Extends the newest block's digest by the row's own token, and makes the key codes of a block
  // that this token completes.
  void ExtendDigests(Stream& stream, int layer, const Queries& queries) {
    kernels::DigestParams digest{};
    digest.cache = tier().Ring(layer);
    digest.digests = tier().Array(layer, kScoutDigests);
    digest.slots = queries.slots;
    digest.positions = queries.positions;
    digest.rows = queries.rows;
    if (shape_.shortlist_blocks > 0) digest.codes = tier().Array(layer, kScoutKeyCodes);
    kernels().Digest(stream, digest);
  }

  // Selects the blocks that the rows attend to, and splits them into the device's and the CPU's.
  void Select(Stream& stream, int layer, const Queries& queries) {
    const BlockSelection::Split split{Resident(layer), Places(layer), Missing(layer)};
    const kernels::UnitLists selected = selection_.Choose(stream, layer, queries, split);

    kernels::RecallDueParams due{};
    due.slots = queries.slots;
    due.selected = selected;
    due.missing = split.missing;
    due.since = since(layer);
    due.counters = counters_.of(layer);
    due.due = Due(layer);
    due.rows = queries.rows;
    due.kv_heads = shape_.kv_heads;
    due.unit_tokens = shape_.block_tokens;
    due.budget_units = shape_.budget_blocks;
    due.interval = IntervalOf(options().scout, layer);
    due.share_limit = options().scout.share_limit;
    kernels().RecallDue(stream, due);
  }

  void AttendResident(Stream& stream, int layer, const Queries& queries) {
    kernels().SparseAttention(
        stream, SparseAttentionOf(queries, tier().Places(layer), Resident(layer), Places(layer),
                                  shape_.block_tokens, o(layer), lse(layer)));
  }

  const ScoutShape shape_;
  const Scratch scratch_;
  const Parts parts_;
  const BlockSelection& selection_;
  FirstBlocks& first_;
  SelectionCounters& counters_;
  CoAttention& workers_;
  std::vector<bool> hinted_;  // by slot: its first places come from hints
};

absl::Status CheckOptions(const PolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  const PolicyOptions::Scout& scout = options.scout;
  const int least = (kScoutFirstBlocks + kScoutLastBlocks) * layout.kinds[0].block_tokens;
  if (options.budget_tokens < least) {
    return absl::InvalidArgumentError(absl::StrCat("budget_tokens: ", options.budget_tokens,
                                                   ", must be at least ", least,
                                                   ", the first block and the last"));
  }
  if (scout.resident_tokens < 0) {
    return absl::InvalidArgumentError(absl::StrCat("scout resident_tokens: ", scout.resident_tokens,
                                                   ", must be 0 (as the budget) or more"));
  }
  if (!(scout.share_limit > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scout share_limit: ", scout.share_limit, ", must be above 0"));
  }
  if (!(scout.narrowed >= 0 && scout.narrowed <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scout narrowed: ", scout.narrowed, ", must be from 0 to 1"));
  }
  const std::vector<int32_t>& intervals = scout.intervals;
  if (!intervals.empty() && intervals.size() != static_cast<size_t>(layout.layers)) {
    return absl::InvalidArgumentError(absl::StrCat("scout intervals: of ", intervals.size(),
                                                   " layers, the model has ", layout.layers,
                                                   "; profile this model"));
  }
  for (size_t layer = 0; layer < intervals.size(); ++layer) {
    if (intervals[layer] < 0) {
      return absl::InvalidArgumentError(absl::StrCat("scout intervals: layer ", layer, " has ",
                                                     intervals[layer],
                                                     ", must be 0 (a controller "
                                                     "decides) or more"));
    }
  }
  return absl::OkStatus();
}

ScoutShape ShapeOf(const PolicyOptions& options, int rows) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kind = layout.kinds[0];
  ScoutShape shape;
  shape.layers = layout.layers;
  shape.dense_layers = std::min(options.dense_layers, layout.layers);
  shape.slots = options.slots;
  shape.rows = rows;
  shape.heads = options.heads;
  shape.kv_heads = kind.heads;
  shape.head_dim = static_cast<int32_t>(kind.part_bytes[0] / SizeOf(kind.element_type));
  shape.block_tokens = kind.block_tokens;
  shape.most_blocks = static_cast<int32_t>(kind.BlocksFor(options.max_context));
  shape.budget_blocks =
      std::max(std::min(options.budget_tokens / kind.block_tokens, shape.most_blocks),
               kScoutFirstBlocks + kScoutLastBlocks);
  // The ring is beside the budget.
  shape.recall_blocks =
      options.scout.resident_tokens > 0
          ? std::min(static_cast<int32_t>(kind.BlocksFor(options.scout.resident_tokens)),
                     shape.most_blocks)
          : shape.budget_blocks;
  if (options.scout.key_codes) {
    const auto wanted = static_cast<int32_t>(kind.BlocksFor(options.scout.shortlist_tokens));
    shape.least_shortlist = std::max(kScoutShortlistBudgets * shape.budget_blocks, wanted / 2);
    shape.shortlist_blocks = std::max(shape.least_shortlist, wanted);
  }
  shape.resident_blocks =
      options.scout.attend_whole ? shape.recall_blocks + kScoutRingBlocks : shape.budget_blocks;
  return shape;
}

absl::StatusOr<Scratch> MakeScratch(Device& device, const ScoutShape& shape,
                                    const PolicyOptions::Scout& scout) {
  Scratch scratch;
  const BufferAllocator allocator(&device, "what a step of policy scout selects");
  const int64_t lists = int64_t{shape.rows} * shape.kv_heads;
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, shape.layers * lists * shape.resident_blocks, &scratch.resident));
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, shape.layers * lists * shape.resident_blocks, &scratch.places));
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, shape.layers * lists * shape.budget_blocks, &scratch.missing));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, shape.layers * 2 * lists, &scratch.counts));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, int64_t{shape.layers} * shape.rows, &scratch.due));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, int64_t{shape.layers} * shape.slots, &scratch.since));
  const int64_t values = 2 * int64_t{shape.rows} * shape.heads;
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, 2 * values * shape.head_dim, &scratch.o));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, shape.layers * values, &scratch.lse));
  SLUICE_RETURN_IF_ERROR(BufferAllocator(&device, "the intervals of policy scout")
                             .Words(MemoryKind::kPinned, 1 + shape.layers, &scratch.first_since));
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    scratch.first_since.as<int32_t>()[1 + layer] = std::max(IntervalOf(scout, layer) - 1, 0);
  }
  return scratch;
}

absl::StatusOr<std::unique_ptr<ScoutPolicy>> ScoutPolicyImpl::Create(const PolicyOptions& options) {
  SLUICE_RETURN_IF_ERROR(CheckOptions(options));
  const ScoutShape shape = ShapeOf(options, MaxDecodeRows(options));
  const CacheKind& kind = options.hbm->layout().kinds[0];

  OffloadTierOptions tier_options;
  tier_options.device = options.device;
  tier_options.hbm = options.hbm;
  tier_options.dram = options.dram;
  tier_options.slots = options.slots;
  tier_options.max_context = options.max_context;
  tier_options.dense_layers = shape.dense_layers;
  tier_options.ring_blocks = kScoutRingBlocks;
  tier_options.recall_blocks = shape.recall_blocks;
  tier_options.unit_tokens = kind.block_tokens;
  tier_options.arrays = {{"digests", kind.block_tokens, 2 * shape.head_dim, kind.element_type}};
  if (shape.shortlist_blocks > 0) {
    tier_options.arrays.push_back({"key codes", 1, 2 * kernels::KeyCodeWords(shape.head_dim)});
  }
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> tier, OffloadTier::Create(tier_options));

  CoAttention::Options co_options;
  co_options.device = options.device;
  co_options.kernels = options.host_kernels;
  co_options.workers = options.workers;
  co_options.deadline = options.worker_deadline;
  co_options.slots = options.slots;
  co_options.layers = shape.layers;
  co_options.max_rows = shape.rows;
  co_options.heads = shape.heads;
  co_options.kv_heads = shape.kv_heads;
  co_options.head_dim = shape.head_dim;
  co_options.capacity = shape.budget_blocks;
  co_options.unit_tokens = shape.block_tokens;
  Parts parts;
  SLUICE_ASSIGN_OR_RETURN(parts.workers, CoAttention::Create(co_options));
  SLUICE_ASSIGN_OR_RETURN(parts.counters, SelectionCounters::Create(options.device, options.slots,
                                                                    options.hbm->layout()));
  SLUICE_ASSIGN_OR_RETURN(BlockSelection selection,
                          BlockSelection::Create(options, shape, shape.rows, *tier));
  parts.selection = std::make_unique<BlockSelection>(std::move(selection));
  SLUICE_ASSIGN_OR_RETURN(parts.first, FirstBlocks::Create(options, shape, *tier));
  SLUICE_ASSIGN_OR_RETURN(Scratch scratch, MakeScratch(*options.device, shape, options.scout));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  return std::make_unique<ScoutPolicyImpl>(options, shape, std::move(tier), std::move(written),
                                           std::move(scratch), std::move(parts));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScoutPolicy>> NewScoutPolicy(const PolicyOptions& options) {
  return ScoutPolicyImpl::Create(options);
}

}  // namespace sluice
