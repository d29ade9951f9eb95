#include "src/attention/offload/selection_counters.h"

#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<SelectionCounters>> SelectionCounters::Create(
    Device* device, int slots, const CacheLayout& layout) {
  const size_t bytes = static_cast<size_t>(layout.layers) * static_cast<size_t>(slots) *
                       sizeof(kernels::SparseCounters);
  SLUICE_ASSIGN_OR_RETURN(
      Buffer on_device, device->Allocate(MemoryKind::kDevice, bytes, "the counters of selection"));
  SLUICE_ASSIGN_OR_RETURN(
      Buffer on_host, device->Allocate(MemoryKind::kPinned, bytes, "the counters of selection"));
  SLUICE_ASSIGN_OR_RETURN(
      Buffer looked, device->Allocate(MemoryKind::kPinned, bytes, "the counters of selection"));
  return std::unique_ptr<SelectionCounters>(new SelectionCounters(
      device, slots, layout, std::move(on_device), std::move(on_host), std::move(looked)));
}

SelectionCounters::SelectionCounters(Device* device, int slots, const CacheLayout& layout,
                                     Buffer on_device, Buffer on_host, Buffer looked)
    : slots_(slots),
      layout_(layout),
      device_(std::move(on_device)),
      host_(std::move(on_host)),
      looked_(std::move(looked)),
      look_done_(device->NewEvent()),
      copied_(device->NewEvent()),
      stream_(device->NewStream(Device::StreamKind::kCopy)) {}

PolicyStatistics SelectionCounters::Sum() const {
  stream_->Copy(host_.data(), device_.data(), host_.bytes());
  stream_->Record(*copied_);
  copied_->Wait();
  PolicyStatistics sums;
  SumOf(host_, &sums);
  return sums;
}

void SelectionCounters::PollCounters(Stream& stream) {
  if (looking_) return;
  stream.Copy(looked_.data(), device_.data(), looked_.bytes());
  stream.Record(*look_done_);
  looking_ = true;
}

bool SelectionCounters::Take(PolicyStatistics* sums) {
  if (!looking_ || !look_done_->Ready()) return false;
  looking_ = false;
  SumOf(looked_, sums);
  return true;
}

void SelectionCounters::SumOf(const Buffer& host, PolicyStatistics* sums) const {
  const CacheKind& kv = layout_.kinds[0];
  sums->layers.resize(static_cast<size_t>(layout_.layers));
  const auto* counters = host.as<kernels::SparseCounters>();
  for (PolicyStatistics::Layer& of : sums->layers) {
    of = {};
    int64_t read = 0;
    for (int slot = 0; slot < slots_; ++slot, ++counters) {
      of.steps += counters->steps;
      of.selected += counters->selected;
      of.missing += counters->missing;
      of.recalled += counters->recalled;
      of.recalls += counters->recalls;
      of.lookups += counters->lookups;
      of.misses += counters->misses;
      of.resident_selected += counters->held;
      read += counters->read;
    }
    of.link_bytes = (of.recalled + read + of.steps * kv.heads) * kv.bytes_per_token;
  }
}

}  // namespace sluice
