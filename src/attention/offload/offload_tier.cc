#include "src/attention/offload/offload_tier.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/home_admission.h"
#include "src/attention/offload/offload_pages.h"
#include "src/attention/offload/warm_copies.h"
#include "src/base/bisect.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr size_t kKv = 0;  // the one cache kind

class OffloadTierImpl : public OffloadTier {
 public:
  struct Buffers {
    WarmConstants constants;
    // int32 [slots][layers][most_blocks], the page numbers of host caches. Kernels read the
    // device's copy, because they would wait for the link at every block otherwise; workers read
    // the host's, from which the device's is sent.
    Buffer device_home_tables, host_home_tables;
    Buffer device_tables;  // int32 [slots][OffloadPages::entries()]
    Buffer host_tables;    // the host's copy, from which entries are sent
    // int32 [layers][kv_heads], in device memory: OffloadPages::HeadTable, and whether the head is
    // persistent. Not made where no head is.
    Buffer head_tables, persistent;
    Buffer device_rows;  // int32 [slots][3]: the values of BulkRow
    Buffer host_rows;
  };

  OffloadTierImpl(const OffloadTierOptions& options, OffloadPages pages, Buffers buffers)
      : OffloadTier(options),
        pages_(std::move(pages)),
        buffers_(std::move(buffers)),
        slots_(static_cast<size_t>(options.slots)),
        copy_stream_(options.device->NewStream(Device::StreamKind::kCopy)),
        build_stream_(options.device->NewStream(Device::StreamKind::kCompute)) {
    for (Slot& slot : slots_) {
      for (auto* event : {&slot.placed, &slot.copied, &slot.warm}) {
        *event = options.device->NewEvent();
      }
    }
  }
  ~OffloadTierImpl() override {
    for (const Slot& slot : slots_) {
      slot.placed->Wait();
      slot.warm->Wait();
    }
  }

  Footprint FootprintOf(int64_t /*context*/, int64_t total) const override {
    return {pages_.HomeTokensOf(total), pages_.PoolTokensOf(total)};
  }

  int64_t max_tokens() const override {
    return LargestThat(0, options_.max_context, [this](int64_t tokens) {
      return pages_.PoolTokensOf(tokens) <= options_.hbm->capacity_tokens() &&
             pages_.HomeTokensOf(tokens) <= options_.dram->capacity_tokens();
    });
  }

  SequencePlacement::Headroom HeadroomNow() const override {
    return {options_.hbm->HeadroomNow(), options_.dram->HeadroomNow().firm_tokens};
  }

  bool Admit(int slot, int64_t context, int64_t total,
             std::unique_ptr<SequenceCache>& home) override {
    Slot& s = slots_.at(static_cast<size_t>(slot));
    SLUICE_CHECK(home != nullptr || context == 0);
    if (!AdmitWithHome(options_.hbm, pages_.PoolTokensOf(total), options_.dram,
                       pages_.HomeTokensOf(total), home, &s.hbm)) {
      return false;
    }
    s.home = std::move(home);
    s.total = total;
    WriteHomeTable(slot);
    WriteTable(slot);
    const auto send = [&](const Buffer& target, const Buffer& source, int64_t entries) {
      const int64_t at = slot * entries;
      copy_stream_->Copy(target.as<int32_t>() + at, source.as<int32_t>() + at,
                         static_cast<size_t>(entries) * sizeof(int32_t));
    };
    send(buffers_.device_tables, buffers_.host_tables, pages_.entries());
    send(buffers_.device_home_tables, buffers_.host_home_tables, home_entries());
    copy_stream_->Record(*s.placed);
    return true;
  }

  void Grow(int slot, int64_t tokens) override {
    // The pages were taken at admission, so that a layer's pages are adjacent.
    SLUICE_CHECK(tokens <= slots_[static_cast<size_t>(slot)].total);
  }

  void Release(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.hbm != nullptr && Warm(slot), "released once, and while nothing is copied");
    s.home.reset();
    s.hbm.reset();
  }

  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!pages_.at_home.rows.empty()) s.home->ShrinkTo(s.total);
    return std::move(s.home);
  }

  void WarmUp(int slot, int64_t tokens, const std::vector<std::vector<int32_t>>& units,
              const std::function<void(Stream&, const BulkRow&)>& build) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    SLUICE_CHECK(s.hbm != nullptr && s.warm->Ready(), "a slot is warmed once at a time");
    SLUICE_CHECK(tokens > 0 && tokens <= s.total);
    const WarmCopies copies{pages_,  buffers_.constants, *options_.dram, *options_.hbm,
                            *s.home, Table(slot),        s.total,        tokens};
    copies.Make(units, &s.first, &s.then);
    int32_t* const row = buffers_.host_rows.as<int32_t>() + 3 * slot;
    row[0] = slot;
    row[1] = 0;
    row[2] = static_cast<int32_t>(tokens - 1);
    int32_t* const device_row = buffers_.device_rows.as<int32_t>() + 3 * slot;
    // Each is one command, however scattered the pages are.
    copy_stream_->CopyBatch(s.first.data(), s.first.size());
    copy_stream_->CopyBatch(s.then.data(), s.then.size());
    copy_stream_->Copy(device_row, row, 3 * sizeof(int32_t));
    copy_stream_->Record(*s.copied);
    build_stream_->WaitFor(*s.copied);
    build(*build_stream_, {device_row, device_row + 1, device_row + 2});
    build_stream_->Record(*s.warm);
  }

  bool Warm(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (!s.placed->Ready() || !s.warm->Ready()) return false;
    s.first = {};
    s.then = {};
    return true;
  }

  Event& WarmEvent(int slot) override {
    Slot& s = slots_[static_cast<size_t>(slot)];
    return s.warm->Ready() ? *s.placed : *s.warm;  // a warm-up comes after the placing
  }

  kernels::PagedCache Home(int layer) const override {
    return Home(layer, buffers_.device_home_tables);
  }
  kernels::PagedCache HostHome(int layer) const override {
    return Home(layer, buffers_.host_home_tables);
  }
  kernels::PagedCache Dense(int layer) const override {
    SLUICE_CHECK(dense(layer));
    return Cache(*options_.hbm, DeviceEntry(pages_.DenseEntry(layer)), pages_.entries());
  }
  kernels::PagedCache Ring(int layer) const override {
    kernels::PagedCache ring = Places(layer);
    ring.ring_blocks = static_cast<int32_t>(pages_.ring_blocks);
    return ring;
  }
  kernels::PagedCache Places(int layer) const override {
    SLUICE_CHECK(!dense(layer));
    kernels::PagedCache places =
        Cache(*options_.hbm, DeviceEntry(pages_.PlacesEntry(layer)), pages_.entries());
    if (pages_.HasHeadTables(layer)) places.head_tables = OfLayer(buffers_.head_tables, layer);
    return places;
  }
  kernels::ResidencyTable Residency(int layer) const override {
    SLUICE_CHECK(!dense(layer));
    kernels::ResidencyTable table;
    table.place_of =
        Rows(*options_.hbm, pages_.residency(), DeviceEntry(pages_.ByTokenEntry(layer)));
    table.places = Rows(*options_.hbm, pages_.places(), DeviceEntry(pages_.ByPlaceEntry(layer)));
    table.ring = static_cast<int32_t>(pages_.ring_units());
    table.count = static_cast<int32_t>(pages_.place_units());
    if (pages_.HasHeadTables(layer)) table.persistent = OfLayer(buffers_.persistent, layer);
    return table;
  }
  kernels::PagedRows Array(int layer, size_t index) const override {
    SLUICE_CHECK(!dense(layer));
    return ArrayIn(layer, index, buffers_.device_tables);
  }
  kernels::PagedRows HostArray(int layer, size_t index) const override {
    SLUICE_CHECK(!dense(layer) && pages_.Array(index).group == &pages_.at_home);
    return ArrayIn(layer, index, buffers_.host_tables);
  }

  SequenceCache* MutableHomeOf(int slot) override {
    return slots_[static_cast<size_t>(slot)].home.get();
  }
  const SequenceCache& HomeOf(int slot) const override {
    return *slots_[static_cast<size_t>(slot)].home;
  }
  uint8_t* ArrayRow(int slot, int layer, size_t index, int head, int64_t row) const override {
    const OffloadPages::ArrayAt array = pages_.Array(index);
    const int32_t* pages = Table(slot) + pages_.EntryOf(*array.group, layer);
    return array.rows->At(PoolOf(*array.group), pages, head, row);
  }

  int32_t PlacesOf(int64_t total) const override {
    return static_cast<int32_t>(pages_.PlaceBlocksOf(total) * pages_.units_per_block);
  }

 private:
  struct Slot {
    std::unique_ptr<SequenceCache> home;
    std::unique_ptr<SequenceCache> hbm;       // null: the slot is free
    int64_t total = 0;                        // the sequence's length at its end
    std::vector<Stream::CopyOp> first, then;  // copies of a warm-up under way
    std::unique_ptr<Event> placed;            // the device has its page numbers
    std::unique_ptr<Event> copied, warm;      // events of the warm-up
  };

  int32_t* Table(int slot) const {
    return buffers_.host_tables.as<int32_t>() + slot * pages_.entries();
  }
  const int32_t* DeviceEntry(int64_t entry) const {
    return buffers_.device_tables.as<int32_t>() + entry;
  }

  // Returns a layer's part of a table [layers][kv_heads].
  const int32_t* OfLayer(const Buffer& table, int layer) const {
    return table.as<int32_t>() + int64_t{layer} * pages_.kind.heads;
  }

  // Entries of one slot.
  int64_t home_entries() const { return pages_.layers * pages_.most_blocks; }
  kernels::PagedCache Home(int layer, const Buffer& tables) const {
    return Cache(*options_.dram, tables.as<int32_t>() + layer * pages_.most_blocks, home_entries());
  }

  kernels::PagedCache Cache(const PagePool& pool, const int32_t* table, int64_t stride) const {
    const CacheKind& kind = pages_.kind;
    kernels::PagedCache cache;
    cache.base = pool.base(kKv);
    cache.block_table = table;
    cache.table_stride = stride;
    cache.page_bytes = kind.page_bytes();
    cache.block_tokens = kind.block_tokens;
    cache.kv_heads = kind.heads;
    cache.head_dim = static_cast<int32_t>(kind.part_bytes[0] / SizeOf(kind.element_type));
    cache.type = kind.element_type;
    return cache;
  }

  const PagePool& PoolOf(const ArrayPages& group) const {
    return &group == &pages_.at_home ? *options_.dram : *options_.hbm;
  }
  // `tables` is one of the copies of the slots' page numbers.
  kernels::PagedRows ArrayIn(int layer, size_t index, const Buffer& tables) const {
    const OffloadPages::ArrayAt array = pages_.Array(index);
    return Rows(PoolOf(*array.group), *array.rows,
                tables.as<int32_t>() + pages_.EntryOf(*array.group, layer));
  }
  kernels::PagedRows Rows(const PagePool& pool, const ArrayPages::Rows& rows,
                          const int32_t* table) const {
    kernels::PagedRows out;
    out.base = pool.base(kKv) + rows.offset;
    out.page_table = table;
    out.table_stride = pages_.entries();
    out.page_bytes = pages_.kind.page_bytes();
    out.head_bytes = pages_.kind.block_bytes();
    out.rows_per_page = rows.rows_per_page;
    out.dim = rows.dim;
    out.type = rows.type;
    out.kv_heads = pages_.kind.heads;
    return out;
  }

  // Only steps read the table, and none has the slot now. (A late worker reads the copy that it
  // took in time, worker_share.h.)
  void WriteHomeTable(int slot) {
    const SequenceCache& home = *slots_[static_cast<size_t>(slot)].home;
    int32_t* out = buffers_.host_home_tables.as<int32_t>() + slot * home_entries();
    for (int layer = 0; layer < pages_.layers; ++layer, out += pages_.most_blocks) {
      const std::vector<int32_t>& pages = home.Pages(layer, kKv);
      std::copy_n(pages.begin(),
                  std::min<size_t>(pages.size(), static_cast<size_t>(pages_.most_blocks)), out);
    }
  }

  // Deals blocks of one head from pages [0, PlacePagesOf(total, layer)) to the tables of heads.
  void WriteHeadTables(int layer, int64_t total, const std::vector<int32_t>& pages,
                       int32_t* places) const {
    const int heads = pages_.kind.heads;
    size_t next = 0;  // block of one head, counted over the pages
    for (int head = 0; head < heads; ++head) {
      int32_t* const table = places + pages_.HeadTable(layer, head);
      const int64_t blocks = pages_.PlaceBlocksOf(total, layer, head);
      for (int64_t block = 0; block < blocks; ++block, ++next) {
        const auto of_page = static_cast<int32_t>(next % static_cast<size_t>(heads));
        table[block] = pages[next / static_cast<size_t>(heads)] * heads + of_page;
      }
    }
  }

  // Deals the pages of a sequence layer by layer: in each, those from `skipped` on.
  struct PageDeal {
    const SequenceCache& from;
    size_t skipped = 0;
    int layer = 0;
    size_t next = skipped;

    void operator()(int32_t* out, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        while (next == from.Pages(layer, kKv).size()) {
          ++layer;
          next = skipped;
        }
        out[i] = from.Pages(layer, kKv)[next++];
      }
    }
  };

  // Assigns the sequence's pages in the order of the table. Entries without a page are -1.
  void WriteTable(int slot) {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    int32_t* const table = Table(slot);
    std::fill_n(table, pages_.entries(), -1);
    PageDeal deal{*s.hbm};
    PageDeal deal_home{*s.home, static_cast<size_t>(pages_.kind.BlocksFor(s.total))};
    std::vector<int32_t> of_layer;
    for (int layer = 0; layer < pages_.layers; ++layer) {
      if (dense(layer)) {
        deal(table + pages_.DenseEntry(layer), pages_.kind.BlocksFor(s.total));
        continue;
      }
      int32_t* const places = table + pages_.PlacesEntry(layer);
      const int64_t count = pages_.PlacePagesOf(s.total, layer);
      if (pages_.HasHeadTables(layer)) {
        of_layer.resize(static_cast<size_t>(count));
        deal(of_layer.data(), count);
        WriteHeadTables(layer, s.total, of_layer, places);
      } else {
        deal(places, count);
      }
      deal(table + pages_.ByTokenEntry(layer), pages_.by_token.PagesFor(s.total));
      deal(table + pages_.ByPlaceEntry(layer), pages_.place_pages());
      deal_home(table + pages_.AtHomeEntry(layer), pages_.at_home.PagesFor(s.total));
    }
  }

  const OffloadPages pages_;
  const Buffers buffers_;
  std::vector<Slot> slots_;
  // Last, so that their threads end first: the one that waits for the other ends before it.
  std::unique_ptr<Stream> copy_stream_;
  std::unique_ptr<Stream> build_stream_;
};

absl::Status UploadHeads(const OffloadPages& pages, const OffloadTierOptions& options,
                         OffloadTierImpl::Buffers* buffers) {
  std::vector<int32_t> tables;
  for (int layer = 0; layer < pages.layers; ++layer) {
    for (int head = 0; head < pages.kind.heads; ++head) {
      tables.push_back(static_cast<int32_t>(pages.HeadTable(layer, head)));
    }
  }
  SLUICE_ASSIGN_OR_RETURN(buffers->head_tables,
                          Uploaded(options.device, tables, "tables of heads' blocks"));
  SLUICE_ASSIGN_OR_RETURN(
      buffers->persistent,
      Uploaded(options.device,
               std::vector<int32_t>(pages.persistent.begin(), pages.persistent.end()),
               "persistent heads"));
  return absl::OkStatus();
}

// Checks what the operators of recall count in int32.
absl::Status CheckRecall(const OffloadTierOptions& options, const OffloadPages& pages) {
  const int64_t places = pages.place_units() - pages.ring_units();
  const KernelSet& kernels = options.device->kernels();
  const int64_t most =
      pages.units_per_block == 1 ? kernels.MaxRecallPlaces() : kernels.MaxBringPlaces();
  if (places > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget_tokens: device ", options.device->name(), " takes ", most,
                     " units of ", pages.unit_tokens(), " tokens that are recalled, found ", places,
                     ": take a smaller budget"));
  }
  // Pieces that are moved have an index in their arena (RecallParams): a block, or a token's K row.
  // An int32 counts 2^31 of them, which is 256 GiB of rows of 128 B and 512 GiB of rows of 256 B.
  const int64_t piece_bytes =
      pages.units_per_block == 1 ? pages.kind.block_bytes() : pages.kind.part_bytes[0];
  for (const auto& [field, pool] :
       {std::pair{"hbm_bytes", options.hbm}, std::pair{"dram_bytes", options.dram}}) {
    const int64_t bytes = pool->UsageOf(kKv).capacity_bytes;
    if (options.recall_blocks == 0 || bytes / piece_bytes <= std::numeric_limits<int32_t>::max()) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": with this policy at most ",
                     piece_bytes * int64_t{std::numeric_limits<int32_t>::max()},
                     ", 2^31 pieces of ", piece_bytes, " bytes, found ", bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<OffloadTier>> OffloadTier::Create(
    const OffloadTierOptions& options) {
  SLUICE_CHECK(!options.hbm->overcommitted(), "what is taken at admission is never given up");
  SLUICE_ASSIGN_OR_RETURN(OffloadPages pages, OffloadPages::Of(options));
  SLUICE_RETURN_IF_ERROR(CheckRecall(options, pages));
  OffloadTierImpl::Buffers buffers;
  SLUICE_ASSIGN_OR_RETURN(buffers.constants, WarmConstants::Create(pages, options.device));
  if (!pages.persistent.empty()) SLUICE_RETURN_IF_ERROR(UploadHeads(pages, options, &buffers));
  const BufferAllocator allocator(options.device, "block tables");
  const int64_t home_entries = int64_t{pages.layers} * pages.most_blocks;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, options.slots * home_entries,
                                         &buffers.device_home_tables));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, options.slots * home_entries,
                                         &buffers.host_home_tables));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, options.slots * pages.entries(),
                                         &buffers.device_tables));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, options.slots * pages.entries(), &buffers.host_tables));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, options.slots * 3, &buffers.device_rows));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, options.slots * 3, &buffers.host_rows));
  return std::make_unique<OffloadTierImpl>(options, std::move(pages), std::move(buffers));
}

}  // namespace sluice
