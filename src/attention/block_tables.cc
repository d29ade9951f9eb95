#include "src/attention/block_tables.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

BlockTables::BlockTables(Device* device, const CacheLayout& layout, int slots, int64_t max_context)
    : device_(device),
      layers_(layout.layers),
      slots_(slots),
      published_(static_cast<size_t>(slots) * layout.kinds.size()),
      grown_(static_cast<size_t>(slots)) {
  for (const CacheKind& kind : layout.kinds) {
    kinds_.push_back({kind.BlocksFor(max_context), entries_});
    entries_ += int64_t{layers_} * slots_ * kinds_.back().stride;
  }
}

absl::StatusOr<std::unique_ptr<BlockTables>> BlockTables::Create(Device* device,
                                                                 const PagePool& pool, int slots,
                                                                 int64_t max_context) {
  std::unique_ptr<BlockTables> made(new BlockTables(device, pool.layout(), slots, max_context));
  const size_t bytes = static_cast<size_t>(made->entries_) * sizeof(int32_t);
  SLUICE_ASSIGN_OR_RETURN(made->device_tables_,
                          device->Allocate(MemoryKind::kDevice, bytes, "block tables"));
  SLUICE_ASSIGN_OR_RETURN(made->host_tables_,
                          device->Allocate(MemoryKind::kPinned, bytes, "block tables"));
  const size_t list_bytes =
      static_cast<size_t>(made->MostLists()) * (sizeof(int64_t) + sizeof(int32_t));
  for (Batch& batch : made->batches_) {
    SLUICE_ASSIGN_OR_RETURN(
        batch.lists, device->Allocate(MemoryKind::kPinned, list_bytes, "block tables' growth"));
    batch.done = device->NewEvent();
  }
  return made;
}

BlockTables::~BlockTables() {
  for (const Batch& batch : batches_) {
    if (batch.done != nullptr) batch.done->Wait();
  }
}

void BlockTables::Begin(int slot, const SequenceCache& cache, std::vector<Stream::CopyOp>* copies) {
  std::fill_n(published_.begin() + static_cast<int64_t>(slot) * std::ssize(kinds_), kinds_.size(),
              0);
  ForNewEntries(slot, cache, [&](int64_t first, int32_t count) {
    copies->push_back({device_tables_.as<int32_t>() + first, host_tables_.as<int32_t>() + first,
                       static_cast<size_t>(count) * sizeof(int32_t)});
  });
}

void BlockTables::Send(Stream& stream, absl::Span<const int32_t> slots,
                       absl::FunctionRef<const SequenceCache&(int slot)> cache_of) {
  const auto grown = [this](int32_t slot) { return grown_[static_cast<size_t>(slot)]; };
  if (std::none_of(slots.begin(), slots.end(), grown)) return;
  Batch& batch = batches_[next_batch_];
  next_batch_ = (next_batch_ + 1) % batches_.size();
  batch.done->Wait();  // ready already, unless more steps are under way than there are batches
  // One list for each kind and layer of each slot: the first new entry, and the number of new
  // entries.
  auto* const begins = batch.lists.as<int64_t>();
  auto* const counts = reinterpret_cast<int32_t*>(begins + MostLists());
  kernels::TransferParams params{};
  for (const int32_t slot : slots) {
    if (!grown(slot)) continue;
    ForNewEntries(slot, cache_of(slot), [&](int64_t first, int32_t count) {
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

void BlockTables::ForNewEntries(int slot, const SequenceCache& cache,
                                absl::FunctionRef<void(int64_t first, int32_t count)> visit) {
  grown_[static_cast<size_t>(slot)] = false;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    size_t& published = published_[static_cast<size_t>(slot) * kinds_.size() + kind];
    const size_t count = cache.Pages(0, kind).size() - published;
    if (count == 0) continue;
    for (int layer = 0; layer < layers_; ++layer) {
      const int64_t at = EntryOf(kind, layer, slot) + static_cast<int64_t>(published);
      const std::vector<int32_t>& pages = cache.Pages(layer, kind);
      std::copy_n(pages.begin() + static_cast<int64_t>(published), count,
                  host_tables_.as<int32_t>() + at);
      visit(at, static_cast<int32_t>(count));
    }
    published += count;
  }
}

}  // namespace sluice
