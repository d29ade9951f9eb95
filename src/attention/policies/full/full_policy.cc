#include "src/attention/policies/full/full_policy.h"

#include <algorithm>
#include <array>
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
  static constexpr size_t kTableBatches = 2;

  // `lists`: of each TableBatch.
  FullPolicyImpl(const FullPolicyOptions& options, Buffer device_tables, Buffer host_tables,
                 std::array<Buffer, kTableBatches> lists)
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
    for (size_t i = 0; i < kTableBatches; ++i) {
      table_batches_[i].lists = std::move(lists[i]);
      table_batches_[i].done = device_->NewEvent();
    }
  }
  ~FullPolicyImpl() override {
    for (Slot& slot : slots_) slot.warm->Wait();
    for (TableBatch& batch : table_batches_) batch.done->Wait();
  }

  const std::string& name() const override { return name_; }

  Footprint FootprintOf(int64_t context, int64_t total) const override {
    // The DRAM pages go back at admission, so growth needs HBM alone.
    return {context, total};
  }

  int64_t max_tokens() const override { return hbm_->capacity_tokens(); }

  Room RoomNow() const override {
    return {hbm_->RoomNow(), dram_ == nullptr ? TokensByKind(0) : dram_->RoomNow().firm_tokens};
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
      ForNewEntries(slot, [&](int64_t first, int32_t count) {
        s.copies.push_back({device_tables_.as<int32_t>() + first,
                            host_tables_.as<int32_t>() + first,
                            static_cast<size_t>(count) * sizeof(int32_t)});
      });
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

  bool Grow(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    const SequenceCache::Growth growth = s.cache->EnsureTokens(tokens);
    if (growth == SequenceCache::Growth::kAdded) s.grown = true;
    return growth != SequenceCache::Growth::kNoRoom;
  }

  // One operator however many sequences grew, which takes the entries out of the host's table: a
  // copy for each layer of each of them would hold up the device for a microsecond apiece. Where
  // HBM is not overcommitted a sequence grows once in SequenceCache::kGrowthBlocks blocks, so most
  // steps have none.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> /*positions*/) override {
    const auto grown = [this](int32_t slot) { return slots_[static_cast<size_t>(slot)].grown; };
    if (std::none_of(slots.begin(), slots.end(), grown)) return;
    TableBatch& batch = table_batches_[next_table_batch_];
    next_table_batch_ = (next_table_batch_ + 1) % table_batches_.size();
    batch.done->Wait();  // it was, unless more steps are under way than there are batches
    // A list for each layer of each slot: where its new entries begin, and how many there are.
    auto* const begins = batch.lists.as<int64_t>();
    auto* const counts = reinterpret_cast<int32_t*>(begins + MostLists());
    kernels::TransferParams params{};
    for (const int32_t slot : slots) {
      if (!grown(slot)) continue;
      ForNewEntries(slot, [&](int64_t first, int32_t count) {
        begins[params.lists] = first * int64_t{sizeof(int32_t)};
        counts[params.lists] = count;
        params.capacity = std::max(params.capacity, count);
        ++params.lists;
      });
    }
    params.source = host_tables_.data();
    params.target = device_tables_.data();
    params.source_offsets = params.target_offsets = begins;
    params.source_pitch = params.target_pitch = params.unit_bytes = sizeof(int32_t);
    params.counts = counts;
    device_->kernels().Transfer(stream, params);
    stream.Record(*batch.done);
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
    s.grown = false;
  }

  bool MakeFirm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.cache->MakeFirm()) return false;
    s.way_out.Reset();
    s.keep_home = false;
    return true;
  }

  bool MakeWayOut(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.cache->firm()) return true;  // it has room for all of it
    if (dram_ == nullptr) return false;
    s.way_out = dram_->TryReserve(tokens);
    return !s.way_out.empty();
  }

  void Evict(int slot, int64_t tokens) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(!s.evicted && Warm(slot) && !s.way_out.empty() && tokens <= s.cache->tokens());
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
  kernels::PagedCache LayerCache(int layer) const override {
    const CacheKind& kind = hbm_->layout().kinds[kKv];
    kernels::PagedCache cache;
    cache.base = hbm_->base(kKv);
    cache.block_table = device_tables_.as<int32_t>() + TableOffset(layer, 0);
    cache.table_stride = table_stride_;
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
    std::unique_ptr<SequenceCache> home;   // until the copy from it is done, or to be taken
    std::vector<Stream::CopyOp> copies;    // under way
    std::unique_ptr<Event> warm;           // no copy is under way
    Reservation way_out;                   // of DRAM, while the promise of HBM is soft, or for good
    bool keep_home = false;                // the home's promise becomes the way out
    bool evicted = false;
    bool grown = false;    // since the device was told
    size_t published = 0;  // blocks whose pages the device table knows
  };
  // Table entries on their way to the device.
  struct TableBatch {
    Buffer lists;  // int64 [MostLists()] first bytes, then int32 [MostLists()] counts
    std::unique_ptr<Event> done;
  };
  int64_t MostLists() const { return int64_t{slots_count_} * hbm_->layout().layers; }

  int64_t TableOffset(int layer, int slot) const {
    return (int64_t{layer} * slots_count_ + slot) * table_stride_;
  }

  // Writes the page numbers that the device does not know to the host's table, and calls
  // visit(first entry, count) for those of each layer. They keep their place until the device has
  // them: a slot's entries are written again only after the steps that read them.
  template <typename Visit>
  void ForNewEntries(int slot, const Visit& visit) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    s.grown = false;
    const size_t count = s.cache->Pages(0, kKv).size() - s.published;
    for (int layer = 0; layer < hbm_->layout().layers; ++layer) {
      const int64_t at = TableOffset(layer, slot) + static_cast<int64_t>(s.published);
      const std::vector<int32_t>& pages = s.cache->Pages(layer, kKv);
      std::copy_n(pages.begin() + static_cast<int64_t>(s.published), count,
                  host_tables_.as<int32_t>() + at);
      visit(at, static_cast<int32_t>(count));
    }
    s.published += count;
  }

  // Copies the pages of the first `tokens` tokens, joined where both sides are contiguous, after
  // what is in s.copies already.
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
    // One command, however scattered the pages: on the CPU device the engine's thread never waits
    // for the queue. (A GPU's may wait for the last batch but one, where pages are small.)
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
  // In turn, as the engine's steps: at most one is under way when the next begins.
  std::array<TableBatch, kTableBatches> table_batches_;
  size_t next_table_batch_ = 0;
  std::unique_ptr<Stream> copy_stream_;  // last: its thread ends first
};

}  // namespace

absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const FullPolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  SLUICE_CHECK(layout.kinds.size() == 1 && layout.kinds[kKv].part_bytes.size() == 2);
  SLUICE_CHECK(options.dram != nullptr || !options.hbm->overcommitted());
  const size_t bytes = static_cast<size_t>(layout.layers) * static_cast<size_t>(options.slots) *
                       static_cast<size_t>(layout.kinds[kKv].BlocksFor(options.max_context)) *
                       sizeof(int32_t);
  SLUICE_ASSIGN_OR_RETURN(Buffer device_tables,
                          options.device->Allocate(MemoryKind::kDevice, bytes, "block tables"));
  SLUICE_ASSIGN_OR_RETURN(Buffer host_tables,
                          options.device->Allocate(MemoryKind::kPinned, bytes, "block tables"));
  std::array<Buffer, FullPolicyImpl::kTableBatches> lists;
  for (Buffer& buffer : lists) {
    const size_t list_bytes = static_cast<size_t>(layout.layers) *
                              static_cast<size_t>(options.slots) *
                              (sizeof(int64_t) + sizeof(int32_t));
    SLUICE_ASSIGN_OR_RETURN(
        buffer, options.device->Allocate(MemoryKind::kPinned, list_bytes, "block tables' growth"));
  }
  return std::make_unique<FullPolicyImpl>(options, std::move(device_tables), std::move(host_tables),
                                          std::move(lists));
}

}  // namespace sluice
