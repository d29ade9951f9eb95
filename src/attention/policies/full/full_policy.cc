#include "src/attention/policies/full/full_policy.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/block_tables.h"
#include "src/attention/latent/latent_views.h"
#include "src/attention/latent/resident_latent_attention.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/kv/page_copies.h"

namespace sluice {
namespace {

constexpr size_t kKv = 0;  // the one kind of a model with keys and values

class FullPolicyImpl : public FullPolicy, public KvAttention, public LatentAttention {
 public:
  // `latents` is null unless the model has latent caches.
  FullPolicyImpl(const PolicyOptions& options, std::unique_ptr<BlockTables> tables,
                 std::unique_ptr<ResidentLatentAttention> latents)
      : device_(options.device),
        hbm_(options.hbm),
        dram_(options.dram),
        rank_(options.latent_rank),
        max_context_(options.max_context),
        tables_(std::move(tables)),
        latents_(std::move(latents)),
        slots_(static_cast<size_t>(options.slots)),
        copy_stream_(device_->NewStream(Device::StreamKind::kCopy)) {
    for (Slot& slot : slots_) slot.warm = device_->NewEvent();
  }
  ~FullPolicyImpl() override {
    for (Slot& slot : slots_) slot.warm->Wait();
  }

  const std::string& name() const override { return name_; }
  KvAttention* kv_attention() override { return latents_ == nullptr ? this : nullptr; }
  LatentAttention* latent_attention() override { return latents_ == nullptr ? nullptr : this; }

  int64_t exact_tokens() const override { return max_context_; }
  Footprint FootprintOf(int64_t context, int64_t total) const override {
    // The DRAM pages go back at admission, so growth needs only HBM.
    return {context, total};
  }

  int64_t max_tokens() const override { return hbm_->capacity_tokens(); }

  Headroom HeadroomNow() const override {
    return {hbm_->HeadroomNow(),
            dram_ == nullptr ? TokensByKind(0) : dram_->HeadroomNow().firm_tokens};
  }

  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    Slot& s = slots_.at(static_cast<size_t>(slot));
    SLUICE_CHECK(s.cache == nullptr, "a slot has one sequence");
    if (SLUICE_FAILPOINT(kKvAdmit)) return false;
    // A host cache that an eviction made is large enough to take the sequence's next eviction.
    const bool keep =
        promise == Promise::kSoft && context > 0 && home->pool() == dram_ && home->Covers(total);
    Reservation way_out;
    if (promise == Promise::kSoft && !keep) {
      way_out = dram_->TryReserve(total);
      if (way_out.empty()) return false;
    }
    if (home != nullptr && home->pool() == hbm_) {
      if (!home->Extend(total)) return false;
      s.cache = std::move(home);
    } else {
      Reservation reservation = hbm_->TryReserve(total, promise);
      if (reservation.empty()) return false;
      auto cache = std::make_unique<SequenceCache>(hbm_, std::move(reservation));
      if (cache->EnsureTokens(context) == SequenceCache::Growth::kNoRoom) return false;
      s.cache = std::move(cache);
    }
    s.way_out = std::move(way_out);
    s.keep_home = keep;
    tables_->Begin(slot, *s.cache, &s.copies);
    if (home != nullptr && context > 0) {
      s.home = std::move(home);
      Copy(s, *s.home, *s.cache, context);
    } else {
      copy_stream_->CopyBatch(s.copies.data(), s.copies.size());  // of page numbers alone
    }
    copy_stream_->Record(*s.warm);
    return true;
  }

  bool Warm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.warm->Ready()) return false;
    s.copies.clear();
    if (s.home == nullptr || s.evicted) return true;
    if (s.keep_home) {
      s.way_out = SequenceCache::Dissolve(std::move(s.home), &s.way_out_prefix);
    } else {
      s.home.reset();
    }
    return true;
  }

  Event& WarmEvent(int slot) override { return *slots_[static_cast<size_t>(slot)].warm; }

  bool Grow(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    const SequenceCache::Growth growth = s.cache->EnsureTokens(tokens);
    if (growth == SequenceCache::Growth::kAdded) tables_->Grew(slot);
    return growth != SequenceCache::Growth::kNoRoom;
  }

  // If HBM is not overcommitted a sequence grows once in SequenceCache::kGrowthBlocks blocks, so
  // most steps send nothing.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    tables_->Send(stream, slots,
                  [this](int slot) -> const SequenceCache& { return resident(slot); });
    if (latents_ != nullptr) latents_->BeginStep(stream, positions);
  }

  void Release(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.cache != nullptr && s.warm->Ready(),
                 "released once, and while nothing is copied");
    s.home.reset();
    s.cache.reset();
    tables_->End(slot);
    DropWayOut(s);
    s.copies.clear();
    s.evicted = false;
  }

  bool MakeFirm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.cache->MakeFirm()) return false;
    DropWayOut(s);
    s.keep_home = false;
    return true;
  }

  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.cache->firm()) return true;  // all of it is promised already
    if (dram_ == nullptr) return false;
    s.way_out = dram_->TryReserve(std::max<int64_t>(tokens - prefix.tokens(), 0));
    if (s.way_out.empty()) return false;
    s.way_out_prefix = std::move(prefix);
    return true;
  }

  void Evict(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(!s.evicted && Warm(slot) && !s.way_out.empty() && tokens <= s.cache->tokens());
    s.evicted = true;
    if (tokens > 0) {
      s.home =
          std::make_unique<SequenceCache>(dram_, std::move(s.way_out), std::move(s.way_out_prefix));
      s.home->EnsureTokens(tokens);
      Copy(s, *s.cache, *s.home, tokens, s.home->shared_tokens());
    }
    copy_stream_->Record(*s.warm);
  }

  const SequenceCache* HostCache(int slot) const override {
    return slots_[static_cast<size_t>(slot)].home.get();
  }

  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.evicted);
    std::unique_ptr<SequenceCache> home = std::move(s.home);
    Release(slot);
    return home;
  }

  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    params.cache = LayerCache(layer);
    device_->kernels().RopeAppend(stream, params);
  }

  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    params.cache = LayerCache(layer);
    device_->kernels().Attention(stream, params);
  }

  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t /*first_row*/) override {
    params.cache = LayerLatents(layer);
    params.place_of = {};  // an entry is where its position says
    params.written = nullptr;
    device_->kernels().LatentAppend(stream, params);
  }
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override {
    params.cache = LayerIndexKeys(layer);
    params.written = nullptr;
    device_->kernels().IndexAppend(stream, params);
  }
  void AttendLatent(Stream& stream, int layer, const Params& params) override {
    kernels::PagedIndexKeys keys{};
    const bool indexed = HasIndexKeys(hbm_->layout());
    if (indexed) keys = LayerIndexKeys(layer);
    latents_->Attend(stream, layer, LayerLatents(layer), indexed ? &keys : nullptr, params);
  }
  void ObserveSelections(SelectionObserver observer) override {
    latents_->Observe(std::move(observer));
  }

  SequenceCache& MutableResident(int slot) override {
    return *slots_[static_cast<size_t>(slot)].cache;
  }
  const SequenceCache& resident(int slot) const override {
    return *slots_[static_cast<size_t>(slot)].cache;
  }
  kernels::PagedCache LayerCache(int layer) const override {
    SLUICE_CHECK(latents_ == nullptr, "a latent cache is no cache of keys and values");
    const CacheKind& kind = hbm_->layout().kinds[kKv];
    kernels::PagedCache cache;
    cache.base = hbm_->base(kKv);
    cache.block_table = tables_->table(layer, kKv);
    cache.table_stride = tables_->stride(kKv);
    cache.page_bytes = kind.page_bytes();
    cache.block_tokens = kind.block_tokens;
    cache.kv_heads = kind.heads;
    cache.head_dim = static_cast<int32_t>(kind.part_bytes[0] / SizeOf(kind.element_type));
    cache.type = kind.element_type;
    return cache;
  }

 private:
  struct Slot {
    std::unique_ptr<SequenceCache> cache;  // null: the slot is free
    // until the copy from it is done, or DetachHostCache returns it
    std::unique_ptr<SequenceCache> home;
    std::vector<Stream::CopyOp> copies;  // copies under way
    std::unique_ptr<Event> warm;         // ready when no copy is under way
    Reservation way_out;  // DRAM reserved for an eviction: while the promise is soft, or for good
    SharedPrefix way_out_prefix;  // leading blocks that lie in DRAM already
    bool keep_home = false;       // whether the host cache's reservation becomes `way_out`
    bool evicted = false;
  };

  kernels::PagedLatents LayerLatents(int layer) const {
    return LatentsIn(*hbm_, tables_->table(layer, kLatentKind), tables_->stride(kLatentKind),
                     rank_);
  }
  kernels::PagedIndexKeys LayerIndexKeys(int layer) const {
    return IndexKeysIn(*hbm_, tables_->table(layer, kIndexKind), tables_->stride(kIndexKind));
  }

  static void DropWayOut(Slot& s) {
    s.way_out.Reset();
    s.way_out_prefix.Reset();
  }

  // Copies tokens [begin, tokens) of every kind, after what is in s.copies already. `begin` is a
  // block's first token.
  void Copy(Slot& s, const SequenceCache& from, const SequenceCache& to, int64_t tokens,
            int64_t begin = 0) {
    const CacheLayout& layout = hbm_->layout();
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
        CopyPages(from, to, layer, kind, tokens, &s.copies, begin);
      }
    }
    // This is one command, however scattered the pages are: on the CPU device the engine's thread
    // never waits for the queue. (On a GPU it may wait for the last batch but one, if pages are
    // small.)
    copy_stream_->CopyBatch(s.copies.data(), s.copies.size());
  }

  const std::string name_ = "full";
  Device* const device_;
  PagePool* const hbm_;
  PagePool* const dram_;  // null: no sequence is preempted
  const int32_t rank_;    // latent values of an entry
  const int64_t max_context_;
  const std::unique_ptr<BlockTables> tables_;
  const std::unique_ptr<ResidentLatentAttention> latents_;  // null: the model has keys and values
  std::vector<Slot> slots_;
  std::unique_ptr<Stream> copy_stream_;  // last: its thread ends first
};

}  // namespace

absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const PolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  SLUICE_CHECK(options.dram != nullptr || !options.hbm->overcommitted());
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<BlockTables> tables,
      BlockTables::Create(options.device, *options.hbm, options.slots, options.max_context));
  std::unique_ptr<ResidentLatentAttention> latents;
  if (HasLatents(layout)) {
    SLUICE_CHECK(layout.kinds.size() == (HasIndexKeys(layout) ? 2 : 1) &&
                 HasIndexKeys(layout) == (options.index_top_k > 0));
    SLUICE_ASSIGN_OR_RETURN(latents, ResidentLatentAttention::Create(
                                         {options.device, options.heads, options.latent_rank,
                                          options.index_top_k, options.max_rows, options.slots,
                                          options.max_context, options.rows_per_sequence}));
  } else {
    SLUICE_CHECK(layout.kinds.size() == 1 && layout.kinds[kKv].part_bytes.size() == 2);
  }
  return std::make_unique<FullPolicyImpl>(options, std::move(tables), std::move(latents));
}

}  // namespace sluice
