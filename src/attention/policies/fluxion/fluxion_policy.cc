#include "src/attention/policies/fluxion/fluxion_policy.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/block_recall.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/offload/selection_counters.h"
#include "src/attention/policies/fluxion/anchor_blocks.h"
#include "src/attention/policies/fluxion/block_digests.h"
#include "src/attention/policies/fluxion/block_retrieval.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policies/fluxion/head_budgets.h"
#include "src/attention/policies/fluxion/host_scores.h"
#include "src/attention/policies/fluxion/list_shares.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// The parts of a row's attention, by who computes them: the device from HBM, the workers, and the
// device over the link, which has no part where workers make the lists and it does not pull.
constexpr int kMostParts = 3;
constexpr int kInHbm = 0, kByWorkers = 1, kOverLink = 2;

// Clusters of two thread blocks that pull, 16 multiprocessors in all: on an H100 they read 49 GB/s
// of the 50 that the link gives, and a grant takes 10 us beside them in place of 61 beside 64.
constexpr int kPullers = 8;

struct Scratch {
  Buffer sink, sink_places;    // int32 [lists][sink units]
  Buffer local, local_places;  // int32 [lists][ring units]
  Buffer resident, places;     // int32 [lists][resident_units]
  // Each layer has missing lists of its own, since recalls may lag behind: int32
  // [layers][lists][most_units], [layers][lists].
  Buffer missing, missing_counts;
  Buffer device_units, worker_units;  // int32 [lists][most_units]: the missing units, divided
  Buffer counts;                      // int32 [5][lists]: of the lists but the missing ones
  Buffer o, lse;                      // float [parts][rows][heads][head_dim], [parts][rows][heads]
};

struct Parts {
  std::unique_ptr<BlockDigests> digests;
  std::unique_ptr<HeadBudgets> budgets;
  std::unique_ptr<BlockRetrieval> retrieval;
  std::unique_ptr<HostScores> host_scores;  // null: digests lie in HBM, and the device selects
  std::unique_ptr<BlockRecall> recall;
  std::unique_ptr<AnchorBlocks> anchor_blocks;  // null: no block comes before the first step
  std::unique_ptr<SelectionCounters> counters;
  std::unique_ptr<ListShares> list_shares;  // null: every list has the same share
  std::unique_ptr<CoAttention> workers;     // last: its threads use host_scores
};

class FluxionPolicy : public OffloadPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionPolicy>> Create(const PolicyOptions& options);
  FluxionPolicy(const PolicyOptions& options, const FluxionShape& shape,
                std::unique_ptr<OffloadTier> tier, Buffer written, Scratch scratch, Parts parts)
      : OffloadPolicy(options, std::move(tier), std::move(written)),
        shape_(shape),
        pulls_(options.fluxion.placement == PolicyOptions::Fluxion::Placement::kPull),
        reads_link_(pulls_ || !options.fluxion.digests_in_dram),
        device_share_(FluxionDeviceShare(options)),
        scratch_(std::move(scratch)),
        parts_(std::move(parts)),
        budgets_(*parts_.budgets),
        workers_(*parts_.workers) {}

  ~FluxionPolicy() override {
    // A warm-up under way uses the members.
    AwaitWarmUps();
  }

  PolicyStatistics Statistics() const override {
    PolicyStatistics sums = parts_.counters->Sum();
    for (int layer = 0; pulls_ && layer < shape_.layers; ++layer) {
      sums.layers[static_cast<size_t>(layer)].link_bytes +=
          workers_.PulledTokens(layer) * kv().bytes_per_token;
    }
    for (int layer = 0; parts_.host_scores != nullptr && layer < shape_.layers; ++layer) {
      PolicyStatistics::Layer& of = sums.layers[static_cast<size_t>(layer)];
      parts_.host_scores->Count(layer, &of);
      of.link_bytes += of.steps * shape_.kv_heads * kv().bytes_per_token;  // written through
    }
    return sums;
  }
  int64_t MetadataBytes(int64_t tokens) const override {
    return parts_.host_scores == nullptr ? BlockDigests::BytesOf(shape_, tokens) : 0;
  }
  int64_t HostMetadataBytes(int64_t tokens) const override {
    return parts_.host_scores == nullptr ? 0 : BlockDigests::BytesOf(shape_, tokens);
  }

  // one row, which is the anchor's
  int last_rows_wanted(int64_t /*total*/) const override {
    return budgets_.predicts() && options().recompute_last != PolicyOptions::RecomputeLast::kOff
               ? 1
               : 0;
  }
  int64_t hint_queries() const override {
    return budgets_.predicts() ? int64_t{shape_.layers} * shape_.heads * shape_.head_dim : 0;
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    if (parts_.list_shares != nullptr) parts_.list_shares->BeginStep(stream, slots, positions);
    budgets_.BeginStep(stream, slots, positions);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    OffloadPolicy::Attend(stream, layer, params);
    if (!budgets_.predicts()) return;
    PromptQueries& prompts = budgets_.first_queries().prompts();
    if (!tier().dense(layer)) prompts.Keep(stream, layer, params);
    if (layer == shape_.layers - 1) prompts.EndStep(stream);
  }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    budgets_.EndPrompt(slot, tokens, hints);
    OffloadPolicy::EndPrompt(slot, tokens, std::move(hints));
  }

 protected:
  SlotWorkers* slot_workers() const override { return &workers_.workers(); }

  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    ListSegments(stream, layer, queries);
    budgets_.Predict(stream, layer, queries, Segments());
    Select(stream, layer, queries);

    Stream& answers = LayerBranch(stream, layer);
    answers.After(stream);
    workers_.Start(answers, layer, queries, WorkerUnits(), tier().HostHome(layer));
    // Nothing waits for it here but the end of the workers' share, which is later anyway.
    budgets_.Keep(answers, layer, queries);
    Stream& link = AsideBranch(stream);
    if (reads_link_) {
      link.After(stream);
      AttendOverLink(link, layer, queries);
    }
    if (parts_.host_scores != nullptr) Split(stream, layer, queries, NoUnits());
    kernels().SparseAttention(
        stream,
        SparseAttentionOf(queries, tier().Places(layer), Resident(), scratch_.places.as<int32_t>(),
                          shape_.unit_tokens, o(kInHbm, queries), lse(kInHbm, queries)));
    workers_.Finish(answers, layer, queries.slots, queries.rows, o(kByWorkers, queries),
                    lse(kByWorkers, queries));
    if (reads_link_) stream.After(link);
    stream.After(answers);
    const int parts = reads_link_ ? kMostParts : kMostParts - 1;
    kernels().Merge(stream, MergeOf(queries, shape_.head_dim, parts, o(0, queries), lse(0, queries),
                                    out, out_type));
  }

  // Rows attend to everything that has a place.
  int64_t SparseExactTokens() const override {
    return int64_t{tier().PlacesOf(options().max_context)} * shape_.unit_tokens;
  }

  void Settle(Stream& stream, int layer, const Queries& rows) override {
    parts_.digests->Extend(stream, layer, rows);
    // Before the recall, which must not take the place.
    Retain(stream, layer, rows);
    if (!options().fluxion.resident) return;
    parts_.recall->Fetch(stream, layer, rows, Missing(layer), /*due=*/nullptr,
                         parts_.counters->of(layer));
  }

  // The units of the sink have places always (kernels::SegmentListsParams).
  std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                               const SelectionHints& hints) override {
    std::vector<std::vector<int32_t>> all = OffloadPolicy::FirstUnits(slot, tokens, hints);
    const auto sink =
        static_cast<int32_t>(std::min<int64_t>(shape_.sink_units, PlacesBehindRing(slot, tokens)));
    // Nothing is brought that the anchor's blocks would put out at once.
    if (hints.entries.empty() && FetchesAnchorBlocks(slot, tokens)) {
      for (std::vector<int32_t>& units : all) units.clear();
    }
    for (std::vector<int32_t>& units : all) {
      // The oldest other units make room for those of the sink that are not there.
      const auto others = std::lower_bound(units.begin(), units.end(), sink);
      const auto lacking = std::min(static_cast<size_t>(sink - (others - units.begin())),
                                    static_cast<size_t>(units.end() - others));
      std::vector<int32_t> with_sink(static_cast<size_t>(sink));
      for (int32_t unit = 0; unit < sink; ++unit) with_sink[static_cast<size_t>(unit)] = unit;
      with_sink.insert(with_sink.end(), others + static_cast<int64_t>(lacking), units.end());
      units = std::move(with_sink);
    }
    return all;
  }

  void BuildArrays(Stream& stream, int slot, int64_t tokens,
                   const OffloadTier::BulkRow& row) override {
    const bool fetches = FetchesAnchorBlocks(slot, tokens);
    for (int layer = shape_.dense_layers; layer < shape_.layers; ++layer) {
      parts_.digests->Build(stream, layer, row);
      budgets_.MakeAnchor(stream, layer, slot, row);
      if (!fetches) continue;
      const float* const q = budgets_.first_queries().OfSlot(layer, slot);
      parts_.anchor_blocks->Fetch(stream, layer, q, row);
    }
  }

  void Joined(int slot) override { budgets_.Joined(slot); }
  void Left(int slot) override { budgets_.Left(slot); }

 private:
  // The places of a shorter sequence have all of it, and must: it is exact.
  bool FetchesAnchorBlocks(int slot, int64_t tokens) const {
    return parts_.anchor_blocks != nullptr && budgets_.first_queries().Has(slot) &&
           UnitsBeforeRing(tokens) > shape_.recall_units();
  }
  // Returns the counts of one of the lists of Scratch::counts.
  int32_t* Counts(int of) const { return scratch_.counts.as<int32_t>() + of * shape_.lists(); }
  SegmentUnits Segments() const {
    return {{scratch_.sink.as<int32_t>(), Counts(0), shape_.sink_units},
            {scratch_.local.as<int32_t>(), Counts(1), shape_.ring_units},
            scratch_.sink_places.as<int32_t>(),
            scratch_.local_places.as<int32_t>()};
  }
  kernels::UnitLists Resident() const {
    return {scratch_.resident.as<int32_t>(), Counts(2), shape_.resident_units};
  }
  kernels::UnitLists DeviceUnits() const {
    return {scratch_.device_units.as<int32_t>(), Counts(3), shape_.most_units};
  }
  kernels::UnitLists WorkerUnits() const {
    return {scratch_.worker_units.as<int32_t>(), Counts(4), shape_.most_units};
  }
  // Returns lists that are always empty, where the device divides none.
  kernels::UnitLists NoUnits() const { return DeviceUnits(); }
  kernels::UnitLists Missing(int layer) const {
    return {scratch_.missing.as<int32_t>() + layer * shape_.lists() * shape_.most_units,
            scratch_.missing_counts.as<int32_t>() + layer * shape_.lists(), shape_.most_units};
  }
  // Return where a part of these rows' attention goes.
  float* o(int part, const Queries& queries) const {
    return scratch_.o.as<float>() + int64_t{part} * queries.rows * shape_.heads * shape_.head_dim;
  }
  float* lse(int part, const Queries& queries) const {
    return scratch_.lse.as<float>() + int64_t{part} * queries.rows * shape_.heads;
  }

  void ListSegments(Stream& stream, int layer, const Queries& queries) {
    const SegmentUnits segments = Segments();
    kernels::SegmentListsParams params{};
    params.residency = tier().Residency(layer);
    params.slots = queries.slots;
    params.positions = queries.positions;
    params.sink = segments.sink;
    params.local = segments.local;
    params.sink_places = segments.sink_places;
    params.local_places = segments.local_places;
    params.rows = queries.rows;
    params.kv_heads = shape_.kv_heads;
    params.unit_tokens = shape_.unit_tokens;
    kernels().SegmentLists(stream, params);
  }

  // Enqueues what comes before the request to the workers. Where digests lie in DRAM the workers
  // select, and what has a place in HBM is listed beside them.
  void Select(Stream& stream, int layer, const Queries& queries) {
    if (parts_.host_scores != nullptr) return parts_.retrieval->Plan(stream, queries, budgets_);
    const kernels::UnitLists selected =
        parts_.retrieval->Choose(stream, layer, queries, budgets_, parts_.counters->of(layer));
    Split(stream, layer, queries, selected);
    Divide(stream, layer, queries);
  }

  // Lists what has a place, and the selected units that have none.
  void Split(Stream& stream, int layer, const Queries& queries,
             const kernels::UnitLists& selected) {
    kernels::SplitParams split{};
    split.residency = tier().Residency(layer);
    split.slots = queries.slots;
    split.positions = queries.positions;
    split.selected = selected;
    split.resident = Resident();
    split.places = scratch_.places.as<int32_t>();
    split.missing = Missing(layer);
    split.rows = queries.rows;
    split.kv_heads = shape_.kv_heads;
    split.unit_tokens = shape_.unit_tokens;
    split.whole = true;
    kernels().Split(stream, split);
  }

  // Divides the units that have no place between the device and the workers. Where the device
  // pulls, all of them are in the workers' lists, and DivideLists counts them.
  void Divide(Stream& stream, int layer, const Queries& queries) {
    kernels::DivideListsParams divide{};
    divide.from = Missing(layer);
    divide.first = DeviceUnits();
    divide.rest = WorkerUnits();
    divide.slots = queries.slots;
    divide.counters = parts_.counters->of(layer);
    divide.rows = queries.rows;
    divide.kv_heads = shape_.kv_heads;
    divide.unit_tokens = shape_.unit_tokens;
    divide.share = device_share_;
    if (parts_.list_shares != nullptr) divide.shares = parts_.list_shares->shares();
    kernels().DivideLists(stream, divide);
  }

  void AttendOverLink(Stream& link, int layer, const Queries& queries) {
    const kernels::SparseAttentionParams over_link = SparseAttentionOf(
        queries, tier().Home(layer), pulls_ ? WorkerUnits() : DeviceUnits(), nullptr,
        shape_.unit_tokens, o(kOverLink, queries), lse(kOverLink, queries));
    if (pulls_) {
      workers_.Pull(link, layer, over_link);
    } else {
      kernels().SparseAttention(link, over_link);
    }
  }

  const FluxionShape shape_;
  const bool pulls_;
  const bool reads_link_;
  const float device_share_;
  const Scratch scratch_;
  const Parts parts_;
  HeadBudgets& budgets_;
  CoAttention& workers_;
};

absl::StatusOr<Scratch> MakeScratch(const PolicyOptions& options, const FluxionShape& shape) {
  Scratch s;
  const int64_t lists = shape.lists(), values = int64_t{kMostParts} * shape.rows * shape.heads;
  const std::pair<Buffer*, int64_t> sizes[] = {
      {&s.sink, lists * shape.sink_units},
      {&s.sink_places, lists * shape.sink_units},
      {&s.local, lists * shape.ring_units},
      {&s.local_places, lists * shape.ring_units},
      {&s.resident, lists * shape.resident_units},
      {&s.places, lists * shape.resident_units},
      {&s.missing, shape.layers * lists * shape.most_units},
      {&s.missing_counts, shape.layers * lists},
      {&s.device_units, lists * shape.most_units},
      {&s.worker_units, lists * shape.most_units},
      {&s.counts, 5 * lists},
      {&s.o, values * shape.head_dim},
      {&s.lse, values}};
  const BufferAllocator allocator(options.device, "what a step of policy fluxion attends to");
  for (const auto& [buffer, words] : sizes) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, buffer));
  }
  return s;
}

// Returns null where digests lie in HBM.
absl::StatusOr<std::unique_ptr<HostScores>> NewHostScores(const PolicyOptions& options,
                                                          const FluxionShape& shape,
                                                          const OffloadTier& tier,
                                                          const BlockRetrieval& retrieval) {
  if (!options.fluxion.digests_in_dram) return nullptr;
  HostScores::Options o;
  o.device = options.device;
  o.kernels = options.host_kernels;
  o.workers = options.workers;
  o.shape = shape;
  o.digests.resize(static_cast<size_t>(shape.layers));
  for (int layer = shape.dense_layers; layer < shape.layers; ++layer) {
    o.digests[static_cast<size_t>(layer)] = HostFluxionDigests(tier, shape, layer);
  }
  o.levels = retrieval.levels();
  o.blocks = retrieval.blocks();
  return HostScores::Create(o);
}

absl::StatusOr<std::unique_ptr<CoAttention>> NewWorkers(const PolicyOptions& options,
                                                        const FluxionShape& shape,
                                                        HostScores* host_scores) {
  CoAttention::Options o;
  o.device = options.device;
  o.kernels = options.host_kernels;
  o.workers = options.workers;
  o.deadline = options.worker_deadline;
  o.slots = options.slots;
  o.layers = shape.layers;
  o.max_rows = shape.rows;
  o.heads = shape.heads;
  o.kv_heads = shape.kv_heads;
  o.head_dim = shape.head_dim;
  o.capacity = shape.most_units;
  o.unit_tokens = shape.unit_tokens;
  if (options.fluxion.placement == PolicyOptions::Fluxion::Placement::kPull) o.pullers = kPullers;
  o.maker = host_scores;
  return CoAttention::Create(o);
}

OffloadTierOptions TierOptionsOf(const PolicyOptions& options, const FluxionShape& shape) {
  OffloadTierOptions out;
  out.device = options.device;
  out.hbm = options.hbm;
  out.dram = options.dram;
  out.slots = options.slots;
  out.max_context = options.max_context;
  out.dense_layers = shape.dense_layers;
  out.ring_blocks = shape.ring_units;
  out.recall_blocks = shape.recall_units();
  out.unit_tokens = shape.unit_tokens;
  out.arrays = FluxionDigestArrays(shape, options.fluxion.digests_in_dram);
  return out;
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> FluxionPolicy::Create(
    const PolicyOptions& options) {
  SLUICE_RETURN_IF_ERROR(CheckFluxionOptions(options));
  const FluxionShape shape = FluxionShapeOf(options, MaxDecodeRows(options));
  const CacheLayout& layout = options.hbm->layout();

  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> tier,
                          OffloadTier::Create(TierOptionsOf(options, shape)));

  Parts parts;
  SLUICE_ASSIGN_OR_RETURN(parts.digests, BlockDigests::Create(options.device, shape, tier.get()));
  SLUICE_ASSIGN_OR_RETURN(parts.budgets, HeadBudgets::Create(options, shape, tier.get()));
  SLUICE_ASSIGN_OR_RETURN(parts.retrieval, BlockRetrieval::Create(options, shape, tier.get()));
  SLUICE_ASSIGN_OR_RETURN(parts.host_scores,
                          NewHostScores(options, shape, *tier, *parts.retrieval));
  SLUICE_ASSIGN_OR_RETURN(BlockRecall recall,
                          BlockRecall::Create(*tier, shape.rows, shape.most_units));
  parts.recall = std::make_unique<BlockRecall>(std::move(recall));
  if (options.fluxion.resident && parts.budgets->predicts()) {
    SLUICE_ASSIGN_OR_RETURN(parts.anchor_blocks,
                            AnchorBlocks::Create(options.device, shape, tier.get()));
  }
  SLUICE_ASSIGN_OR_RETURN(parts.counters,
                          SelectionCounters::Create(options.device, options.slots, layout));
  if (options.fluxion.division != PolicyOptions::Fluxion::Division::kEachList) {
    SLUICE_ASSIGN_OR_RETURN(parts.list_shares, ListShares::Create(options, shape));
  }
  SLUICE_ASSIGN_OR_RETURN(parts.workers, NewWorkers(options, shape, parts.host_scores.get()));
  SLUICE_ASSIGN_OR_RETURN(Scratch scratch, MakeScratch(options, shape));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  return std::make_unique<FluxionPolicy>(options, shape, std::move(tier), std::move(written),
                                         std::move(scratch), std::move(parts));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewFluxionPolicy(const PolicyOptions& options) {
  return FluxionPolicy::Create(options);
}

}  // namespace sluice
