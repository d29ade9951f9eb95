// The static assignment of whole lists to the device or the workers, and its way to the device.
#include "src/attention/policies/fluxion/list_shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
namespace {

using Division = PolicyOptions::Fluxion::Division;

std::vector<float> ByNumber(double share, size_t lists) {
  std::vector<float> shares(lists);
  for (size_t i = 0; i < lists; ++i) {
    const auto before = std::floor(static_cast<double>(i) * share);
    shares[i] = std::floor(static_cast<double>(i + 1) * share) > before ? 1.0f : 0.0f;
  }
  return shares;
}

std::vector<float> ByLength(double share, absl::Span<const int32_t> lengths, int32_t kv_heads) {
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  const auto heads = static_cast<size_t>(kv_heads);
  std::vector<float> shares(lengths.size() * heads);
  double device = 0, workers = 0;  // tokens of the lists that each has so far
  for (const size_t sequence : order) {
    for (size_t head = 0; head < heads; ++head) {
      const double tokens = lengths[sequence];
      // (device + tokens) / share < (workers + tokens) / (1 - share), without a division by 0
      const bool to_device = (device + tokens) * (1 - share) < (workers + tokens) * share;
      shares[sequence * heads + head] = to_device ? 1.0f : 0.0f;
      (to_device ? device : workers) += tokens;
    }
  }
  return shares;
}

}  // namespace

std::vector<float> WholeLists(Division division, double share, absl::Span<const int32_t> lengths,
                              int32_t kv_heads) {
  SLUICE_CHECK(division != Division::kEachList);
  if (division == Division::kLengths) return ByLength(share, lengths, kv_heads);
  return ByNumber(share, lengths.size() * static_cast<size_t>(kv_heads));
}

ListShares::ListShares(const PolicyOptions& options, const FluxionShape& shape)
    : division_(options.fluxion.division),
      share_(FluxionDeviceShare(options)),
      kv_heads_(shape.kv_heads),
      // None of these is a share, so that the first step sends all that it assigns.
      now_(static_cast<size_t>(int64_t{shape.slots} * shape.kv_heads), -1.0f) {}

absl::StatusOr<std::unique_ptr<ListShares>> ListShares::Create(const PolicyOptions& options,
                                                               const FluxionShape& shape) {
  std::unique_ptr<ListShares> made(new ListShares(options, shape));
  const BufferAllocator allocator(options.device, "the device's share of lists");
  const int64_t lists = int64_t{shape.slots} * shape.kv_heads;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists, &made->device_));
  for (Sent& sent : made->sent_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, lists, &sent.shares));
    sent.done = options.device->NewEvent();
  }
  return made;
}

void ListShares::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                           absl::Span<const int32_t> positions) {
  std::vector<int32_t> sequences, lengths;
  for (size_t r = 0; r < slots.size(); ++r) {
    const bool last = r + 1 == slots.size() || slots[r + 1] != slots[r];
    if (slots[r] < 0 || !last) continue;
    sequences.push_back(slots[r]);
    lengths.push_back(positions[r] + 1);
  }
  const std::vector<float> shares = WholeLists(division_, share_, lengths, kv_heads_);
  bool changed = false;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto* const from = shares.data() + static_cast<int64_t>(i) * kv_heads_;
    auto* const to = now_.data() + int64_t{sequences[i]} * kv_heads_;
    changed = changed || !std::equal(from, from + kv_heads_, to);
    std::copy_n(from, kv_heads_, to);
  }
  if (!changed) return;
  Sent& sent = sent_[next_];
  next_ = (next_ + 1) % sent_.size();
  sent.done->Wait();  // ready already, unless more steps are under way than there are buffers
  std::transform(now_.begin(), now_.end(), sent.shares.as<float>(),
                 [](float share) { return std::max(share, 0.0f); });
  stream.Copy(device_.as<float>(), sent.shares.as<float>(), now_.size() * sizeof(float));
  stream.Record(*sent.done);
}

}  // namespace sluice
