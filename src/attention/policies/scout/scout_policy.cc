#include "src/attention/policies/scout/scout_policy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/selection_counters.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// The first block, and the newest: always attended to.
constexpr int32_t kFirstBlocks = 1;
constexpr int32_t kLastBlocks = 1;

// A recall has a whole step for its way; it leaves the processors to the model (TransferParams).
constexpr int32_t kRecallWorkers = 4;

// Blocks of the ring: the newest, and the one before, for which a recall may then take a step.
constexpr int32_t kRingBlocks = 2;

constexpr size_t kDigests = 0;  // of the tier's arrays

// What decides every size. A list is of one (row, KV head).
struct Shape {
  int32_t layers = 0;
  int32_t dense_layers = 0;
  int32_t slots = 0;
  int32_t rows = 0;  // decode rows of a step at most, padded ones included
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
  int32_t budget_blocks = 0;    // selected of a list
  int32_t recall_blocks = 0;    // places beside the ring
  int32_t resident_blocks = 0;  // attended to on the device of a list
  int32_t most_blocks = 0;      // of the longest sequence
  int64_t lists() const { return int64_t{rows} * kv_heads; }
};

// What Ahead leaves for AttendSparse of the same layer. Two layers are under way at once.
struct Choice {
  Buffer resident, places, resident_counts, due;
};

struct Scratch {
  Buffer scores;                         // float [lists][most_blocks]
  Buffer selected, selected_counts;      // int32 [lists][budget_blocks], [lists]
  std::array<Choice, 2> choices;         // by a layer's parity
  Buffer since;                          // int32 [layers][slots] steps since the last recall
  Buffer first_since;                    // int32 [layers], pinned: what that begins with
  Buffer sources, targets, move_counts;  // int32 [lists][budget_blocks] twice, [lists]
  Buffer o;                              // float [2][rows][heads][head_dim]
  Buffer lse;  // float [layers][2][rows][heads]: what a layer was made of can be read afterwards
};

// Steps from one recall of a layer to the next; 0: the controller decides.
int32_t IntervalOf(const PolicyOptions::Scout& scout, int layer) {
  if (!scout.recall) return std::numeric_limits<int32_t>::max();
  return scout.intervals.empty() ? 0 : scout.intervals[static_cast<size_t>(layer)];
}

class ScoutPolicyImpl : public ScoutPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<ScoutPolicy>> Create(const PolicyOptions& options);
  ScoutPolicyImpl(const PolicyOptions& options, const Shape& shape,
                  std::unique_ptr<OffloadTier> tier, Buffer written, Scratch scratch,
                  std::unique_ptr<SelectionCounters> counters, std::unique_ptr<CoAttention> workers)
      : ScoutPolicy(options, std::move(tier), std::move(written)),
        shape_(shape),
        scratch_(std::move(scratch)),
        counters_(std::move(counters)),
        workers_(std::move(workers)) {}

  absl::Status SlotHealth(int slot) const override { return workers_->Health(slot); }
  PolicyStatistics Statistics() const override { return counters_->Sum(); }
  const float* parts_lse(int layer) const override { return lse(layer); }

  bool LooksAhead(int layer) const override {
    return options().scout.layer_ahead && !tier().dense(layer);
  }

  // Algorithm 1, lines 5 to 7, of layer i + 1; the model has made the queries of line 4.
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    Select(stream, layer, predicted);
    workers_->Start(stream, layer, predicted, tier().Home(layer));
  }

 protected:
  // Algorithm 1, lines 9 to 13, then section 3.4.
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    ExtendDigests(stream, layer, queries);
    // Without looking ahead everything is of the real queries, and the CPU begins only now.
    if (!LooksAhead(layer)) {
      Select(stream, layer, queries);
      workers_->Start(stream, layer, queries, tier().Home(layer));
    }
    AttendResident(stream, layer, queries);
    const int64_t values = int64_t{queries.rows} * queries.heads;
    workers_->Finish(stream, layer, queries.rows, scratch_.o.as<float>() + values * shape_.head_dim,
                     lse(layer) + values);
    Merge(stream, layer, queries, out, out_type);
    Recall(stream, layer, queries);
  }

  // The first places hold what is new, not what is important: whatever the interval, the first
  // recall is in the first step. The controller finds that step's share too large by itself.
  void BuildArrays(Stream& stream, int slot, int64_t /*tokens*/,
                   const OffloadTier::BulkRow& row) override {
    for (int layer = tier().options().dense_layers; layer < shape_.layers; ++layer) {
      kernels::DigestParams digest{};
      digest.cache = tier().Home(layer);
      digest.digests = tier().Array(layer, kDigests);
      digest.slots = row.slots;
      digest.first_positions = row.first_positions;
      digest.positions = row.positions;
      digest.rows = 1;
      kernels().Digest(stream, digest);
      stream.Copy(since(layer) + slot, scratch_.first_since.as<int32_t>() + layer, sizeof(int32_t));
    }
  }

  void Joined(int slot) override { workers_->Join(slot); }

 private:
  int32_t* since(int layer) const {
    return scratch_.since.as<int32_t>() + int64_t{layer} * options().slots;
  }
  float* lse(int layer) const {
    return scratch_.lse.as<float>() + layer * 2 * int64_t{shape_.rows} * shape_.heads;
  }
  const Choice& choice(int layer) const {
    return scratch_.choices[static_cast<size_t>(layer) % scratch_.choices.size()];
  }
  kernels::UnitLists Selected() const {
    return {scratch_.selected.as<int32_t>(), scratch_.selected_counts.as<int32_t>(),
            shape_.budget_blocks};
  }
  kernels::UnitLists Resident(int layer) const {
    return {choice(layer).resident.as<int32_t>(), choice(layer).resident_counts.as<int32_t>(),
            shape_.resident_blocks};
  }

  // The newest block's digest, with the row's own token.
  void ExtendDigests(Stream& stream, int layer, const Queries& queries) {
    kernels::DigestParams digest{};
    digest.cache = tier().Ring(layer);
    digest.digests = tier().Array(layer, kDigests);
    digest.slots = queries.slots;
    digest.positions = queries.positions;
    digest.rows = queries.rows;
    kernels().Digest(stream, digest);
  }

  // Which blocks the rows attend to, and who attends to them: those without a place go straight
  // into the workers' lists. A layer ahead the newest block's digest does not know the row's own
  // token yet, so that block is selected without one.
  void Select(Stream& stream, int layer, const Queries& queries) {
    kernels::DigestScoresParams scores{};
    scores.q = queries.q;
    scores.q_stride = queries.stride;
    scores.slots = queries.slots;
    scores.positions = queries.positions;
    scores.digests = tier().Array(layer, kDigests);
    scores.scores = scratch_.scores.as<float>();
    scores.score_stride = shape_.most_blocks;
    scores.rows = queries.rows;
    scores.heads = queries.heads;
    scores.block_tokens = shape_.block_tokens;
    scores.scale = queries.scale;
    scores.reduction = options().reduction;
    kernels().DigestScores(stream, scores);

    kernels::TopKParams top{};
    top.scores = scores.scores;
    top.score_stride = scores.score_stride;
    top.slots = queries.slots;
    top.positions = queries.positions;
    top.selected = Selected();
    top.rows = queries.rows;
    top.kv_heads = shape_.kv_heads;
    top.unit_tokens = shape_.block_tokens;
    top.k = shape_.budget_blocks;
    top.first_units = kFirstBlocks;
    top.last_units = kLastBlocks;
    top.margin = std::numeric_limits<float>::infinity();
    kernels().TopK(stream, top);

    kernels::SplitParams split{};
    split.residency = tier().Residency(layer);
    split.slots = queries.slots;
    split.positions = queries.positions;
    split.selected = top.selected;
    split.resident = Resident(layer);
    split.places = choice(layer).places.as<int32_t>();
    split.missing = workers_->lists(layer);
    split.rows = queries.rows;
    split.kv_heads = shape_.kv_heads;
    split.unit_tokens = shape_.block_tokens;
    split.whole = options().scout.attend_whole;
    kernels().Split(stream, split);

    kernels::RecallDueParams due{};
    due.slots = queries.slots;
    due.selected = split.selected;
    due.missing = split.missing;
    due.since = since(layer);
    due.counters = counters_->of(layer);
    due.due = choice(layer).due.as<int32_t>();
    due.rows = queries.rows;
    due.kv_heads = shape_.kv_heads;
    due.unit_tokens = shape_.block_tokens;
    due.budget_units = shape_.budget_blocks;
    due.interval = IntervalOf(options().scout, layer);
    due.share_limit = options().scout.share_limit;
    kernels().RecallDue(stream, due);
  }

  void AttendResident(Stream& stream, int layer, const Queries& queries) {
    kernels::SparseAttentionParams attention{};
    attention.q = queries.q;
    attention.q_stride = queries.stride;
    attention.slots = queries.slots;
    attention.positions = queries.positions;
    attention.cache = tier().Places(layer);
    attention.units = choice(layer).resident.as<int32_t>();
    attention.places = choice(layer).places.as<int32_t>();
    attention.counts = choice(layer).resident_counts.as<int32_t>();
    attention.o = scratch_.o.as<float>();
    attention.lse = lse(layer);
    attention.capacity = shape_.resident_blocks;
    attention.unit_tokens = shape_.block_tokens;
    attention.rows = queries.rows;
    attention.heads = queries.heads;
    attention.kv_head_begin = 0;
    attention.kv_head_end = shape_.kv_heads;
    attention.scale = queries.scale;
    kernels().SparseAttention(stream, attention);
  }

  void Merge(Stream& stream, int layer, const Queries& queries, void* out,
             kernels::DType out_type) {
    kernels::MergeParams merge{};
    merge.o = scratch_.o.as<float>();
    merge.lse = lse(layer);
    merge.out = out;
    merge.parts = 2;
    merge.rows = queries.rows;
    merge.heads = queries.heads;
    merge.head_dim = shape_.head_dim;
    merge.out_type = out_type;
    kernels().Merge(stream, merge);
  }

  // What this step missed is brought in for the next one, where it is due. The tables say so at
  // once: who reads them next, this layer's Select of the next step, is behind the transfer on the
  // stream.
  void Recall(Stream& stream, int layer, const Queries& queries) {
    kernels::RecallParams recall{};
    recall.residency = tier().Residency(layer);
    recall.slots = queries.slots;
    recall.positions = queries.positions;
    recall.missing = workers_->lists(layer);
    recall.due = choice(layer).due.as<int32_t>();
    recall.home = tier().Home(layer);
    recall.resident = tier().Places(layer);
    recall.source_units = scratch_.sources.as<int32_t>();
    recall.target_units = scratch_.targets.as<int32_t>();
    recall.move_counts = scratch_.move_counts.as<int32_t>();
    recall.counters = counters_->of(layer);
    recall.rows = queries.rows;
    recall.kv_heads = shape_.kv_heads;
    recall.unit_tokens = shape_.block_tokens;
    kernels().Recall(stream, recall);

    kernels::TransferParams move{};
    move.source = recall.home.base;
    move.target = recall.resident.base;
    move.source_pitch = move.target_pitch = kv().block_bytes();
    move.unit_bytes = static_cast<int32_t>(kv().block_bytes());
    move.source_units = recall.source_units;
    move.target_units = recall.target_units;
    move.counts = recall.move_counts;
    move.lists = queries.rows * shape_.kv_heads;
    move.capacity = recall.missing.capacity;
    move.max_workers = kRecallWorkers;
    kernels().Transfer(stream, move);
  }

  const Shape shape_;
  const Scratch scratch_;
  const std::unique_ptr<SelectionCounters> counters_;
  const std::unique_ptr<CoAttention> workers_;
};

absl::Status CheckOptions(const PolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  const PolicyOptions::Scout& scout = options.scout;
  const int least = (kFirstBlocks + kLastBlocks) * layout.kinds[0].block_tokens;
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

Shape ShapeOf(const PolicyOptions& options, int rows) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kind = layout.kinds[0];
  Shape shape;
  shape.layers = layout.layers;
  shape.dense_layers = std::min(options.dense_layers, layout.layers);
  shape.slots = options.slots;
  shape.rows = rows;
  shape.heads = options.heads;
  shape.kv_heads = kind.heads;
  shape.head_dim =
      static_cast<int32_t>(kind.bytes_per_token / kind.parts / SizeOf(kind.element_type));
  shape.block_tokens = kind.block_tokens;
  shape.most_blocks = static_cast<int32_t>(kind.BlocksFor(options.max_context));
  shape.budget_blocks =
      std::max(std::min(options.budget_tokens / kind.block_tokens, shape.most_blocks),
               kFirstBlocks + kLastBlocks);
  // All that is selected has room, the newest being in the ring.
  shape.recall_blocks =
      options.scout.resident_tokens > 0
          ? std::min(static_cast<int32_t>(kind.BlocksFor(options.scout.resident_tokens)),
                     shape.most_blocks)
          : shape.budget_blocks - kLastBlocks;
  shape.resident_blocks =
      options.scout.attend_whole ? shape.recall_blocks + kRingBlocks : shape.budget_blocks;
  return shape;
}

absl::StatusOr<Scratch> MakeScratch(Device& device, const Shape& shape,
                                    const PolicyOptions::Scout& scout) {
  Scratch scratch;
  absl::Status status;
  const auto allocate = [&](Buffer* buffer, int64_t words) {
    if (!status.ok()) return;
    auto allocated = device.Allocate(MemoryKind::kDevice, static_cast<size_t>(words) * 4,
                                     "what a step of policy scout selects");
    status = allocated.status();
    if (status.ok()) *buffer = *std::move(allocated);
  };
  const int64_t lists = shape.lists();
  allocate(&scratch.scores, lists * shape.most_blocks);
  allocate(&scratch.selected, lists * shape.budget_blocks);
  allocate(&scratch.selected_counts, lists);
  for (Choice& choice : scratch.choices) {
    allocate(&choice.resident, lists * shape.resident_blocks);
    allocate(&choice.places, lists * shape.resident_blocks);
    allocate(&choice.resident_counts, lists);
    allocate(&choice.due, shape.rows);
  }
  allocate(&scratch.since, int64_t{shape.layers} * shape.slots);
  allocate(&scratch.sources, lists * shape.budget_blocks);
  allocate(&scratch.targets, lists * shape.budget_blocks);
  allocate(&scratch.move_counts, lists);
  const int64_t values = 2 * int64_t{shape.rows} * shape.heads;
  allocate(&scratch.o, values * shape.head_dim);
  allocate(&scratch.lse, shape.layers * values);
  SLUICE_RETURN_IF_ERROR(status);
  SLUICE_ASSIGN_OR_RETURN(
      scratch.first_since,
      device.Allocate(MemoryKind::kPinned, static_cast<size_t>(shape.layers) * sizeof(int32_t),
                      "the intervals of policy scout"));
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    scratch.first_since.as<int32_t>()[layer] = std::max(IntervalOf(scout, layer) - 1, 0);
  }
  return scratch;
}

absl::StatusOr<std::unique_ptr<ScoutPolicy>> ScoutPolicyImpl::Create(const PolicyOptions& options) {
  SLUICE_RETURN_IF_ERROR(CheckOptions(options));
  const Shape shape = ShapeOf(options, MaxDecodeRows(options));
  const CacheKind& kind = options.hbm->layout().kinds[0];

  OffloadTierOptions tier_options;
  tier_options.device = options.device;
  tier_options.hbm = options.hbm;
  tier_options.dram = options.dram;
  tier_options.slots = options.slots;
  tier_options.max_context = options.max_context;
  tier_options.dense_layers = shape.dense_layers;
  tier_options.ring_blocks = kRingBlocks;
  tier_options.recall_blocks = shape.recall_blocks;
  tier_options.unit_tokens = kind.block_tokens;
  tier_options.arrays = {{"digests", kind.block_tokens, 2 * shape.head_dim, kind.element_type}};
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
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<CoAttention> workers, CoAttention::Create(co_options));

  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<SelectionCounters> counters,
      SelectionCounters::Create(options.device, options.slots, options.hbm->layout()));
  SLUICE_ASSIGN_OR_RETURN(Scratch scratch, MakeScratch(*options.device, shape, options.scout));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  return std::make_unique<ScoutPolicyImpl>(options, shape, std::move(tier), std::move(written),
                                           std::move(scratch), std::move(counters),
                                           std::move(workers));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScoutPolicy>> NewScoutPolicy(const PolicyOptions& options) {
  return ScoutPolicyImpl::Create(options);
}

}  // namespace sluice
