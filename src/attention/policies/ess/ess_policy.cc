#include "src/attention/policies/ess/ess_policy.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/policies/ess/draft_rows.h"
#include "src/attention/policies/ess/ess_mover.h"
#include "src/attention/policies/ess/ess_options.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policies/ess/overlap_plan.h"
#include "src/attention/policies/ess/prompt_rows.h"
#include "src/attention/policies/ess/row_copies.h"
#include "src/attention/policies/ess/selection_sampler.h"
#include "src/attention/policies/ess/step_operators.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// Layers whose new entries are written to their homes together. This takes fewer launches, and most
// of them run beneath the layers that follow.
constexpr int kWriteLayers = 8;
// Steps from one reading of the counters to the next. Each copies 40 bytes for every layer and
// slot.
constexpr int kLookSteps = 32;
// The first readings come sooner: before the plan has some, nothing is known of the misses.
constexpr int kFirstLookSteps = 8;

class EssPolicy : public AttentionPolicy, public LatentAttention {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionPolicy>> Create(const PolicyOptions& options);

  const std::string& name() const override { return options_.name; }
  KvAttention* kv_attention() override { return nullptr; }
  LatentAttention* latent_attention() override { return this; }
  // Every entry that the indexer selects is attended to, wherever it lies.
  int64_t exact_tokens() const override { return options_.max_context; }
  Footprint FootprintOf(int64_t context, int64_t total) const override {
    return tier_->FootprintOf(context, total);
  }
  int64_t max_tokens() const override { return tier_->max_tokens(); }
  Headroom HeadroomNow() const override { return tier_->HeadroomNow(); }
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    SLUICE_CHECK(promise == Promise::kFirm, "nothing is preempted");
    if (!tier_->Admit(slot, context, total, home)) return false;
    SLUICE_CHECK(!never_misses_ || tier_->HoldsWhole(slot), "no transfer would be launched for it");
    if (mover_workers() != nullptr) mover_workers()->Join(slot);
    // Where every token has a place, all entries are fetched at the prompt's end.
    prompt_rows_.Join(slot, warms_ && !tier_->shape().HoldsWhole(total));
    if (draft_rows_ != nullptr) draft_rows_->Join(slot, !warms_ || !tier_->HoldsWhole(slot));
    fetch_lost_[static_cast<size_t>(slot)] = false;
    return true;
  }
  bool Warm(int slot) override { return tier_->Warm(slot); }
  Event& WarmEvent(int slot) override { return tier_->WarmEvent(slot); }
  bool Grow(int slot, int64_t tokens) override {
    tier_->Grow(slot, tokens);
    return true;
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override;
  void Release(int slot) override { tier_->Release(slot); }
  bool MakeFirm(int /*slot*/) override { return true; }
  // The index keys leave DRAM once they are in HBM, and would have to stay if they were shared.
  bool shares_host_caches() const override { return false; }
  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix /*prefix*/) override {
    return tier_->ReserveHostCopy(slot, tokens);
  }
  const SequenceCache* HostCache(int slot) const override { return tier_->HostCache(slot); }
  void Evict(int slot, int64_t tokens) override { tier_->Evict(slot, tokens); }
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override {
    return tier_->DetachHostCache(slot);
  }

  int decode_rows_per_sequence() const override { return options_.rows_per_sequence; }
  bool NeedsEndPrompt() const override { return true; }
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override {
    prompt_rows_.Begin(slot, tokens, cached);
  }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  absl::Status SlotHealth(int slot) const override;
  int last_rows_wanted(int64_t total) const override {
    const bool wanted = options_.recompute_last != PolicyOptions::RecomputeLast::kOff;
    return wanted && warms_ && !tier_->shape().HoldsWhole(total) ? PromptRows::kReplayed : 0;
  }
  int64_t hint_tokens() const override {
    const int64_t places = tier_->shape().most_places() - 1;
    return options_.ess.warm_up ? std::min(places, PoolWarmer::kMostEntries) : 0;
  }
  PolicyStatistics Statistics() const override { return operators_.counters().Sum(); }
  PolicyStatistics Recent() const override {
    absl::MutexLock lock(&recent_mutex_);
    return recent_;
  }
  bool WantsRecording(int32_t decode_rows) override;
  WorkerStatistics Workers() const override {
    return mover_workers() == nullptr ? WorkerStatistics{} : mover_workers()->Statistics();
  }
  ScheduleStatistics Schedules() const override { return plan_.statistics(); }
  LinkStatistics Link() const override { return mover_.link; }
  std::string DescribeSteps(int32_t decode_rows) override {
    return LayersBySchedule(plan_.Of(decode_rows));
  }
  int64_t MetadataBytes(int64_t tokens) const override {  // Index keys.
    return tokens * tier_->layout().kinds[kIndexKind].bytes_per_token;
  }

  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override;
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override {
    params.cache = tier_->Index(layer);
    if (prompt_rows_.appending() != nullptr) params.slots = prompt_rows_.appending();
    kernels().IndexAppend(stream, params);
  }
  void AttendLatent(Stream& stream, int layer, const Params& params) override;
  void EndStep(Stream& stream) override {
    for (int i = 0; i < Stream::kBranches; ++i) stream.After(stream.Branch(i));
  }

 private:
  // The objects that a policy is made of.
  struct Parts {
    std::unique_ptr<EssTier> tier;
    std::unique_ptr<IndexSelection> selection;
    std::unique_ptr<DraftRows> draft_rows;  // Null: no row is taken back, or nothing stays.
    std::unique_ptr<RowCopies> row_copies;  // Null: `mover` is used.
    ChosenMover mover;
    std::unique_ptr<SelectionSampler> sampler;  // Null: nobody asks what would be missed.
  };

  EssPolicy(const PolicyOptions& options, Parts parts, PromptRows prompt_rows,
            StepOperators operators)
      : options_(options),
        warms_(options.ess.warm_up && options.ess.lru),
        tier_(std::move(parts.tier)),
        never_misses_(warms_ && tier_->shape().HoldsAllWhole()),
        selection_(std::move(parts.selection)),
        row_copies_(std::move(parts.row_copies)),
        mover_(std::move(parts.mover)),
        draft_rows_(std::move(parts.draft_rows)),
        prompt_rows_(std::move(prompt_rows)),
        operators_(std::move(operators)),
        plan_(OverlapOptionsOf(options_, tier_->shape(), DecodeRows(options_))),
        fetch_lost_(static_cast<size_t>(options.slots), false),
        sampler_(std::move(parts.sampler)) {
    looked_.layers.resize(static_cast<size_t>(layers()));
    absl::MutexLock lock(&recent_mutex_);
    recent_ = looked_;
  }

  static int DecodeRows(const PolicyOptions& options) {
    const int rows = options.slots * options.rows_per_sequence;
    return std::max(rows, options.device->RowBucket(rows));
  }

  // Branches of a step's stream: one for what is fetched for the first half of a batch, one for
  // what is computed meanwhile, and one for what nobody waits for before the step's end. Branch 0
  // is the model's.
  static Stream& FetchBranch(Stream& stream) { return stream.Branch(1); }
  static Stream& WorkBranch(Stream& stream) { return stream.Branch(2); }
  static Stream& SettlingBranch(Stream& stream) { return stream.Branch(3); }

  KernelSet& kernels() const { return options_.device->kernels(); }
  bool generates(int32_t slot) const { return prompt_rows_.generate()[static_cast<size_t>(slot)]; }
  int layers() const { return tier_->layout().layers; }
  // Reads the counters every few steps, for the plan and for Recent.
  void PollCounters(Stream& stream, absl::Span<const int32_t> slots,
                    absl::Span<const int32_t> positions);
  bool skips() const {
    const bool* const skip = options_.ess.probe.skip_transfers;
    return skip != nullptr && *skip;
  }
  SlotWorkers* mover_workers() const { return mover_.mover->workers(); }
  // Enqueues the fetch of what the decode rows [first, first + rows) miss. Returns whether the last
  // operator of the stream is now one that SparseMlaParams::then_arrives waits for.
  bool FetchMisses(Stream& stream, int layer, const Params& a, int32_t first, int32_t rows) const;
  // The same by Transfer, for any lists.
  bool Fetch(Stream& stream, const kernels::TransferParams& move) const;
  void AttendDecode(Stream& stream, int layer, const Params& a);
  void AttendPrompt(Stream& stream, int layer, const Params& a);

  const PolicyOptions options_;
  const bool warms_;  // Pools begin with what is known of them, and keep what is used.
  const std::unique_ptr<EssTier> tier_;
  const bool never_misses_;  // The pools hold every sequence whole, whatever comes.
  const std::unique_ptr<IndexSelection> selection_;
  const std::unique_ptr<RowCopies> row_copies_;  // Null: `mover_` is used.
  const ChosenMover mover_;
  const std::unique_ptr<DraftRows> draft_rows_;  // Null: no row is taken back, or nothing stays.
  // The layer's append of decode rows whose places are given in the layer itself.
  std::optional<kernels::LatentAppendParams> append_later_;
  PromptRows prompt_rows_;
  const StepOperators operators_;
  OverlapPlan plan_;
  PolicyStatistics looked_;  // Counters at the newest reading; engine's thread.
  int steps_to_look_ = 0;
  int64_t looks_ = 0;
  mutable absl::Mutex recent_mutex_;
  PolicyStatistics recent_ ABSL_GUARDED_BY(recent_mutex_);
  std::vector<bool> fetch_lost_;  // Indexed by slot: a step of the slot's sequence lost a transfer.
  const std::unique_ptr<SelectionSampler> sampler_;  // Null: nobody asks what would be missed.
  std::set<int32_t> sampled_;  // Numbers of decode rows whose steps were enqueued with its copies.
};

void EssPolicy::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                          absl::Span<const int32_t> positions) {
  tier_->BeginStep(stream, slots, positions, prompt_rows_.generate());
  PollCounters(stream, slots, positions);
  if (sampler_ != nullptr) {
    const bool decodes = !slots.empty() && slots[0] >= 0 && generates(slots[0]);
    sampler_->BeginStep(stream, decodes ? slots[0] : -1, decodes ? positions[0] : 0);
  }
  for (const int32_t slot : slots) {
    if (slot < 0 || !generates(slot)) continue;
    if (SLUICE_FAILPOINT(kAttentionGather)) fetch_lost_[static_cast<size_t>(slot)] = true;
    break;
  }
  prompt_rows_.BeginStep(slots, positions);
  if (draft_rows_ != nullptr) {
    draft_rows_->BeginStep(stream, slots, positions, prompt_rows_.generate());
  }
}

absl::Status EssPolicy::SlotHealth(int slot) const {
  if (fetch_lost_[static_cast<size_t>(slot)]) {
    return WithReason(
        absl::InternalError("entries that a step fetched did not reach HBM (failpoint "
                            "attention.gather); send the request again"),
        reasons::kTransferFailed);
  }
  if (mover_workers() != nullptr && mover_workers()->Failed(slot)) {
    return WithReason(absl::InternalError(absl::StrCat(
                          "entries that a step fetched did not reach HBM: ",
                          mover_workers()->Health(slot).message(), "; send the request again")),
                      reasons::kTransferFailed);
  }
  return tier_->Health(slot);
}

void EssPolicy::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  // The pool then holds what the prompt's own last rows selected, and the next token has its place.
  // Hints that came know more than a few rows do.
  const int64_t replayed = prompt_rows_.End(slot, tokens);
  if (replayed > 0 && (replayed >= PromptRows::kReplayed || hints.empty())) return;
  tier_->WarmUp(slot, tokens, std::move(hints), warms_);
}

void EssPolicy::AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                             int32_t first_row) {
  const int32_t decode = params.decode_rows;
  kernels::LatentAppendParams prompt = params;
  if (decode > 0) {
    SLUICE_CHECK(decode <= DecodeRows(options_), "a step has no more decode rows");
    params.rows = decode;
    if (options_.ess.lru) {
      params.cache = tier_->Pool(layer);
      params.place_of = tier_->Residency(layer).place_of;
      params.written = operators_.written(layer) + first_row * tier_->latent().bytes_per_token;
    } else {  // The new entry is fetched from the home with all the others.
      params.cache = tier_->Home(layer);
    }
    // A sequence's first row has its place from the step before. Those behind get theirs when the
    // rows before them are looked at.
    if (draft_rows_ != nullptr) {
      append_later_ = params;
    } else {
      kernels().LatentAppend(stream, params);
    }
  }
  if (prompt.rows == decode) return;
  SLUICE_CHECK(first_row == 0, "a step with rows of prompts comes whole");
  prompt.cache = tier_->Home(layer);
  prompt.kv += decode * prompt.kv_stride;
  prompt.cos_sin += int64_t{decode} * prompt.cache.rope;
  prompt.slots =
      (prompt_rows_.appending() != nullptr ? prompt_rows_.appending() : prompt.slots) + decode;
  prompt.positions += decode;
  prompt.rows -= decode;
  prompt.decode_rows = 0;
  kernels().LatentAppend(stream, prompt);
}

void EssPolicy::PollCounters(Stream& stream, absl::Span<const int32_t> slots,
                             absl::Span<const int32_t> positions) {
  int64_t rows = 0, tokens = 0;
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < 0 || !generates(slots[r])) continue;
    ++rows;
    tokens += positions[r] + 1;
  }
  if (rows == 0) return;
  if (operators_.counters().Take(&looked_)) {
    if (plan_.adapts()) {
      plan_.Observe(looked_, static_cast<double>(tokens) / static_cast<double>(rows));
    }
    absl::MutexLock lock(&recent_mutex_);
    recent_ = looked_;
  }
  if (--steps_to_look_ > 0) return;
  steps_to_look_ = looks_++ <= OverlapPlan::kSettleLooks ? kFirstLookSteps : kLookSteps;
  operators_.counters().PollCounters(stream);
}

bool EssPolicy::WantsRecording(int32_t decode_rows) {
  const bool changed = plan_.Change(decode_rows);
  if (changed) {
    Log(LogLevel::kInfo, "policy ess: steps have new overlap schedules from now on",
        {{"decode_rows", decode_rows}, {"layers", LayersBySchedule(plan_.Of(decode_rows))}});
  }
  // The sampler's copies leave the steps once it has seen enough.
  const bool sampled =
      sampler_ != nullptr && !sampler_->active() && sampled_.erase(decode_rows) > 0;
  return changed || sampled;
}

bool EssPolicy::FetchMisses(Stream& stream, int layer, const Params& a, int32_t first,
                            int32_t rows) const {
  if (never_misses_) return false;
  const kernels::TransferParams move = operators_.Fetch(layer, first, rows);
  if (mover_workers() == nullptr || row_copies_ != nullptr || skips()) return Fetch(stream, move);
  // The halves' transfers may be under way at once.
  mover_.mover->Move(stream, first > 0 ? 1 : 0,
                     {a.slots + first, move.source_units, move.target_units, move.counts, rows});
  return true;
}

bool EssPolicy::Fetch(Stream& stream, const kernels::TransferParams& move) const {
  if (skips()) return false;
  if (row_copies_ != nullptr) {
    row_copies_->Enqueue(stream, move);
    return false;
  }
  kernels().Transfer(stream, move);
  return true;
}

void EssPolicy::AttendDecode(Stream& stream, int layer, const Params& a) {
  const int32_t rows = a.decode_rows, first_row = a.first_row, end = first_row + rows;
  const Overlap overlap = plan_.Of(a.part() ? a.step_rows : rows)[static_cast<size_t>(layer)];
  // Every schedule enqueues the same operators on the same lists, so that results are the same to
  // the bit. PreAttn is on a branch. Top-k and UpdateResidency are in the trunk, each right behind
  // the one before: blocks of a product that waited on every processor would keep them off.
  Stream& work = overlap == Overlap::kNone ? stream : WorkBranch(stream);
  Stream& early = overlap == Overlap::kDba ? FetchBranch(stream) : stream;
  const bool prefetches = !never_misses_ && plan_.Prefetches(layer);
  // The transfer of the layer before may still be under way.
  const int32_t prefetch_workers = !never_misses_ && layer > 0 && plan_.Prefetches(layer - 1)
                                       ? StepOperators::kPrefetchWorkers
                                       : 0;
  using Stage = EssProbe::Stage;
  const auto& on_stage = options_.ess.probe.on_stage;
  const auto done = [&](Stage stage) {
    if (on_stage != nullptr) on_stage(stream, layer, rows, stage);
  };
  const auto select = [&](int32_t first, int32_t count) {
    selection_->Select(
        stream, layer, tier_->Index(layer), a, first, count,
        [&] {
          if (first + count == end) work.After(stream);
        },
        // Beside it run the first half's transfer, and the next step's of the layer before.
        (first > first_row ? options_.ess.transfer_workers : 0) + prefetch_workers, prefetches);
    if (first == 0 && sampler_ != nullptr && sampler_->active()) {
      sampler_->Sample(stream, layer, selection_->lists());
      sampled_.insert(rows);
    }
    done(Stage::kSelected);
    kernels::UpdateResidencyParams update =
        operators_.UpdateResidency(layer, a, first, first, count);
    if (draft_rows_ != nullptr) update.journal = draft_rows_->Journal(layer);
    kernels().UpdateResidency(stream, update);
    done(Stage::kResidencyUpdated);
  };
  done(Stage::kBegin);
  // Rows that are updated in turn may be divided anywhere. A sequence's rows that are updated
  // together may not, and how a step's rows are divided among sequences is not known here.
  const bool divides = options_.ess.lru || options_.rows_per_sequence == 1;
  // A part of a step is not divided again.
  const int32_t half = overlap == Overlap::kDba && divides && !a.part() ? rows / 2 : 0;
  if (half > 0) {
    select(0, half);
    early.After(stream);
    FetchMisses(early, layer, a, 0, half);
  }
  select(first_row + half, rows - half);
  if (append_later_.has_value()) kernels().LatentAppend(stream, *append_later_);
  append_later_.reset();
  if (overlap != Overlap::kNone) {
    // Attention begins with the transfer that is right before it, so everything else that it needs
    // is enqueued before that transfer.
    a.make_queries(work);
    stream.After(work);
  }
  const bool fetches = FetchMisses(stream, layer, a, first_row + half, rows - half);
  if (half > 0) stream.After(early);  // This too waits for a transfer, which has begun by then.
  done(Stage::kFetched);
  if (overlap == Overlap::kNone) a.make_queries(work);
  done(Stage::kPrepared);

  kernels::SparseMlaParams attend = operators_.AttendPool(layer, a);
  if (overlap != Overlap::kNone && fetches) {
    attend.then_arrives = true;
    attend.spare_processors = options_.ess.transfer_workers * (half > 0 ? 2 : 1);
  }
  attend.spare_processors += prefetch_workers;
  kernels().SparseMla(stream, attend);  // Attn0 and Attn1
  done(Stage::kAttended);

  if (prefetches) {
    // This follows attention, so that a place may be taken whose entry attention reads. Nobody
    // waits for it before the step's end.
    Stream& settling = SettlingBranch(stream);
    settling.After(stream);
    kernels().UpdateResidency(settling, operators_.UpdateRunnersUp(layer, a));
    Fetch(settling, operators_.FetchRunnersUp(layer, first_row, rows));
  }
  if (!a.last_part()) return;
  if (!options_.ess.lru || ((layer + 1) % kWriteLayers != 0 && layer + 1 != layers())) return;
  Stream& settling = SettlingBranch(stream);
  settling.After(stream);
  tier_->WriteThrough(settling, operators_.written(0), layer / kWriteLayers * kWriteLayers,
                      layer + 1);
}

// Rows of prompts attend to the home: their sequence has no working set yet.
void EssPolicy::AttendPrompt(Stream& stream, int layer, const Params& a) {
  selection_->Select(stream, layer, tier_->Index(layer), a, a.decode_rows, a.rows - a.decode_rows);
  kernels().SparseMla(stream, operators_.AttendHome(layer, a));
  // LRU warm-up by what was computed here: one row after the other, the oldest first. It uses the
  // lists of the first decode row, which is done with them.
  for (const PromptRows::Replay& replay : prompt_rows_.replays()) {
    kernels::UpdateResidencyParams update = operators_.UpdateResidency(layer, a, replay.row, 0, 1);
    update.counters = nullptr;
    update.ahead = replay.last ? 1 : 0;
    kernels().UpdateResidency(stream, update);
    if (!never_misses_) Fetch(stream, operators_.Fetch(layer, 0, 1));
  }
}

void EssPolicy::AttendLatent(Stream& stream, int layer, const Params& a) {
  SLUICE_CHECK(a.index_q != nullptr && a.heads == options_.heads, "the model is the policy's");
  if (a.decode_rows > 0) {
    AttendDecode(stream, layer, a);
  } else {
    a.make_queries(stream);
  }
  if (a.rows == a.decode_rows) return;
  SLUICE_CHECK(!a.part(), "a step with rows of prompts comes whole");
  AttendPrompt(stream, layer, a);
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> EssPolicy::Create(const PolicyOptions& given) {
  SLUICE_RETURN_IF_ERROR(CheckEssOptions(given));
  PolicyOptions options = given;
  if (options.name == "offload-naive") {
    options.ess.warm_up = options.ess.lru = false;
    options.ess.overlap = PolicyOptions::Ess::Overlap::kNone;
  }
  EssTier::Options tier_options;
  tier_options.device = options.device;
  tier_options.hbm = options.hbm;
  tier_options.dram = options.dram;
  tier_options.slots = options.slots;
  tier_options.decode_rows = DecodeRows(options);
  tier_options.latent_rank = options.latent_rank;
  const CacheLayout& layout = options.hbm->layout();
  tier_options.shape = EssShapeOf(options, layout.layers, layout.kinds[kLatentKind].block_tokens,
                                  options.hbm->Capacity()[kLatentKind]);
  Parts parts;
  SLUICE_ASSIGN_OR_RETURN(parts.tier, EssTier::Create(tier_options));
  SLUICE_RETURN_IF_ERROR(CheckEssHeadroom(options, *parts.tier));
  IndexSelection::Options selection_options;
  selection_options.device = options.device;
  selection_options.max_rows = std::max(options.max_rows, DecodeRows(options));
  selection_options.decode_rows = DecodeRows(options);
  selection_options.top_k = options.index_top_k;
  selection_options.max_context = options.max_context;
  selection_options.runners_up = options.ess.prefetch;
  selection_options.layers = layout.layers;
  selection_options.sequence_rows = options.rows_per_sequence;
  SLUICE_ASSIGN_OR_RETURN(parts.selection, IndexSelection::Create(selection_options));
  parts.selection->Observe(options.ess.probe.on_selection);
  if (options.ess.probe.row_copies) {
    SLUICE_ASSIGN_OR_RETURN(parts.row_copies, RowCopies::Create(options.device, DecodeRows(options),
                                                                options.index_top_k));
  }
  if (options.rows_per_sequence > 1 && options.ess.lru) {
    SLUICE_ASSIGN_OR_RETURN(parts.draft_rows,
                            DraftRows::Create({options.device, parts.tier.get(), options.slots,
                                               options.rows_per_sequence, options.index_top_k}));
  }
  SLUICE_ASSIGN_OR_RETURN(parts.mover, ChooseEssMover(options, *parts.tier, DecodeRows(options)));
  // Where every sequence has a place for each token, no size of pool misses anything.
  if (options.ess.on_misses != nullptr && options.ess.lru && options.rows_per_sequence == 1 &&
      !parts.tier->shape().HoldsAllWhole()) {
    SLUICE_ASSIGN_OR_RETURN(
        parts.sampler, SelectionSampler::Create(options.device, layout.layers, options.index_top_k,
                                                options.ess.on_misses));
  }
  SLUICE_ASSIGN_OR_RETURN(
      PromptRows prompt_rows,
      PromptRows::Create(options.device, options.slots,
                         std::max<int64_t>(options.max_rows, DecodeRows(options))));
  SLUICE_ASSIGN_OR_RETURN(
      StepOperators operators,
      StepOperators::Create(options, DecodeRows(options), parts.tier.get(), parts.selection.get()));
  return std::unique_ptr<AttentionPolicy>(
      new EssPolicy(options, std::move(parts), std::move(prompt_rows), std::move(operators)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewEssPolicy(const PolicyOptions& options) {
  return EssPolicy::Create(options);
}

}  // namespace sluice
