#include "src/attention/policies/ess/ess_policy.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/offload/selection_counters.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policies/ess/overlap_plan.h"
#include "src/attention/policies/ess/row_copies.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

using kernels::DType;

// ESS, section 3.2: "the Top-2K Latent-Cache IDs selected within the last 32 windows".
constexpr int32_t kWarmRows = 32;
// Layers whose new entries go home together: fewer launches, and most of them beneath the layers
// that follow.
constexpr int kWriteLayers = 8;
// From one look at the misses to the next: a copy of 40 bytes a layer and slot each time.
constexpr int kLookSteps = 32;

class EssPolicy : public AttentionPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionPolicy>> Create(const PolicyOptions& options);

  const std::string& name() const override { return options_.name; }
  Footprint FootprintOf(int64_t context, int64_t total) const override {
    return tier_->FootprintOf(context, total);
  }
  int64_t max_tokens() const override { return tier_->max_tokens(); }
  Room RoomNow() const override { return tier_->RoomNow(); }
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    SLUICE_CHECK(promise == Promise::kFirm, "nothing is preempted");
    if (!tier_->Admit(slot, context, total, home)) return false;
    generates_[static_cast<size_t>(slot)] = false;
    fetch_lost_[static_cast<size_t>(slot)] = false;
    prompts_[static_cast<size_t>(slot)] = {};
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
  bool MakeWayOut(int slot, int64_t tokens) override { return tier_->MakeWayOut(slot, tokens); }
  void Evict(int slot, int64_t tokens) override { tier_->Evict(slot, tokens); }
  std::unique_ptr<SequenceCache> TakeHome(int slot) override { return tier_->TakeHome(slot); }

  int decode_rows_per_sequence() const override { return 1; }
  bool NeedsEndPrompt() const override { return true; }
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override {
    prompts_[static_cast<size_t>(slot)].tokens = tokens;
    prompts_[static_cast<size_t>(slot)].cached = cached;
  }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  absl::Status SlotHealth(int slot) const override;
  int last_rows_wanted(int64_t total) const override {
    const bool wanted = options_.recompute_last != PolicyOptions::RecomputeLast::kOff &&
                        !tier_->shape().HoldsWhole(total);
    return wanted && options_.ess.warm_up && options_.ess.lru ? kWarmRows : 0;
  }
  int64_t hint_tokens() const override {
    const int64_t places = tier_->shape().most_places() - 1;
    return options_.ess.warm_up ? std::min(places, PoolWarmer::kMostEntries) : 0;
  }
  PolicyStatistics Statistics() const override { return buffers_.counters->Sum(); }
  PolicyStatistics Recent() const override {
    absl::MutexLock lock(&recent_mutex_);
    return recent_;
  }
  bool WantsRecording(int32_t decode_rows) override;
  ScheduleStatistics Schedules() const override { return plan_.statistics(); }
  std::string DescribeSteps(int32_t decode_rows) override {
    return LayersBySchedule(plan_.Of(decode_rows));
  }
  int64_t MetadataBytes(int64_t tokens) const override {  // index keys
    return tokens * tier_->layout().kinds[kIndexKind].bytes_per_token;
  }

  bool attends_to_latents() const override { return true; }
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params) override;
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override {
    params.cache = tier_->Index(layer);
    if (appending_ != nullptr) params.slots = appending_;
    kernels().IndexAppend(stream, params);
  }
  void AttendLatent(Stream& stream, int layer, const LatentAttention& attention) override;
  void EndStep(Stream& stream) override {
    for (int i = 0; i < Stream::kBranches; ++i) stream.After(stream.Branch(i));
  }

  void Append(Stream& /*stream*/, int /*layer*/, kernels::RopeAppendParams /*params*/) override {
    SLUICE_CHECK(false, "policy ess attends to latents");
  }
  void Attend(Stream& /*stream*/, int /*layer*/, kernels::AttentionParams /*params*/) override {
    SLUICE_CHECK(false, "policy ess attends to latents");
  }

 private:
  // Of the decode rows of a step; lists are [decode_rows][top_k].
  struct Buffers {
    Buffer written;  // [layers][decode_rows] entries: a step's new ones, on their way home
    Buffer resident, arriving, sources, targets;           // int32 lists
    Buffer resident_counts, arriving_counts, move_counts;  // int32 [decode_rows]
    Buffer o, lse;  // float [decode_rows][heads][rank], [decode_rows][heads]: Attn0's
    Buffer scratch;
    // Pinned int32 [rows], in turn: at most one step is under way when the next begins.
    std::array<Buffer, 2> appending;
    std::unique_ptr<SelectionCounters> counters;
  };
  struct Prompt {
    int64_t tokens = 0;    // 0: not known
    int64_t cached = 0;    // rows of these are computed again, and append nothing
    int64_t replayed = 0;  // of its last rows: those whose selections its pool has seen
  };

  EssPolicy(const PolicyOptions& options, std::unique_ptr<EssTier> tier,
            std::unique_ptr<IndexSelection> selection, std::unique_ptr<RowCopies> row_copies,
            Buffers buffers)
      : options_(options),
        decode_rows_(DecodeRows(options)),
        tier_(std::move(tier)),
        selection_(std::move(selection)),
        row_copies_(std::move(row_copies)),
        buffers_(std::move(buffers)),
        plan_(PlanOptions()),
        generates_(static_cast<size_t>(options.slots), false),
        fetch_lost_(static_cast<size_t>(options.slots), false),
        prompts_(static_cast<size_t>(options.slots)) {
    looked_.layers.resize(static_cast<size_t>(layers()));
    absl::MutexLock lock(&recent_mutex_);
    recent_ = looked_;
  }

  static int DecodeRows(const PolicyOptions& options) {
    return std::max(options.slots, options.device->RowBucket(options.slots));
  }
  static absl::StatusOr<Buffers> NewBuffers(const PolicyOptions& options);

  // Branches of a step's stream: for what is fetched for the first half of a batch, for what is
  // computed meanwhile, and for what nobody waits for before the step's end. Branch 0 is the
  // model's.
  static Stream& FetchBranch(Stream& stream) { return stream.Branch(1); }
  static Stream& WorkBranch(Stream& stream) { return stream.Branch(2); }
  static Stream& SettlingBranch(Stream& stream) { return stream.Branch(3); }

  KernelSet& kernels() const { return options_.device->kernels(); }
  int64_t entry_bytes() const { return tier_->latent().bytes_per_token; }
  int layers() const { return tier_->layout().layers; }
  OverlapPlan::Options PlanOptions() const;
  // Looks at the counters from time to time, for the plan and for Recent.
  void Look(Stream& stream, absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // Gives places to what rows [row, row + rows) have selected; their lists are from `list` on.
  kernels::AdmitParams AdmitOf(int layer, const LatentAttention& a, int32_t row, int32_t list,
                               int32_t rows) const;
  const int32_t* AppendingSlots(absl::Span<const int32_t> slots,
                                absl::Span<const int32_t> positions);
  void Fetch(Stream& stream, int layer, int32_t first, int32_t rows) const;
  void AttendDecode(Stream& stream, int layer, const LatentAttention& a);
  void AttendPrompt(Stream& stream, int layer, const LatentAttention& a);
  // Attention of rows [first, first + rows) over lists of the cache's entries.
  kernels::SparseMlaParams Attention(const LatentAttention& a, int32_t first, int32_t rows) const;

  const PolicyOptions options_;
  const int32_t decode_rows_;
  const std::unique_ptr<EssTier> tier_;
  const std::unique_ptr<IndexSelection> selection_;
  const std::unique_ptr<RowCopies> row_copies_;  // null: Transfer
  const Buffers buffers_;
  OverlapPlan plan_;
  PolicyStatistics looked_;  // by the newest look; engine's thread
  int steps_to_look_ = 0;
  mutable absl::Mutex recent_mutex_;
  PolicyStatistics recent_ ABSL_GUARDED_BY(recent_mutex_);
  std::vector<bool> generates_;   // by slot: past its prompt, rows are decode rows
  std::vector<bool> fetch_lost_;  // by slot: of its sequence, in a step
  std::vector<Prompt> prompts_;   // by slot
  // Rows of the step that is being enqueued whose selections pools are to see. Behind a prompt's
  // last row the next token's place is made.
  struct Replay {
    int32_t row;
    bool last;
  };
  std::vector<Replay> replays_;
  // Slots of its rows, -1 of those that append nothing; null: all append.
  const int32_t* appending_ = nullptr;
  size_t next_appending_ = 0;
};

void EssPolicy::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                          absl::Span<const int32_t> positions) {
  tier_->BeginStep(stream, slots, positions, generates_);
  Look(stream, slots, positions);
  for (const int32_t slot : slots) {
    if (slot < 0 || !generates_[static_cast<size_t>(slot)]) continue;
    if (SLUICE_FAILPOINT(kAttentionGather)) fetch_lost_[static_cast<size_t>(slot)] = true;
    break;
  }
  // The last rows of prompts: which they are depends on the prompt alone, not on its chunks, so
  // that what a sequence finds in its pool does not depend on its neighbours.
  appending_ = AppendingSlots(slots, positions);
  replays_.clear();
  if (!options_.ess.warm_up || !options_.ess.lru) return;
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < 0 || generates_[static_cast<size_t>(slots[r])]) continue;
    if (tier_->HoldsWhole(slots[r])) continue;  // all of it comes at the prompt's end
    Prompt& prompt = prompts_[static_cast<size_t>(slots[r])];
    if (positions[r] < prompt.tokens - kWarmRows || positions[r] >= prompt.tokens) continue;
    replays_.push_back({static_cast<int32_t>(r), positions[r] + 1 == prompt.tokens});
    ++prompt.replayed;
  }
}

// What was handed over is better than what is computed of it again, from entries as they are
// stored.
const int32_t* EssPolicy::AppendingSlots(absl::Span<const int32_t> slots,
                                         absl::Span<const int32_t> positions) {
  const auto again = [&](size_t r) {
    if (slots[r] < 0) return false;
    const auto slot = static_cast<size_t>(slots[r]);
    return !generates_[slot] && positions[r] < prompts_[slot].cached;
  };
  size_t first = 0;
  while (first < slots.size() && !again(first)) ++first;
  if (first == slots.size()) return nullptr;
  const Buffer& rows = buffers_.appending[next_appending_];
  SLUICE_CHECK(slots.size() * sizeof(int32_t) <= rows.bytes(), "a step has as many rows");
  auto* const out = rows.as<int32_t>();
  next_appending_ = 1 - next_appending_;
  for (size_t r = 0; r < slots.size(); ++r) out[r] = again(r) ? -1 : slots[r];
  return out;
}

absl::Status EssPolicy::SlotHealth(int slot) const {
  if (fetch_lost_[static_cast<size_t>(slot)]) {
    return WithReason(
        absl::InternalError("entries that a step fetched did not reach HBM (failpoint "
                            "attention.gather); send the request again"),
        "TRANSFER_FAILED");
  }
  return tier_->Health(slot);
}

void EssPolicy::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  const auto s = static_cast<size_t>(slot);
  generates_[s] = true;
  // The pool is what its own last rows left there, and the next token has its place. Hints know
  // more than a few rows.
  const Prompt& prompt = prompts_[s];
  if (prompt.replayed > 0 && prompt.tokens == tokens &&
      (prompt.replayed >= kWarmRows || hints.empty())) {
    return;
  }
  tier_->WarmUp(slot, tokens, std::move(hints), options_.ess.warm_up && options_.ess.lru);
}

void EssPolicy::AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params) {
  const int32_t decode = params.decode_rows;
  kernels::LatentAppendParams prompt = params;
  if (decode > 0) {
    SLUICE_CHECK(decode <= decode_rows_, "one decode row of a sequence in a step");
    params.rows = decode;
    if (options_.ess.lru) {
      params.cache = tier_->Pool(layer);
      params.place_of = tier_->Residency(layer).place_of;
      params.written =
          buffers_.written.as<uint8_t>() + int64_t{layer} * decode_rows_ * entry_bytes();
    } else {  // fetched from there with all the others
      params.cache = tier_->Home(layer);
    }
    kernels().LatentAppend(stream, params);
  }
  if (prompt.rows == decode) return;
  prompt.cache = tier_->Home(layer);
  prompt.kv += decode * prompt.kv_stride;
  prompt.cos_sin += int64_t{decode} * prompt.cache.rope;
  prompt.slots = (appending_ != nullptr ? appending_ : prompt.slots) + decode;
  prompt.positions += decode;
  prompt.rows -= decode;
  prompt.decode_rows = 0;
  kernels().LatentAppend(stream, prompt);
}

OverlapPlan::Options EssPolicy::PlanOptions() const {
  const EssPoolShape& shape = tier_->shape();
  OverlapPlan::Options plan;
  plan.layers = layers();
  plan.max_rows = decode_rows_;
  plan.overlap = options_.ess.overlap;
  plan.profile = options_.ess.profile;
  plan.rates = plan.profile.rates;
  if (plan.rates.device != options_.device->name()) {  // none, or another device's
    plan.rates = AssumedRates(entry_bytes(), tier_->layout().kinds[kIndexKind].bytes_per_token);
  }
  constexpr double kProcessors = 132;  // of an H100 or H200
  if (options_.device->name() == "cuda") {
    plan.rates.spared_share = std::min(options_.ess.transfer_workers / kProcessors, 1.0);
  }
  plan.selected = static_cast<double>(options_.index_top_k);
  plan.context = options_.max_context;
  for (const MissProfile::Point& point : plan.profile.points) {  // no longer than was profiled
    const bool within = point.context <= options_.max_context;
    if (&point == plan.profile.points.data()) plan.context = 0;
    if (within) plan.context = std::max(plan.context, point.context);
  }
  if (plan.context == 0) plan.context = options_.max_context;
  const int64_t places = shape.PlacesOf(plan.context);
  plan.ratio = static_cast<double>(places) / static_cast<double>(plan.context);
  // Pools that begin cold, or that keep nothing, miss whatever their size.
  if (!options_.ess.lru || !options_.ess.warm_up) plan.ratio = std::min(plan.ratio, 0.999);
  return plan;
}

void EssPolicy::Look(Stream& stream, absl::Span<const int32_t> slots,
                     absl::Span<const int32_t> positions) {
  int64_t rows = 0, tokens = 0;
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < 0 || !generates_[static_cast<size_t>(slots[r])]) continue;
    ++rows;
    tokens += positions[r] + 1;
  }
  if (rows == 0) return;
  if (buffers_.counters->Take(&looked_)) {
    if (plan_.adapts()) {
      plan_.Observe(looked_, static_cast<double>(tokens) / static_cast<double>(rows));
    }
    absl::MutexLock lock(&recent_mutex_);
    recent_ = looked_;
  }
  if (--steps_to_look_ > 0) return;
  steps_to_look_ = kLookSteps;
  buffers_.counters->Look(stream);
}

bool EssPolicy::WantsRecording(int32_t decode_rows) {
  if (!plan_.Change(decode_rows)) return false;
  Log(LogLevel::kInfo, "policy ess: steps have other schedules from now on",
      {{"decode_rows", decode_rows}, {"layers", LayersBySchedule(plan_.Of(decode_rows))}});
  return true;
}

kernels::AdmitParams EssPolicy::AdmitOf(int layer, const LatentAttention& a, int32_t row,
                                        int32_t list, int32_t rows) const {
  const kernels::UnitLists selected = selection_->lists();
  const int64_t at = int64_t{list} * selected.capacity;
  kernels::AdmitParams admit{};
  admit.residency = tier_->Residency(layer);
  admit.slots = a.slots + row;
  admit.positions = a.positions + row;
  admit.selected = selected;
  admit.selected.units += int64_t{row} * selected.capacity;
  admit.selected.counts += row;
  admit.resident = buffers_.resident.as<int32_t>() + at;
  admit.resident_counts = buffers_.resident_counts.as<int32_t>() + list;
  admit.arriving = buffers_.arriving.as<int32_t>() + at;
  admit.arriving_counts = buffers_.arriving_counts.as<int32_t>() + list;
  admit.home = tier_->Home(layer);
  admit.pool = tier_->Pool(layer);
  admit.source_units = buffers_.sources.as<int32_t>() + at;
  admit.target_units = buffers_.targets.as<int32_t>() + at;
  admit.move_counts = buffers_.move_counts.as<int32_t>() + list;
  admit.move_capacity = selected.capacity;  // of one row, which a sequence has
  admit.counters = buffers_.counters->of(layer);
  admit.rows = rows;
  admit.ahead = 1;
  admit.forget = !options_.ess.lru;
  return admit;
}

void EssPolicy::Fetch(Stream& stream, int layer, int32_t first, int32_t rows) const {
  if (options_.ess.skip_transfers != nullptr && *options_.ess.skip_transfers) return;
  const int32_t capacity = selection_->lists().capacity;
  kernels::TransferParams move{};
  move.source = tier_->Home(layer).base;
  move.target = tier_->Pool(layer).base;
  move.source_pitch = move.target_pitch = entry_bytes();
  move.source_units = buffers_.sources.as<int32_t>() + int64_t{first} * capacity;
  move.target_units = buffers_.targets.as<int32_t>() + int64_t{first} * capacity;
  move.counts = buffers_.move_counts.as<int32_t>() + first;
  move.lists = rows;
  move.capacity = capacity;
  move.unit_bytes = static_cast<int32_t>(entry_bytes());
  move.max_workers = options_.ess.transfer_workers;
  if (row_copies_ != nullptr) return row_copies_->Enqueue(stream, move);
  kernels().Transfer(stream, move);
}

kernels::SparseMlaParams EssPolicy::Attention(const LatentAttention& a, int32_t first,
                                              int32_t rows) const {
  const int64_t q_row = int64_t{a.heads} * (tier_->Pool(0).rank + tier_->Pool(0).rope);
  const int64_t out_row = int64_t{a.heads} * tier_->Pool(0).rank;
  const DType q_type = kernels().activation_type();
  kernels::SparseMlaParams p{};
  p.q = static_cast<const uint8_t*>(a.q) + first * q_row * SizeOf(q_type);
  p.slots = a.slots + first;
  p.capacity = selection_->lists().capacity;
  p.out = static_cast<uint8_t*>(a.out) + first * out_row * SizeOf(a.out_type);
  p.scratch = buffers_.scratch.data();
  p.scratch_bytes = static_cast<int64_t>(buffers_.scratch.bytes());
  p.rows = rows;
  p.heads = a.heads;
  p.scale = a.scale;
  p.q_type = q_type;
  p.out_type = a.out_type;
  return p;
}

void EssPolicy::AttendDecode(Stream& stream, int layer, const LatentAttention& a) {
  const int32_t rows = a.decode_rows;
  const Overlap overlap = plan_.Of(rows)[static_cast<size_t>(layer)];
  // The same operators on the same lists under each schedule, so that results are, to the bit.
  const bool beneath = overlap == Overlap::kDa || overlap == Overlap::kDba;
  // PreAttn, and Attn0 where it is beneath a transfer, are on a branch. Top-k, Admit and the
  // transfer are in the trunk, each right behind the one before: blocks of a product that waited on
  // every processor would keep them off.
  Stream& work = overlap == Overlap::kNone ? stream : WorkBranch(stream);
  Stream& early = overlap == Overlap::kDba ? FetchBranch(stream) : stream;
  using Stage = PolicyOptions::Ess::Stage;
  const bool timed = options_.ess.on_stage != nullptr;
  const auto done = [&](Stage stage) {
    if (timed) options_.ess.on_stage(stream, layer, rows, stage);
  };
  const auto select = [&](int32_t first, int32_t count) {
    selection_->Select(
        stream, layer, tier_->Index(layer), a, first, count,
        [&] {
          if (first + count == rows) work.After(stream);
        },
        first > 0 ? options_.ess.transfer_workers : 0);  // the first half's transfer is beside it
    done(Stage::kSelected);
    kernels().Admit(stream, AdmitOf(layer, a, first, first, count));
    done(Stage::kAdmitted);
  };
  done(Stage::kBegin);
  const int32_t half = overlap == Overlap::kDba ? rows / 2 : 0;
  if (half > 0) {
    select(0, half);
    early.After(stream);
    Fetch(early, layer, 0, half);
  }
  select(half, rows - half);
  if (overlap != Overlap::kNone) a.make_queries(work);
  if (beneath) work.After(stream);  // Attn0 needs Admit's lists.
  Fetch(stream, layer, half, rows - half);
  done(Stage::kFetched);
  if (overlap == Overlap::kNone) a.make_queries(work);
  done(Stage::kPrepared);

  kernels::SparseMlaParams attend = Attention(a, 0, rows);
  attend.decode_rows = rows;
  attend.cache = tier_->Pool(layer);
  attend.entries = buffers_.resident.as<int32_t>();
  attend.counts = buffers_.resident_counts.as<int32_t>();
  attend.then_entries = buffers_.arriving.as<int32_t>();
  attend.then_counts = buffers_.arriving_counts.as<int32_t>();
  attend.other_o = buffers_.o.as<float>();
  attend.other_lse = buffers_.lse.as<float>();
  if (beneath || timed) {
    kernels::SparseMlaParams resident = kernels::FirstOfTwo(attend);
    if (beneath) resident.spare_processors = options_.ess.transfer_workers;
    kernels().SparseMla(work, resident);  // Attn0
    done(Stage::kAttended);
    attend = kernels::SecondOfTwo(attend);
  }
  stream.After(early);
  stream.After(work);
  kernels().SparseMla(stream, attend);  // Attn1, merged; or both
  done(Stage::kMerged);

  if (!options_.ess.lru || ((layer + 1) % kWriteLayers != 0 && layer + 1 != layers())) return;
  Stream& settling = SettlingBranch(stream);
  settling.After(stream);
  tier_->WriteThrough(settling, buffers_.written.data(), layer / kWriteLayers * kWriteLayers,
                      layer + 1);
}

// Rows of prompts attend to the home: their sequence has no working set yet.
void EssPolicy::AttendPrompt(Stream& stream, int layer, const LatentAttention& a) {
  const int32_t first = a.decode_rows, rows = a.rows - first;
  selection_->Select(stream, layer, tier_->Index(layer), a, first, rows);
  const kernels::UnitLists selected = selection_->lists();
  kernels::SparseMlaParams attend = Attention(a, first, rows);
  attend.cache = tier_->Home(layer);
  attend.entries = selected.units + int64_t{first} * selected.capacity;
  attend.counts = selected.counts + first;
  kernels().SparseMla(stream, attend);
  // LRU warm-up by what was computed here: one row after the other, the oldest first, through the
  // lists of the first decode row, which is done with them.
  for (const Replay& replay : replays_) {
    kernels::AdmitParams admit = AdmitOf(layer, a, replay.row, 0, 1);
    admit.counters = nullptr;
    admit.ahead = replay.last ? 1 : 0;
    kernels().Admit(stream, admit);
    Fetch(stream, layer, 0, 1);
  }
}

void EssPolicy::AttendLatent(Stream& stream, int layer, const LatentAttention& a) {
  SLUICE_CHECK(a.index_q != nullptr && a.heads == options_.heads, "the model is the policy's");
  if (a.decode_rows > 0) {
    AttendDecode(stream, layer, a);
  } else {
    a.make_queries(stream);
  }
  if (a.rows > a.decode_rows) AttendPrompt(stream, layer, a);
}

absl::StatusOr<EssPolicy::Buffers> EssPolicy::NewBuffers(const PolicyOptions& options) {
  Buffers b;
  const int64_t rows = DecodeRows(options), list = options.index_top_k;
  const CacheLayout& layout = options.hbm->layout();
  const auto allocate = [&](Buffer* buffer, int64_t bytes, const char* what) -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(
        *buffer, options.device->Allocate(MemoryKind::kDevice, static_cast<size_t>(bytes),
                                          absl::StrCat("ess's ", what)));
    return absl::OkStatus();
  };
  SLUICE_RETURN_IF_ERROR(allocate(
      &b.written, layout.layers * rows * layout.kinds[kLatentKind].bytes_per_token, "new entries"));
  for (Buffer* lists : {&b.resident, &b.arriving, &b.sources, &b.targets}) {
    SLUICE_RETURN_IF_ERROR(allocate(lists, rows * list * 4, "lists of entries"));
  }
  for (Buffer* counts : {&b.resident_counts, &b.arriving_counts, &b.move_counts}) {
    SLUICE_RETURN_IF_ERROR(allocate(counts, rows * 4, "lists of entries"));
  }
  for (Buffer& appending : b.appending) {
    const auto bytes = static_cast<size_t>(std::max<int64_t>(options.max_rows, rows)) * 4;
    SLUICE_ASSIGN_OR_RETURN(
        appending, options.device->Allocate(MemoryKind::kPinned, bytes, "ess's rows that append"));
  }
  const int64_t heads = options.heads, rank = options.latent_rank;
  SLUICE_RETURN_IF_ERROR(allocate(&b.o, rows * heads * rank * 4, "partial results"));
  SLUICE_RETURN_IF_ERROR(allocate(&b.lse, rows * heads * 4, "partial results"));
  SLUICE_RETURN_IF_ERROR(
      allocate(&b.scratch,
               options.device->kernels().SparseMlaScratchBytes(
                   static_cast<int32_t>(rows), options.heads, options.latent_rank, list),
               "partial results"));
  SLUICE_ASSIGN_OR_RETURN(b.counters,
                          SelectionCounters::Create(options.device, options.slots, layout));
  return b;
}

absl::Status Check(const PolicyOptions& o) {
  if (!HasIndexKeys(o.dram->layout()) || o.index_top_k == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("policy: ", o.name,
                     " needs a model with latent caches and an indexer (deepseek_v32): take "
                     "--policy full"));
  }
  if (!o.device->kernels().HasLatent()) {
    return absl::UnimplementedError(
        absl::StrCat("policy: ", o.name, " needs operators of latent attention, which device ",
                     o.device->name(), " has not"));
  }
  const double ratio = o.ess.sparse_memory_ratio;
  if (!(ratio >= 0 && ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ess_sparse_memory_ratio: expected a number from 0 (auto) to 1, found ", ratio));
  }
  for (const PagePool* pool : {o.hbm, o.dram}) {
    // Lists of entries to fetch number them in 32 bits, all layers together.
    const int64_t entries = pool->Capacity()[kLatentKind] * pool->layout().layers;
    if (entries <= INT32_MAX) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(pool->name(), "_bytes: expected room for at most ", INT32_MAX,
                     " latent entries with policy ", o.name, ", found ", entries));
  }
  return absl::OkStatus();
}

// Room for one sequence, of a token and the next one.
absl::Status CheckRoom(const PolicyOptions& o, const EssTier& tier) {
  constexpr int64_t kLeast = 2;
  if (tier.max_tokens() >= kLeast) return absl::OkStatus();
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

absl::StatusOr<std::unique_ptr<AttentionPolicy>> EssPolicy::Create(const PolicyOptions& given) {
  SLUICE_RETURN_IF_ERROR(Check(given));
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
  tier_options.shape = EssShapeOf(options, options.hbm->layout().kinds[kLatentKind].block_tokens,
                                  options.hbm->Capacity()[kLatentKind]);
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<EssTier> tier, EssTier::Create(tier_options));
  SLUICE_RETURN_IF_ERROR(CheckRoom(options, *tier));
  IndexSelection::Options selection_options;
  selection_options.device = options.device;
  selection_options.max_rows = std::max(options.max_rows, DecodeRows(options));
  selection_options.decode_rows = DecodeRows(options);
  selection_options.top_k = options.index_top_k;
  selection_options.max_context = options.max_context;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<IndexSelection> selection,
                          IndexSelection::Create(selection_options));
  selection->Observe(options.ess.on_selection);
  std::unique_ptr<RowCopies> row_copies;
  if (options.ess.row_copies) {
    SLUICE_ASSIGN_OR_RETURN(
        row_copies, RowCopies::Create(options.device, DecodeRows(options), options.index_top_k));
  }
  SLUICE_ASSIGN_OR_RETURN(Buffers buffers, NewBuffers(options));
  return std::unique_ptr<AttentionPolicy>(new EssPolicy(
      options, std::move(tier), std::move(selection), std::move(row_copies), std::move(buffers)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewEssPolicy(const PolicyOptions& options) {
  return EssPolicy::Create(options);
}

}  // namespace sluice
