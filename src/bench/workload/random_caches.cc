#include "src/bench/workload/random_caches.h"

#include <algorithm>
#include <cstring>

#include "src/base/dtype.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice::bench {

std::vector<uint16_t> RandomValues(size_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<uint16_t> values(count);
  for (size_t i = 0; i < count; i += 4) {
    const uint64_t bits = random();
    for (size_t j = i; j < std::min(i + 4, count); ++j) {
      const auto part = static_cast<int16_t>(bits >> (16 * (j - i)));
      values[j] = FloatToBFloat16(static_cast<float>(part) / 32768);
    }
  }
  return values;
}

absl::Status FillWithRandomValues(Device& device, const PagePool& pool) {
  constexpr size_t kKind = 0;
  // The number of pages is prime, so the pattern repeats across layers and sequences, but never in
  // step with them. 509 pages of an 8B model are 64 MB.
  constexpr size_t kPages = 509;
  const CacheKind& kind = pool.layout().kinds[kKind];
  SLUICE_CHECK(pool.layout().kinds.size() == 1 && kind.element_type == DType::kBFloat16);
  const size_t total = static_cast<size_t>(pool.UsageOf(kKind).capacity_bytes);
  const size_t piece = std::min(total, kPages * static_cast<size_t>(kind.page_bytes()));
  SLUICE_ASSIGN_OR_RETURN(const Buffer values,
                          device.Allocate(MemoryKind::kPinned, piece, "values for the caches"));
  std::memcpy(values.data(), RandomValues(piece / 2, /*seed=*/1).data(), piece);
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCopy);
  for (size_t at = 0; at < total; at += piece) {
    stream->Copy(pool.base(kKind) + at, values.data(), std::min(piece, total - at));
  }
  const std::unique_ptr<Event> done = device.NewEvent();
  stream->Record(*done);
  done->Wait();
  return device.Health();
}

}  // namespace sluice::bench
