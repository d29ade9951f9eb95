#include "src/attention/policies/ess/pool_tables.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
absl::StatusOr<PoolTables> PoolTables::Create(Device* device, PagePool* hbm, PagePool* dram,
                                              int slots, const EssPoolShape& shape) {
  PoolTables t;
  t.shape_ = shape;
  t.hbm_ = hbm;
  t.layers_ = hbm->layout().layers;
  const int64_t places = shape.most_places();
  t.home_blocks_ = dram->layout().kinds[kLatentKind].BlocksFor(shape.max_context);
  t.place_blocks_ = hbm->layout().kinds[kLatentKind].BlocksFor(places);
  t.index_blocks_ = hbm->layout().kinds[kIndexKind].BlocksFor(shape.max_context);
  t.place_of_pages_ = shape.PlaceOfPages(shape.max_context);
  t.places_pages_ = shape.PlacesPages(places);
  t.entries_ = t.place_blocks_ + t.index_blocks_ + t.place_of_pages_ + t.places_pages_;
  const BufferAllocator allocator(device, "ess's page tables");
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, slots * t.stride(), &t.device_table_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, slots * t.stride(), &t.host_table_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, slots * t.home_stride(), &t.device_home_table_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, slots * t.home_stride(), &t.host_home_table_));

  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, slots, &t.whole_));
  const int64_t units = shape.max_context + 1;
  const int64_t words = kRepeated + 2 * kResidencyWords + 3 * units;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &t.constants_));
  Buffer staged;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &staged));
  auto* out = staged.as<int32_t>();
  out = std::fill_n(out, kRepeated, -1);
  for (int64_t i = 0; i < 2 * kResidencyWords; ++i) *out++ = i % 2 == 0 ? kernels::kNoPlace : -1;
  for (int64_t i = 0; i < units; ++i) *out++ = static_cast<int32_t>(i);
  for (int64_t i = 0; i < 2 * units; ++i) *out++ = static_cast<int32_t>(i / 2);
  t.none_ = t.constants_.as<int32_t>();
  t.no_places_ = t.none_ + kRepeated;
  t.index_ = t.no_places_ + 2 * kResidencyWords;
  t.index_rows_ = t.index_ + units;

  const std::unique_ptr<Stream> stream = device->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = device->NewEvent();
  stream->Copy(t.constants_.data(), staged.data(), staged.bytes());
  stream->Record(*done);
  done->Wait();
  SLUICE_RETURN_IF_ERROR(device->Health());
  return t;
}

void PoolTables::Publish(int slot, const SequenceCache& home, const SequenceCache& hbm,
                         const PoolPages& pages, Ops* ops) const {
  // Only steps read the device's copy, and no step has the slot now.
  auto* table = host_table_.as<int32_t>() + slot * stride();
  auto* homes = host_home_table_.as<int32_t>() + slot * home_stride();
  const auto put = [](absl::Span<const int32_t> from, int64_t first, int64_t count, int64_t room,
                      int32_t otherwise, int32_t* to) {
    SLUICE_CHECK(count <= room && first + count <= static_cast<int64_t>(from.size()));
    to = std::copy_n(from.begin() + first, count, to);
    std::fill_n(to, room - count, otherwise);
  };
  const CacheLayout& layout = hbm_->layout();
  const int64_t place_of = shape_.PlaceOfPages(pages.total());
  for (int layer = 0; layer < layers_; ++layer, table += entries_, homes += home_blocks_) {
    const std::vector<int32_t>& entries = home.Pages(layer, kLatentKind);
    put(entries, 0, std::min<int64_t>(static_cast<int64_t>(entries.size()), home_blocks_),
        home_blocks_, -1, homes);
    int32_t* to = table;
    const absl::Span<const int32_t> latents = pages.Latents(layer);
    put(latents, 0, static_cast<int64_t>(latents.size()), place_blocks_, -1, to);
    put(hbm.Pages(layer, kIndexKind), 0, layout.kinds[kIndexKind].BlocksFor(pages.total()),
        index_blocks_, -1, to += place_blocks_);
    const absl::Span<const int32_t> words = pages.Residency(layer);
    put(words, 0, place_of, place_of_pages_, -1, to += index_blocks_);
    // The last page number stands for all the pages that the layer lacks.
    put(words, place_of, shape_.PlacesPages(pages.places(layer)), places_pages_, words.back(),
        to += place_of_pages_);
  }
  const auto send = [&](const Buffer& target, const Buffer& source, int64_t count) {
    ops->push_back({target.as<int32_t>() + slot * count, source.as<int32_t>() + slot * count,
                    static_cast<size_t>(count) * sizeof(int32_t)});
  };
  send(device_table_, host_table_, stride());
  send(device_home_table_, host_home_table_, home_stride());
  ops->push_back({whole_.as<int32_t>() + slot, index_, sizeof(int32_t)});  // 0
}

void PoolTables::CopyWords(absl::Span<const int32_t> pages, int64_t word, int64_t count,
                           const int32_t* source, bool repeat, Ops* ops) const {
  for (const int64_t end = word + count; word < end;) {
    auto page = static_cast<size_t>(word / kResidencyWords);
    const int64_t first = word % kResidencyWords;
    auto* target =
        reinterpret_cast<int32_t*>(hbm_->PageAddress(kResidencyKind, pages[page])) + first;
    int64_t n = kResidencyWords - first;
    for (; word + n < end && pages[page + 1] == pages[page] + 1; ++page) n += kResidencyWords;
    n = std::min(n, end - word);
    if (repeat) n = std::min(n, kRepeated);
    ops->push_back({target, source, static_cast<size_t>(n) * sizeof(int32_t)});
    if (!repeat) source += n;
    word += n;
  }
}

void PoolTables::Clear(const PoolPages& pages, Ops* first, Ops* then) const {
  for (int layer = 0; layer < layers_; ++layer) {
    const absl::Span<const int32_t> own = pages.Residency(layer);
    const int64_t words = static_cast<int64_t>(own.size()) * kResidencyWords;
    const int64_t end = PlacesWord(pages.total(), pages.places(layer));
    CopyWords(own, 0, words, none_, true, first);
    if (end < words) CopyWords(own, end, words - end, no_places_, false, then);
  }
}

void PoolTables::FillWhole(int slot, const PoolPages& pages, int64_t tokens, Ops* ops) const {
  for (int layer = 0; layer < layers_; ++layer) {
    SLUICE_CHECK(tokens < pages.places(layer) && tokens <= pages.total());
    const absl::Span<const int32_t> own = pages.Residency(layer);
    CopyWords(own, PlaceOfWord(0), tokens + 1, index_, false, ops);
    CopyWords(own, PlacesWord(pages.total(), 0), (tokens + 1) * kPlaceWords, index_rows_, false,
              ops);
  }
  ops->push_back({whole_.as<int32_t>() + slot, index_ + 1, sizeof(int32_t)});  // 1
}

const int32_t* PoolTables::home_table(int layer) const {
  return device_home_table_.as<int32_t>() + layer * home_blocks_;
}

kernels::ResidencyTable PoolTables::Residency(int layer) const {
  const auto rows = [&](int64_t entry, int32_t dim) {
    kernels::PagedRows out;
    out.base = hbm_->base(kResidencyKind);
    out.page_table = at(layer, entry);
    out.table_stride = stride();
    out.page_bytes = out.head_bytes = hbm_->layout().kinds[kResidencyKind].page_bytes();
    out.rows_per_page = static_cast<int32_t>(kResidencyWords / dim);
    out.dim = dim;
    out.type = kernels::DType::kFloat32;
    out.kv_heads = 1;
    return out;
  };
  kernels::ResidencyTable table;
  table.place_of = rows(place_blocks_ + index_blocks_, 1);
  table.places = rows(place_blocks_ + index_blocks_ + place_of_pages_, kPlaceWords);
  table.ring = 0;
  table.count = static_cast<int32_t>(shape_.MostPlaces(layer));
  return table;
}

}  // namespace sluice
