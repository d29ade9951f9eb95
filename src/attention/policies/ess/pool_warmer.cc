#include "src/attention/policies/ess/pool_warmer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/host_threads.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr int64_t kListsOfRow = 4 + kPlaceWords;  // Words that one entry takes in all lists.

}  // namespace

absl::StatusOr<std::unique_ptr<PoolWarmer>> PoolWarmer::Create(Device* device, PagePool* hbm,
                                                               PagePool* dram, int slots,
                                                               int64_t most_places) {
  // One more entry is the next token's.
  std::unique_ptr<PoolWarmer> made(
      new PoolWarmer(device, hbm, dram, slots, std::min(most_places, kMostEntries + 1)));
  const BufferAllocator allocator(device, "lists of warm-ups");
  const int64_t words = made->layers_ * (kListsOfRow * made->capacity_ + 1);
  for (Staging& staging : made->stagings_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &staging.host));
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &staging.device));
    staging.done = device->NewEvent();
  }
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, made->capacity_, &made->index_));
  auto* index = made->stagings_[0].host.as<int32_t>();
  for (int64_t i = 0; i < made->capacity_; ++i) index[i] = static_cast<int32_t>(i);
  made->stream_->Copy(made->index_.data(), index, made->index_.bytes());
  made->stream_->Record(*made->stagings_[0].done);
  made->stagings_[0].done->Wait();
  SLUICE_RETURN_IF_ERROR(device->Health());
  if (HasThreads(*device)) made->thread_ = std::thread([warmer = made.get()] { warmer->Loop(); });
  return made;
}

PoolWarmer::PoolWarmer(Device* device, PagePool* hbm, PagePool* dram, int slots, int64_t capacity)
    : device_(device),
      hbm_(hbm),
      dram_(dram),
      layers_(hbm->layout().layers),
      capacity_(capacity),
      slots_(static_cast<size_t>(slots)),
      stream_(device->NewStream(Device::StreamKind::kCompute)) {
  for (Slot& slot : slots_) slot.moved = device->NewEvent();
}

PoolWarmer::~PoolWarmer() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
  for (Staging& staging : stagings_) {
    if (staging.done != nullptr) staging.done->Wait();
  }
}

void PoolWarmer::Loop() {
  pthread_setname_np(pthread_self(), "ess-warm-up");
  while (true) {
    Job job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(
          +[](PoolWarmer* w)
               ABSL_EXCLUSIVE_LOCKS_REQUIRED(w->mutex_) { return w->stop_ || !w->jobs_.empty(); },
          this));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    Run(std::move(job));
  }
}

void PoolWarmer::Start(int slot, WarmUp warm_up) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(s.Ready(), "a slot is warmed once at a time");
  s.enqueued.store(false, std::memory_order_relaxed);
  Job job{slot, std::move(warm_up)};
  if (!thread_.joinable()) return Run(std::move(job));
  absl::MutexLock lock(&mutex_);
  jobs_.push_back(std::move(job));
}

PoolWarmer::Lists PoolWarmer::ListsAt(const Buffer& buffer, int64_t capacity) const {
  Lists lists{};
  auto* at = buffer.as<int32_t>();
  for (int32_t** list : {&lists.sources, &lists.targets, &lists.place_of, &lists.places}) {
    *list = std::exchange(at, at + layers_ * capacity);
  }
  lists.rows = std::exchange(at, at + layers_ * capacity * kPlaceWords);
  lists.counts = at;
  lists.capacity = capacity;
  lists.words = layers_ * (kListsOfRow * capacity + 1);
  return lists;
}

void PoolWarmer::Write(const WarmUp& warm_up, WarmPlan* plan, const Lists& lists) const {
  const Sequence& sequence = warm_up.sequence;
  const auto entry = [](absl::Span<const int32_t> pages, int64_t block, int64_t i) {
    return static_cast<int32_t>(pages[static_cast<size_t>(i / block)] * block + i % block);
  };
  const int64_t home_block = dram_->layout().kinds[kLatentKind].block_tokens;
  const int64_t pool_block = hbm_->layout().kinds[kLatentKind].block_tokens;
  const int64_t place_rows = kResidencyWords / kPlaceWords;
  std::vector<WarmEntry> entries;
  for (int layer = 0; layer < layers_; ++layer) {
    const int64_t room = std::min(lists.capacity, sequence.pool->places(layer));
    if (plan != nullptr) entries = plan->Of(layer, room - 1);
    const auto next = static_cast<int32_t>(warm_up.tokens);
    entries.push_back({next, next});
    const auto count = static_cast<int64_t>(entries.size());
    const absl::Span<const int32_t> home = sequence.home->Pages(layer, kLatentKind);
    const absl::Span<const int32_t> pool = sequence.pool->Latents(layer);
    const absl::Span<const int32_t> tables = sequence.pool->Residency(layer);
    for (int64_t i = 0, at = layer * lists.capacity; i < count; ++i, ++at) {
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

void PoolWarmer::Run(Job job) {
  Slot& slot = slots_[static_cast<size_t>(job.slot)];
  const WarmUp& warm_up = job.warm_up;
  bool fill = warm_up.fill;
  if (SLUICE_FAILPOINT(kAttentionWarmUp)) {
    slot.status = WithReason(
        absl::InternalError("the entries that the sequence begins with did not reach HBM "
                            "(failpoint attention.warm_up); send the request again"),
        reasons::kTransferFailed);
    fill = false;  // A row that comes before the sequence ends still finds its place.
  }
  Staging& staging = stagings_[next_];
  next_ = (next_ + 1) % stagings_.size();
  staging.done->Wait();
  // The lists are only as long as this sequence needs, so that no more is sent.
  const int64_t capacity = std::min(warm_up.sequence.pool->most_places(), capacity_);
  if (fill) {
    WarmPlan plan(warm_up.hints, warm_up.tokens);
    Write(warm_up, &plan, ListsAt(staging.host, capacity));
  } else {
    Write(warm_up, nullptr, ListsAt(staging.host, capacity));
  }
  const Lists lists = ListsAt(staging.device, capacity);
  stream_->WaitFor(*warm_up.before);
  stream_->Copy(staging.device.data(), staging.host.data(), static_cast<size_t>(lists.words) * 4);
  const auto transfer = [&](const void* source, void* target, int64_t bytes) {
    kernels::TransferParams move{};
    move.source = source;
    move.target = target;
    move.source_pitch = move.target_pitch = bytes;
    move.unit_bytes = static_cast<int32_t>(bytes);
    move.counts = lists.counts;
    move.lists = layers_;
    move.capacity = static_cast<int32_t>(capacity);
    move.max_workers = kWorkers;
    return move;
  };
  uint8_t* const tables = hbm_->base(kResidencyKind);
  kernels::TransferParams place_of = transfer(index_.data(), tables, sizeof(int32_t));
  place_of.target_units = lists.place_of;
  device_->kernels().Transfer(*stream_, place_of);
  kernels::TransferParams places = transfer(lists.rows, tables, kPlaceWords * sizeof(int32_t));
  places.source_stride = capacity * kPlaceWords * int64_t{sizeof(int32_t)};
  places.target_units = lists.places;
  device_->kernels().Transfer(*stream_, places);
  kernels::TransferParams entries = transfer(dram_->base(kLatentKind), hbm_->base(kLatentKind),
                                             hbm_->layout().kinds[kLatentKind].bytes_per_token);
  entries.source_units = lists.sources;
  entries.target_units = lists.targets;
  device_->kernels().Transfer(*stream_, entries);
  stream_->Record(*staging.done);
  stream_->Record(*slot.moved);
  slot.enqueued.store(true, std::memory_order_release);
  slot.enqueued.notify_all();
}

}  // namespace sluice
