#include "src/attention/policies/ess/pool_warmer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<PoolWarmer>> PoolWarmer::Create(Device* device, PagePool* hbm,
                                                               PagePool* dram,
                                                               int64_t most_places) {
  // One more is the next token's.
  std::unique_ptr<PoolWarmer> made(
      new PoolWarmer(device, hbm, dram, std::min(most_places, kMostEntries + 1)));
  const auto allocate = [&](Buffer* buffer, MemoryKind kind, int64_t words) -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(
        *buffer, device->Allocate(kind, static_cast<size_t>(words) * 4, "lists of warm-ups"));
    return absl::OkStatus();
  };
  for (Staging& staging : made->stagings_) {
    SLUICE_RETURN_IF_ERROR(allocate(&staging.host, MemoryKind::kPinned, made->words()));
    SLUICE_RETURN_IF_ERROR(allocate(&staging.device, MemoryKind::kDevice, made->words()));
    staging.done = device->NewEvent();
  }
  SLUICE_RETURN_IF_ERROR(allocate(&made->index_, MemoryKind::kDevice, made->capacity_));
  auto* index = made->stagings_[0].host.as<int32_t>();
  for (int64_t i = 0; i < made->capacity_; ++i) index[i] = static_cast<int32_t>(i);
  made->stream_->Copy(made->index_.data(), index, made->index_.bytes());
  made->stream_->Record(*made->stagings_[0].done);
  made->stagings_[0].done->Wait();
  SLUICE_RETURN_IF_ERROR(device->Health());
  return made;
}

PoolWarmer::PoolWarmer(Device* device, PagePool* hbm, PagePool* dram, int64_t capacity)
    : device_(device),
      hbm_(hbm),
      dram_(dram),
      layers_(hbm->layout().layers),
      capacity_(capacity),
      stream_(device->NewStream(Device::StreamKind::kCompute)) {}

PoolWarmer::~PoolWarmer() {
  for (Staging& staging : stagings_) {
    if (staging.done != nullptr) staging.done->Wait();
  }
}

PoolWarmer::Lists PoolWarmer::ListsAt(const Buffer& buffer) const {
  Lists lists{};
  auto* at = buffer.as<int32_t>();
  for (int32_t** list : {&lists.sources, &lists.targets, &lists.place_of, &lists.places}) {
    *list = std::exchange(at, at + layers_ * capacity_);
  }
  lists.rows = std::exchange(at, at + layers_ * capacity_ * kPlaceWords);
  lists.counts = at;
  return lists;
}

void PoolWarmer::Write(const Sequence& sequence, int64_t tokens, WarmPlan* plan,
                       const Lists& lists) const {
  const int64_t room = std::min(sequence.places, capacity_) - 1;
  const auto entry = [](const std::vector<int32_t>& pages, int64_t block, int64_t i) {
    return static_cast<int32_t>(pages[static_cast<size_t>(i / block)] * block + i % block);
  };
  const int64_t home_block = dram_->layout().kinds[kLatentKind].block_tokens;
  const int64_t pool_block = hbm_->layout().kinds[kLatentKind].block_tokens;
  const int64_t place_rows = kResidencyWords / kPlaceWords;
  std::vector<WarmEntry> entries;
  for (int layer = 0; layer < layers_; ++layer) {
    if (plan != nullptr) entries = plan->Of(layer, room);
    entries.push_back({static_cast<int32_t>(tokens), static_cast<int32_t>(tokens)});
    const auto count = static_cast<int64_t>(entries.size());
    const std::vector<int32_t>& home = sequence.home->Pages(layer, kLatentKind);
    const std::vector<int32_t>& pool = sequence.hbm->Pages(layer, kLatentKind);
    const std::vector<int32_t>& tables = sequence.hbm->Pages(layer, kResidencyKind);
    for (int64_t i = 0, at = layer * capacity_; i < count; ++i, ++at) {
      const WarmEntry& warm = entries[static_cast<size_t>(i)];
      // The next token has a place and no entry.
      lists.sources[at] = i + 1 == count ? -1 : entry(home, home_block, warm.unit);
      lists.targets[at] = entry(pool, pool_block, i);
      lists.place_of[at] = entry(tables, kResidencyWords, warm.unit);
      lists.places[at] = entry(tables, place_rows, sequence.place_of_pages * place_rows + i);
      lists.rows[2 * at] = warm.unit;
      lists.rows[2 * at + 1] = warm.stamp;
    }
    lists.counts[layer] = static_cast<int32_t>(count);
    entries.clear();
  }
}

void PoolWarmer::Start(const Sequence& sequence, int64_t tokens, WarmPlan* plan, Event& before,
                       Event& done) {
  Staging& staging = stagings_[next_];
  next_ = (next_ + 1) % stagings_.size();
  staging.done->Wait();  // it was, unless more warm-ups are under way than there are stagings
  Write(sequence, tokens, plan, ListsAt(staging.host));
  const Lists lists = ListsAt(staging.device);
  stream_->WaitFor(before);
  stream_->Copy(staging.device.data(), staging.host.data(), staging.host.bytes());
  const auto transfer = [&](const void* source, void* target, int64_t bytes) {
    kernels::TransferParams move{};
    move.source = source;
    move.target = target;
    move.source_pitch = move.target_pitch = bytes;
    move.unit_bytes = static_cast<int32_t>(bytes);
    move.counts = lists.counts;
    move.lists = layers_;
    move.capacity = static_cast<int32_t>(capacity_);
    move.max_workers = kWorkers;
    return move;
  };
  uint8_t* const tables = hbm_->base(kResidencyKind);
  kernels::TransferParams place_of = transfer(index_.data(), tables, sizeof(int32_t));
  place_of.target_units = lists.place_of;
  device_->kernels().Transfer(*stream_, place_of);
  kernels::TransferParams places = transfer(lists.rows, tables, kPlaceWords * sizeof(int32_t));
  places.source_stride = capacity_ * kPlaceWords * int64_t{sizeof(int32_t)};
  places.target_units = lists.places;
  device_->kernels().Transfer(*stream_, places);
  kernels::TransferParams entries = transfer(dram_->base(kLatentKind), hbm_->base(kLatentKind),
                                             hbm_->layout().kinds[kLatentKind].bytes_per_token);
  entries.source_units = lists.sources;
  entries.target_units = lists.targets;
  device_->kernels().Transfer(*stream_, entries);
  stream_->Record(*staging.done);
  stream_->Record(done);
}

}  // namespace sluice
