#include "src/attention/offload/part_board.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace sluice {
namespace {

int32_t CeilDiv(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Returns parts [0, end), as bits.
uint32_t Bits(int end) {
  return end >= PartBoard::kMostParts ? ~uint32_t{0} : (uint32_t{1} << end) - 1;
}

}  // namespace

int32_t PartBoard::UnitsOfPart(int32_t count, int32_t least_units) {
  return std::max(least_units, CeilDiv(count, kMostParts));
}

int PartBoard::MostParts(int32_t capacity, int32_t least_units) {
  return std::clamp(CeilDiv(capacity, least_units), 1, kMostParts);
}

int PartBoard::Parts(int64_t list) const {
  if (counts_ == nullptr) return 1;
  const int32_t count = counts_[list];
  return std::max(CeilDiv(count, UnitsOfPart(count, least_units_)), 1);
}

PartBoard::Units PartBoard::UnitsOf(int64_t list, int part) const {
  const int32_t count = counts_[list];
  const int32_t units = UnitsOfPart(count, least_units_);
  return {part * units, std::min((part + 1) * units, count)};
}

// The order of claims means nothing, because whoever claims a part reads nothing that another
// claimer wrote.
int PartBoard::Claim(int64_t list, int begin, int end) const {
  const std::atomic_ref<uint32_t> claimed(words_[list].claimed);
  const uint32_t wanted = Bits(end) & ~Bits(begin);
  uint32_t free = wanted & ~claimed.load(std::memory_order_relaxed);
  while (free != 0) {
    const int part = std::countr_zero(free);
    const uint32_t bit = uint32_t{1} << part;
    const uint32_t before = claimed.fetch_or(bit, std::memory_order_relaxed);
    if ((before & bit) == 0) return part;
    free = wanted & ~before;
  }
  return -1;
}

bool PartBoard::Finish(int64_t list, int part) const {
  const uint32_t bit = uint32_t{1} << part;
  const uint32_t before =
      std::atomic_ref<uint32_t>(words_[list].done).fetch_or(bit, std::memory_order_acq_rel);
  return (before & bit) == 0 && (before | bit) == Bits(Parts(list));
}

}  // namespace sluice
