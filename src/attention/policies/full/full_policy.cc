#include "src/attention/policies/full/full_policy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr size_t kKv = 0;  // the one cache kind

class FullPolicyImpl : public FullPolicy {
 public:
  FullPolicyImpl(const FullPolicyOptions& options, Buffer device_tables, Buffer host_tables)
      : device_(options.device),
        hbm_(options.hbm),
        dram_(options.dram),
        slots_count_(options.slots),
        table_stride_(hbm_->layout().kinds[kKv].BlocksFor(options.max_context)),
        device_tables_(std::move(device_tables)),
        host_tables_(std::move(host_tables)),
        slots_(static_cast<size_t>(options.slots)),
        copy_stream_(device_->NewStream(Device::StreamKind::kCopy)) {
    for (Slot& slot : slots_) slot.warm = device_->NewEvent();
  }
  ~FullPolicyImpl() override {
    for (Slot& slot : slots_) slot.warm->Wait();
  }

  const std::string& name() const override { return name_; }

  Footprint FootprintOf(int64_t context, int64_t total) const override {
    // The DRAM pages go back at admission, so growth needs HBM alone.
    return {context, total};
  }

  int64_t max_tokens() const override { return hbm_->capacity_tokens(); }

  Room RoomNow() const override {
    return {hbm_->RoomNow(), dram_ == nullptr ? 0 : dram_->RoomNow().firm_tokens};
  }

  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    Slot& s = slots_.at(static_cast<size_t>(slot));
    SLUICE_CHECK(s.cache == nullptr, "a slot has one sequence");
    if (SLUICE_FAILPOINT(kKvAdmit)) return false;
    // A home that an eviction made is large enough to become the way out once more.
    const bool keep =
        promise == Promise::kSoft && context > 0 && home->pool() == dram_ && home->Covers(total);
    Reservation way_out;
    if (promise == Promise::kSoft && !keep) {
      way_out = dram_->TryReserve(total);
      if (way_out.empty()) return false;
    }
    Reservation reservation = hbm_->TryReserve(total, promise);
    if (reservation.empty()) return false;
    auto cache = std::make_unique<SequenceCache>(hbm_, std::move(reservation));
    if (cache->EnsureTokens(context) == SequenceCache::Growth::kNoRoom) return false;
    s.cache = std::move(cache);
    s.way_out = std::move(way_out);
    s.keep_home = keep;
    s.published = 0;
    if (context > 0) {
      s.home = std::move(home);
      PublishTables(slot, *copy_stream_);
      Copy(s, *s.home, *s.cache, context);
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
      s.way_out = SequenceCache::Dissolve(std::move(s.home));
    } else {
      s.home.reset();
    }
    return true;
  }

  Event& WarmEvent(int slot) override { return *slots_[static_cast<size_t>(slot)].warm; }

  bool Grow(int slot, int64_t tokens, Stream& stream) override {
    switch (slots_[static_cast<size_t>(slot)].cache->EnsureTokens(tokens)) {
      case SequenceCache::Growth::kNone:
        return true;
      case SequenceCache::Growth::kAdded:
        PublishTables(slot, stream);
        return true;
      case SequenceCache::Growth::kNoRoom:
        break;
    }
    return false;
  }

  void Release(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.cache != nullptr && s.warm->Ready(),
                 "released once, and while nothing is copied");
    s.home.reset();
    s.cache.reset();
    s.way_out.Reset();
    s.copies.clear();
    s.evicted = false;
  }

  bool MakeFirm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.cache->MakeFirm()) return false;
    s.way_out.Reset();
    s.keep_home = false;
    return true;
  }

  void Evict(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(!s.cache->firm() && !s.evicted && Warm(slot) && tokens <= s.cache->tokens());
    s.evicted = true;
    if (tokens > 0) {
      s.home = std::make_unique<SequenceCache>(dram_, std::move(s.way_out));
      s.home->EnsureTokens(tokens);
      Copy(s, *s.cache, *s.home, tokens);
    }
    copy_stream_->Record(*s.warm);
  }

  std::unique_ptr<SequenceCache> TakeHome(int slot) override {
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

  const SequenceCache& resident(int slot) const override {
    return *slots_[static_cast<size_t>(slot)].cache;
  }

 private:
  struct Slot {
    std::unique_ptr<SequenceCache> cache;  // null: the slot is free
    std::unique_ptr<SequenceCache> home;   // until the copy from it is done, or to be taken
    std::vector<Stream::CopyOp> copies;    // under way
    std::unique_ptr<Event> warm;           // no copy is under way
    Reservation way_out;                   // of DRAM, as long as the promise of HBM is soft
    bool keep_home = false;                // the home's promise becomes the way out
    bool evicted = false;
    size_t published = 0;  // blocks whose pages the device table knows
  };

  kernels::PagedCache LayerCache(int layer) const {
    const CacheKind& kind = hbm_->layout().kinds[kKv];
    kernels::PagedCache cache;
    cache.base = hbm_->base(kKv);
    cache.block_table = device_tables_.as<int32_t>() + TableOffset(layer, 0);
    cache.table_stride = table_stride_;
    cache.page_bytes = kind.page_bytes();
    cache.block_tokens = kind.block_tokens;
    cache.kv_heads = kind.heads;
    cache.head_dim =
        static_cast<int32_t>(kind.bytes_per_token / kind.parts / SizeOf(kind.element_type));
    cache.type = kind.element_type;
    return cache;
  }

  int64_t TableOffset(int layer, int slot) const {
    return (int64_t{layer} * slots_count_ + slot) * table_stride_;
  }

  // Sends the page numbers that the device does not know. The host table keeps them at fixed
  // addresses: a slot's rows are written again only after the steps that read them.
  void PublishTables(int slot, Stream& stream) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    const size_t count = s.cache->Pages(0, kKv).size() - s.published;
    if (count == 0) return;
    for (int layer = 0; layer < hbm_->layout().layers; ++layer) {
      const int64_t at = TableOffset(layer, slot) + static_cast<int64_t>(s.published);
      const std::vector<int32_t>& pages = s.cache->Pages(layer, kKv);
      std::copy_n(pages.begin() + static_cast<int64_t>(s.published), count,
                  host_tables_.as<int32_t>() + at);
      stream.Copy(device_tables_.as<int32_t>() + at, host_tables_.as<int32_t>() + at,
                  count * sizeof(int32_t));
    }
    s.published += count;
  }

  // Copies the pages of the first `tokens` tokens, joined where both sides are contiguous.
  void Copy(Slot& s, const SequenceCache& from_cache, const SequenceCache& to_cache,
            int64_t tokens) {
    const CacheKind& kind = hbm_->layout().kinds[kKv];
    const auto blocks = static_cast<size_t>(kind.BlocksFor(tokens));
    for (int layer = 0; layer < hbm_->layout().layers; ++layer) {
      const std::vector<int32_t>& from = from_cache.Pages(layer, kKv);
      const std::vector<int32_t>& to = to_cache.Pages(layer, kKv);
      for (size_t begin = 0, end; begin < blocks; begin = end) {
        end = begin + 1;
        while (end < blocks && from[end] == from[end - 1] + 1 && to[end] == to[end - 1] + 1) ++end;
        s.copies.push_back({to_cache.pool()->PageAddress(kKv, to[begin]),
                            from_cache.pool()->PageAddress(kKv, from[begin]),
                            (end - begin) * static_cast<size_t>(kind.page_bytes())});
      }
    }
    // One command, however scattered the pages: the engine's thread never waits for the queue.
    copy_stream_->CopyBatch(s.copies.data(), s.copies.size());
  }

  const std::string name_ = "full";
  Device* const device_;
  PagePool* const hbm_;
  PagePool* const dram_;  // null: nothing is preempted
  const int slots_count_;
  const int64_t table_stride_;  // blocks
  const Buffer device_tables_;  // int32 [layers][slots][table_stride]
  const Buffer host_tables_;    // the same, where they are sent from
  std::vector<Slot> slots_;
  std::unique_ptr<Stream> copy_stream_;  // last: its thread ends first
};

}  // namespace

absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const FullPolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  SLUICE_CHECK(layout.kinds.size() == 1 && layout.kinds[kKv].parts == 2);
  SLUICE_CHECK(options.dram != nullptr || !options.hbm->overcommitted());
  const size_t bytes = static_cast<size_t>(layout.layers) * static_cast<size_t>(options.slots) *
                       static_cast<size_t>(layout.kinds[kKv].BlocksFor(options.max_context)) *
                       sizeof(int32_t);
  SLUICE_ASSIGN_OR_RETURN(Buffer device_tables,
                          options.device->Allocate(MemoryKind::kDevice, bytes, "block tables"));
  SLUICE_ASSIGN_OR_RETURN(Buffer host_tables,
                          options.device->Allocate(MemoryKind::kPinned, bytes, "block tables"));
  return std::make_unique<FullPolicyImpl>(options, std::move(device_tables),
                                          std::move(host_tables));
}

}  // namespace sluice
