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

  bool Admit(int slot, int64_t context, int64_t total,
             std::unique_ptr<SequenceCache>& home) override {
    Slot& s = slots_.at(static_cast<size_t>(slot));
    SLUICE_CHECK(s.cache == nullptr, "a slot has one sequence");
    if (SLUICE_FAILPOINT(kKvAdmit)) return false;
    Reservation reservation = hbm_->TryReserve(total);
    if (reservation.empty()) return false;
    s.cache = std::make_unique<SequenceCache>(hbm_, std::move(reservation));
    s.published = 0;
    if (context > 0) {
      s.cache->EnsureTokens(context);
      s.home = std::move(home);
      PublishTables(slot, *copy_stream_);
      CopyHome(s, context);
    }
    copy_stream_->Record(*s.warm);
    return true;
  }

  bool Warm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.warm->Ready()) return false;
    s.home.reset();
    s.copies.clear();
    return true;
  }

  Event& WarmEvent(int slot) override { return *slots_[static_cast<size_t>(slot)].warm; }

  void Grow(int slot, int64_t tokens, Stream& stream) override {
    if (slots_[static_cast<size_t>(slot)].cache->EnsureTokens(tokens)) PublishTables(slot, stream);
  }

  void Release(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.cache != nullptr && s.warm->Ready(), "released once, and not while it warms");
    s.home.reset();
    s.cache.reset();
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
    std::unique_ptr<SequenceCache> home;   // until the copy is done
    std::vector<Stream::CopyOp> copies;    // the same
    std::unique_ptr<Event> warm;
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

  // Copies the pages of the first `context` tokens, joined where both sides are contiguous.
  void CopyHome(Slot& s, int64_t context) {
    const CacheKind& kind = hbm_->layout().kinds[kKv];
    const auto blocks = static_cast<size_t>(kind.BlocksFor(context));
    for (int layer = 0; layer < hbm_->layout().layers; ++layer) {
      const std::vector<int32_t>& from = s.home->Pages(layer, kKv);
      const std::vector<int32_t>& to = s.cache->Pages(layer, kKv);
      for (size_t begin = 0, end; begin < blocks; begin = end) {
        end = begin + 1;
        while (end < blocks && from[end] == from[end - 1] + 1 && to[end] == to[end - 1] + 1) ++end;
        s.copies.push_back({hbm_->PageAddress(kKv, to[begin]),
                            s.home->pool()->PageAddress(kKv, from[begin]),
                            (end - begin) * static_cast<size_t>(kind.page_bytes())});
      }
    }
    // One command, however scattered the pages: the engine's thread never waits for the queue.
    copy_stream_->CopyBatch(s.copies.data(), s.copies.size());
  }

  const std::string name_ = "full";
  Device* const device_;
  PagePool* const hbm_;
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
