#include "src/attention/policies/hgca/hgca_policy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/host_threads.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/prompt_queries.h"
#include "src/attention/policies/hgca/selection_thread.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

constexpr size_t kAverages = 0;  // the tier's only array

// Memory in HBM that a step's decode rows need beside the tier.
struct Workspace {
  // The units of a row's window, the same for every layer and KV head.
  Buffer counts;  // int32 [3][lists]: selected (none), resident, missing (none)
  Buffer units;   // int32 [lists][ring]
  Buffer places;  // int32 [lists][ring]
  Buffer none;    // int32 [lists]: the units of empty lists
  Buffer o;       // float32 [2][rows][heads][head_dim]: the window's, the CPU's
  Buffer lse;     // float32 [layers][2][rows][heads]
};

// Averages of blocks on their way to DRAM: one list for each (sequence, layer, KV head).
struct EvictionBatch {
  Buffer lists;  // int64 [2][most]: sources, targets; then int32 [most] ones
  std::unique_ptr<Event> done;
};

int HeadDim(const CacheKind& kind) {
  return static_cast<int>(kind.part_bytes[0] / SizeOf(kind.element_type));
}

const kernels::KernelTable* HostKernels(const PolicyOptions& options) {
  return options.host_kernels != nullptr ? options.host_kernels
                                         : kernels::AvailableKernelTables().back();
}

class HgcaPolicyImpl : public HgcaPolicy {
 public:
  static constexpr size_t kBatches = 2;
  static absl::StatusOr<std::unique_ptr<HgcaPolicy>> Create(const PolicyOptions& options);

  HgcaPolicyImpl(const PolicyOptions& options, HgcaWindow window, std::unique_ptr<OffloadTier> tier,
                 Buffer written, Workspace workspace, std::array<Buffer, kBatches> lists,
                 std::unique_ptr<PromptQueries> queries, std::unique_ptr<ContextualCache> cache,
                 std::unique_ptr<CoAttention> co_attention)
      : HgcaPolicy(options, std::move(tier), std::move(written)),
        window_(window),
        max_rows_(max_decode_rows()),
        workspace_(std::move(workspace)),
        decodes_(static_cast<size_t>(options.slots)),
        queries_(std::move(queries)),
        cache_(std::move(cache)),
        thread_(options.hgca.selection_thread && HasThreads(*options.device)
                    ? std::make_unique<SelectionThread>(cache_.get())
                    : nullptr),
        co_attention_(std::move(co_attention)) {
    for (int slot = 0; slot < options.slots; ++slot) evaluated_.emplace_back(cache_.get(), slot);
    for (size_t i = 0; i < kBatches; ++i) {
      batches_[i].lists = std::move(lists[i]);
      batches_[i].done = options.device->NewEvent();
    }
  }
  ~HgcaPolicyImpl() override {
    AwaitWarmUps();
    for (EvictionBatch& batch : batches_) batch.done->Wait();
  }

  const ContextualCache& contextual_cache() const override { return *cache_; }
  const float* parts_lse(int layer) const override { return LseOf(layer); }

  // one row, because it reads the whole cache
  int last_rows_wanted(int64_t /*total*/) const override {
    return options().recompute_last == PolicyOptions::RecomputeLast::kOn ? 1 : 0;
  }
  // The selection after an append is a part of the working set.
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    HgcaPolicy::EndPrompt(slot, tokens, std::move(hints));
    if (queries_->Knows(slot, tokens)) {
      cache_->Evaluate(slot, static_cast<int32_t>(tokens), queries_->Rows(slot),
                       &tier().WarmEvent(slot));
    }
    queries_->PromptEnded(slot);
  }
  bool Warm(int slot) override {
    if (!HgcaPolicy::Warm(slot)) return false;
    if (cache_->Evaluated(slot)) return true;
    return thread_ == nullptr && cache_->EvaluateNow(slot);
  }
  Event& WarmEvent(int slot) override {
    const bool evaluated = cache_->Evaluated(slot) || thread_ == nullptr;
    return evaluated ? HgcaPolicy::WarmEvent(slot) : evaluated_[static_cast<size_t>(slot)];
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    HgcaPolicy::Attend(stream, layer, params);
    if (!tier().dense(layer)) queries_->Keep(stream, layer, params);
    if (layer == kv_layout().layers - 1) queries_->EndStep(stream);
  }

  // Algorithm 1, lines 10 to 14: sends off the block that the step's row pushes out of the window.
  // Its keys and values are in the host cache already. Its averages are final, and go to DRAM
  // before the row's own take their place.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override;

  PolicyStatistics Statistics() const override;
  int64_t MetadataBytes(int64_t /*tokens*/) const override {  // averages, read and written
    return 2 * options().hgca.window_tokens * kv().heads * static_cast<int64_t>(sizeof(float));
  }

 protected:
  SlotWorkers* slot_workers() const override { return &co_attention_->workers(); }
  // Algorithm 2.
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override;
  // The CPU goes on attending to all tokens outside the window only with beta 0.
  int64_t SparseExactTokens() const override {
    return options().hgca.beta == 0 ? options().max_context : window_.tokens();
  }
  // Only the window is in HBM.
  std::vector<std::vector<int32_t>> FirstUnits(int /*slot*/, int64_t /*tokens*/,
                                               const SelectionHints& /*hints*/) override {
    const int sparse = kv_layout().layers - tier().options().dense_layers;
    return std::vector<std::vector<int32_t>>(static_cast<size_t>(sparse * kv().heads));
  }
  void BuildArrays(Stream& /*stream*/, int slot, int64_t /*tokens*/,
                   const OffloadTier::BulkRow& /*row*/) override {
    decodes_[static_cast<size_t>(slot)] = true;
    cache_->Append(slot);
  }
  void Joined(int slot) override {
    decodes_[static_cast<size_t>(slot)] = false;
    queries_->Joined(slot);
    cache_->Join(slot, tier().HomeOf(slot));
  }
  void Left(int slot) override { cache_->Leave(slot); }

 private:
  // The event that a slot's selection after an append is there, for a step that waits for it.
  class EvaluatedEvent : public Event {
   public:
    EvaluatedEvent(const ContextualCache* cache, int slot) : cache_(cache), slot_(slot) {}
    bool Ready() const override { return cache_->Evaluated(slot_); }
    void Wait() const override { cache_->WaitEvaluated(slot_); }

   private:
    const ContextualCache* cache_;
    int slot_;
  };
  const CacheLayout& kv_layout() const { return options().hbm->layout(); }
  void ListWindow(Stream& stream, const Queries& queries);
  float* LseOf(int layer) const {
    return workspace_.lse.as<float>() + int64_t{layer} * 2 * max_rows_ * options().heads;
  }

  const HgcaWindow window_;
  const int max_rows_;
  const Workspace workspace_;
  std::vector<bool> decodes_;  // by slot: its working set is complete or on its way
  std::array<EvictionBatch, kBatches> batches_;  // used in turn
  size_t next_batch_ = 0;
  const std::unique_ptr<PromptQueries> queries_;
  const std::unique_ptr<ContextualCache> cache_;
  std::vector<EvaluatedEvent> evaluated_;          // by slot
  const std::unique_ptr<SelectionThread> thread_;  // null: workers select
  const std::unique_ptr<CoAttention> co_attention_;
};

void HgcaPolicyImpl::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                               absl::Span<const int32_t> positions) {
  HgcaPolicy::BeginStep(stream, slots, positions);
  queries_->BeginStep(slots, positions);
  const int64_t block_tokens = window_.block_tokens;
  const auto decodes = [&](size_t row) {
    return slots[row] >= 0 && decodes_[static_cast<size_t>(slots[row])];
  };
  const auto evicts = [&](size_t row) {
    return decodes(row) && positions[row] % block_tokens == 0 &&
           window_.BlocksOutside(positions[row]) > 0;
  };
  for (size_t r = 0; r < slots.size(); ++r) {
    if (decodes(r)) cache_->Announce(slots[r], positions[r]);
  }
  size_t row = 0;
  while (row < slots.size() && !evicts(row)) ++row;
  if (row == slots.size()) return;

  EvictionBatch& batch = batches_[next_batch_];
  next_batch_ = (next_batch_ + 1) % batches_.size();
  batch.done->Wait();  // ready already, unless more steps are under way than there are batches
  const int layers = kv_layout().layers, heads = kv().heads;
  const int64_t most = int64_t{options().slots} * layers * heads;
  auto* const sources = batch.lists.as<int64_t>();
  auto* const targets = sources + most;
  auto* const ones = reinterpret_cast<int32_t*>(targets + most);
  uint8_t* const hbm = options().hbm->base(0);
  auto* const dram = reinterpret_cast<uint8_t*>(cache_->Averages(0, 0, 0));
  kernels::TransferParams params{};
  for (size_t r = row; r < slots.size(); ++r) {
    if (!evicts(r)) continue;
    const int slot = slots[r];
    const int64_t block = window_.BlocksOutside(positions[r]) - 1;
    for (int layer = tier().options().dense_layers; layer < layers; ++layer) {
      auto* const target = reinterpret_cast<uint8_t*>(cache_->Averages(slot, layer, block));
      for (int head = 0; head < heads; ++head) {
        SLUICE_CHECK(params.lists < most, "one decode row of a sequence in a step");
        sources[params.lists] =
            tier().ArrayRow(slot, layer, kAverages, head, block % window_.blocks * block_tokens) -
            hbm;
        targets[params.lists] =
            target - dram + head * block_tokens * static_cast<int64_t>(sizeof(float));
        ones[params.lists] = 1;
        ++params.lists;
      }
    }
  }
  params.source = hbm;
  params.target = dram;
  params.source_offsets = sources;
  params.target_offsets = targets;
  params.counts = ones;
  params.capacity = 1;
  params.unit_bytes = static_cast<int32_t>(block_tokens * static_cast<int64_t>(sizeof(float)));
  params.source_pitch = params.target_pitch = params.unit_bytes;
  kernels().Transfer(stream, params);
  stream.Record(*batch.done);
  for (size_t r = row; r < slots.size(); ++r) {
    if (evicts(r)) cache_->Evict(slots[r], window_.BlocksOutside(positions[r]), batch.done.get());
  }
}

void HgcaPolicyImpl::ListWindow(Stream& stream, const Queries& queries) {
  const int64_t lists = int64_t{max_rows_} * kv().heads;
  auto* const counts = workspace_.counts.as<int32_t>();
  const auto ring = static_cast<int32_t>(window_.blocks);
  kernels::SplitParams split{};
  split.residency = tier().Residency(tier().options().dense_layers);
  split.slots = queries.slots;
  split.positions = queries.positions;
  split.selected = {workspace_.none.as<int32_t>(), counts, 1};
  split.resident = {workspace_.units.as<int32_t>(), counts + lists, ring};
  split.places = workspace_.places.as<int32_t>();
  split.missing = {workspace_.none.as<int32_t>(), counts + 2 * lists, 1};
  split.rows = queries.rows;
  split.kv_heads = kv().heads;
  split.unit_tokens = static_cast<int32_t>(window_.block_tokens);
  split.whole = true;
  kernels().Split(stream, split);
}

void HgcaPolicyImpl::AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                                  kernels::DType out_type) {
  SLUICE_CHECK(queries.rows <= max_rows_);
  // Line 12. It runs beside what follows.
  Stream& answers = LayerBranch(stream, layer);
  answers.After(stream);
  co_attention_->Start(answers, layer, queries, /*lists=*/{}, tier().HostHome(layer));
  if (layer == tier().options().dense_layers) ListWindow(stream, queries);
  int32_t* const counts = workspace_.counts.as<int32_t>() + int64_t{max_rows_} * kv().heads;
  const kernels::PagedCache cache = tier().Places(layer);
  auto* const o = workspace_.o.as<float>();
  float* const lse = LseOf(layer);
  const int64_t lse_part = int64_t{queries.rows} * queries.heads;
  const int64_t o_part = lse_part * cache.head_dim;

  // Line 10.
  const kernels::UnitLists window{workspace_.units.as<int32_t>(), counts,
                                  static_cast<int32_t>(window_.blocks)};
  const kernels::SparseAttentionParams dense =
      SparseAttentionOf(queries, cache, window, workspace_.places.as<int32_t>(),
                        static_cast<int32_t>(window_.block_tokens), o, lse);
  kernels().SparseAttention(stream, dense);

  // Algorithm 1, line 8.
  kernels::MovingAverageParams average{};
  average.q = dense.q;
  average.q_stride = dense.q_stride;
  average.slots = dense.slots;
  average.positions = dense.positions;
  average.cache = cache;
  average.units = dense.units;
  average.places = dense.places;
  average.counts = counts;
  average.lse = lse;
  average.average = tier().Array(layer, kAverages);
  average.capacity = dense.capacity;
  average.unit_tokens = dense.unit_tokens;
  average.rows = queries.rows;
  average.heads = queries.heads;
  average.scale = queries.scale;
  average.alpha = options().hgca.alpha;
  average.reduction = options().hgca.reduction;
  kernels().MovingAverage(stream, average);

  co_attention_->Finish(answers, layer, queries.slots, queries.rows, o + o_part, lse + lse_part);
  stream.After(answers);
  // Section 3.3, merging states.
  kernels().Merge(stream, MergeOf(queries, cache.head_dim, 2, o, lse, out, out_type));
}

PolicyStatistics HgcaPolicyImpl::Statistics() const {
  PolicyStatistics statistics;
  for (int layer = 0; layer < kv_layout().layers; ++layer) {
    const ContextualCache::Counters counters = cache_->LayerCounters(layer);
    PolicyStatistics::Layer& out = statistics.layers.emplace_back();
    out.steps = counters.rows;
    out.selected = counters.window_tokens + counters.cpu_tokens;
    out.missing = counters.cpu_tokens;
    out.link_bytes = counters.rows * kv().heads * kv().bytes_per_token;  // written through
  }
  return statistics;
}

absl::StatusOr<HgcaWindow> WindowOf(const PolicyOptions& options) {
  const PolicyOptions::Hgca& hgca = options.hgca;
  const int block_tokens = options.hbm->layout().kinds[0].block_tokens;
  const auto expected = [](const char* field, const auto& what, auto found) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", what, ", found ", found));
  };
  if (hgca.window_tokens < block_tokens || hgca.window_tokens % block_tokens != 0) {
    return expected("hgca window_tokens",
                    absl::StrCat("a multiple of block_tokens (", block_tokens, ")"),
                    hgca.window_tokens);
  }
  if (!(hgca.beta >= 0 && hgca.beta < std::numeric_limits<float>::infinity())) {
    return expected("hgca beta", "0 or more", hgca.beta);
  }
  const int64_t lists =
      int64_t{options.hbm->layout().layers} * options.hbm->layout().kinds[0].heads;
  if (!hgca.betas.empty() && std::ssize(hgca.betas) != lists) {
    return expected("hgca betas", absl::StrCat("one for each of ", lists, " layers and KV heads"),
                    hgca.betas.size());
  }
  if (hgca.following < 0) return expected("hgca following", "0 or more", hgca.following);
  if (!(hgca.alpha > 0 && hgca.alpha <= 1)) {
    return expected("hgca alpha", "above 0, at most 1", hgca.alpha);
  }
  if (hgca.reduction != kernels::GroupReduction::kMax &&
      hgca.reduction != kernels::GroupReduction::kMean) {
    return expected("hgca reduction", "max or mean", static_cast<int>(hgca.reduction));
  }
  return HgcaWindow{block_tokens, hgca.window_tokens / block_tokens};
}

absl::StatusOr<std::unique_ptr<ContextualCache>> NewCache(const PolicyOptions& options,
                                                          const HgcaWindow& window,
                                                          const PromptQueries* queries) {
  ContextualCache::Options o;
  o.device = options.device;
  o.kernels = HostKernels(options);
  o.layout = options.hbm->layout();
  o.slots = options.slots;
  o.heads = options.heads;
  o.workers = options.workers;
  o.max_context = options.max_context;
  o.first_layer = std::min(options.dense_layers, options.hbm->layout().layers);
  o.arena = options.dram->base(0);
  o.window = window;
  o.queries = queries;
  o.beta = options.hgca.beta;
  o.betas = options.hgca.betas;
  o.following = options.hgca.following;
  o.alpha = options.hgca.alpha;
  o.reduction = options.hgca.reduction;
  o.patience = options.worker_deadline;
  return ContextualCache::Create(o);
}

absl::StatusOr<std::unique_ptr<OffloadTier>> NewTier(const PolicyOptions& options,
                                                     const HgcaWindow& window) {
  OffloadTierOptions o;
  o.device = options.device;
  o.hbm = options.hbm;
  o.dram = options.dram;
  o.slots = options.slots;
  o.max_context = options.max_context;
  o.dense_layers = options.dense_layers;
  o.ring_blocks = static_cast<int>(window.blocks);
  o.recall_blocks = 0;
  o.unit_tokens = static_cast<int>(window.block_tokens);
  o.arrays = {{"averages of attention weights", 0, 1, kernels::DType::kFloat32}};
  return OffloadTier::Create(o);
}

absl::StatusOr<std::unique_ptr<CoAttention>> NewWorkers(const PolicyOptions& options, int max_rows,
                                                        ContextualCache* source) {
  const CacheLayout& layout = options.hbm->layout();
  CoAttention::Options o;
  o.device = options.device;
  o.kernels = HostKernels(options);
  o.workers = options.workers;
  o.deadline = options.worker_deadline;
  o.slots = options.slots;
  o.layers = layout.layers;
  o.max_rows = max_rows;
  o.heads = options.heads;
  o.kv_heads = layout.kinds[0].heads;
  o.head_dim = HeadDim(layout.kinds[0]);
  o.source = source;
  return CoAttention::Create(o);
}

absl::StatusOr<Workspace> NewWorkspace(const PolicyOptions& options, const HgcaWindow& window,
                                       int max_rows) {
  const CacheKind& kind = options.hbm->layout().kinds[0];
  const int64_t lists = int64_t{max_rows} * kind.heads;
  const int64_t results = int64_t{2} * max_rows * options.heads;
  Workspace w;
  const BufferAllocator windows(options.device, "lists of windows");
  const BufferAllocator partial(options.device, "partial attention results");
  SLUICE_RETURN_IF_ERROR(windows.Words(MemoryKind::kDevice, 3 * lists, &w.counts));
  SLUICE_RETURN_IF_ERROR(windows.Words(MemoryKind::kDevice, lists * window.blocks, &w.units));
  SLUICE_RETURN_IF_ERROR(windows.Words(MemoryKind::kDevice, lists * window.blocks, &w.places));
  SLUICE_RETURN_IF_ERROR(windows.Words(MemoryKind::kDevice, lists, &w.none));
  SLUICE_RETURN_IF_ERROR(partial.Words(MemoryKind::kDevice, results * HeadDim(kind), &w.o));
  SLUICE_RETURN_IF_ERROR(
      partial.Words(MemoryKind::kDevice, results * options.hbm->layout().layers, &w.lse));
  return w;
}

absl::StatusOr<std::unique_ptr<HgcaPolicy>> HgcaPolicyImpl::Create(const PolicyOptions& options) {
  SLUICE_ASSIGN_OR_RETURN(const HgcaWindow window, WindowOf(options));
  const CacheLayout& layout = options.hbm->layout();
  const int max_rows = MaxDecodeRows(options);
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<PromptQueries> queries,
      PromptQueries::Create({options.device, layout.layers, options.slots, options.heads,
                             HeadDim(layout.kinds[0]), ContextualCache::kMostJudgingRows,
                             MemoryKind::kPinned}));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<ContextualCache> cache,
                          NewCache(options, window, queries.get()));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> tier, NewTier(options, window));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  SLUICE_ASSIGN_OR_RETURN(Workspace workspace, NewWorkspace(options, window, max_rows));
  const int64_t lists = int64_t{options.slots} * layout.layers * layout.kinds[0].heads;
  std::array<Buffer, kBatches> batches;
  for (Buffer& batch : batches) {
    SLUICE_ASSIGN_OR_RETURN(
        batch, options.device->Allocate(
                   MemoryKind::kPinned,
                   static_cast<size_t>(lists) * (2 * sizeof(int64_t) + sizeof(int32_t)),
                   "lists of evicted blocks"));
  }
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<CoAttention> workers,
                          NewWorkers(options, max_rows, cache.get()));
  return std::make_unique<HgcaPolicyImpl>(options, window, std::move(tier), std::move(written),
                                          std::move(workspace), std::move(batches),
                                          std::move(queries), std::move(cache), std::move(workers));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HgcaPolicy>> NewHgcaPolicy(const PolicyOptions& options) {
  return HgcaPolicyImpl::Create(options);
}

}  // namespace sluice
