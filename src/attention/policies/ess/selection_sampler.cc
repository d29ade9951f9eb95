#include "src/attention/policies/ess/selection_sampler.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {

SelectionSampler::SelectionSampler(int layers, int top_k, Done done)
    : top_k_(top_k), done_(std::move(done)), reuse_(layers, top_k) {}

absl::StatusOr<std::unique_ptr<SelectionSampler>> SelectionSampler::Create(Device* device,
                                                                           int layers, int top_k,
                                                                           Done done) {
  std::unique_ptr<SelectionSampler> sampler(new SelectionSampler(layers, top_k, std::move(done)));
  const int64_t words = int64_t{layers} * top_k;
  const BufferAllocator memory(device, "ess's sampled selections");
  SLUICE_RETURN_IF_ERROR(memory.Words(MemoryKind::kDevice, words, &sampler->lists_));
  sampler->copies_.resize(kCopies);
  for (Copy& copy : sampler->copies_) {
    SLUICE_RETURN_IF_ERROR(memory.Words(MemoryKind::kPinned, words, &copy.lists));
    copy.done = device->NewEvent();
  }
  sampler->thread_ = std::thread([s = sampler.get()] { s->Run(); });
  return sampler;
}

SelectionSampler::~SelectionSampler() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void SelectionSampler::Sample(Stream& stream, int layer, const kernels::UnitLists& lists) const {
  const auto words = static_cast<size_t>(top_k_);
  stream.Copy(lists_.as<int32_t>() + static_cast<size_t>(layer) * words, lists.units,
              words * sizeof(int32_t));
}

void SelectionSampler::BeginStep(Stream& stream, int32_t slot, int64_t position) {
  const Row before = std::exchange(before_, {slot, position});
  if (!active() || before.slot < 0) return;
  absl::MutexLock lock(&mutex_);
  const auto free =
      std::find_if(copies_.begin(), copies_.end(), [](const Copy& c) { return c.free; });
  if (free == copies_.end()) return;  // The thread is behind, and skips the step.
  free->free = false;
  stream.Copy(free->lists.data(), lists_.data(), lists_.bytes());
  stream.Record(*free->done);
  queue_.emplace_back(free - copies_.begin(), before);
}

void SelectionSampler::Run() {
  const auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stop_ || !queue_.empty();
  };
  while (active()) {
    std::pair<size_t, Row> next;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&wanted));
      if (stop_) return;
      next = queue_.front();
      queue_.pop_front();
    }
    Copy& copy = copies_[next.first];
    copy.done->Wait();
    Count(copy, next.second);
    absl::MutexLock lock(&mutex_);
    copy.free = true;
  }
}

void SelectionSampler::Count(const Copy& copy, Row row) {
  const int64_t ahead = row.position - counted_.position;
  if (row.slot != counted_.slot || ahead < 1 || ahead > kMostSkipped + 1) reuse_.Begin();
  counted_ = row;
  reuse_.Add(row.position + 1, {copy.lists.as<int32_t>(), copy.lists.bytes() / sizeof(int32_t)});
  if (!reuse_.done()) return;
  active_.store(false, std::memory_order_relaxed);
  done_(reuse_.Points());
}

}  // namespace sluice
