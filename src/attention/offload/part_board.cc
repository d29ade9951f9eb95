#include "src/attention/offload/part_board.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace sluice {
namespace {

// Returns parts [0, end), as bits.
uint32_t Bits(int end) {
  return end >= kernels::kMostListParts ? ~uint32_t{0} : (uint32_t{1} << end) - 1;
}

}  // namespace

int PartBoard::MostParts(int32_t capacity, int32_t least_units) {
  // The lists that have the most parts are the longest of those whose parts are the smallest.
  return kernels::PartsOfList(std::min(capacity, kernels::kMostListParts * least_units),
                              least_units);
}

void PartBoard::SetMade(int64_t list) const {
  std::atomic_ref<uint32_t>(words_[list].made).store(1, std::memory_order_release);
}

bool PartBoard::IsMade(int64_t list) const {
  return std::atomic_ref<uint32_t>(words_[list].made).load(std::memory_order_acquire) != 0;
}

int PartBoard::Parts(int64_t list) const {
  return counts_ == nullptr ? 1 : kernels::PartsOfList(counts_[list], least_units_);
}

PartBoard::Units PartBoard::UnitsOf(int64_t list, int part) const {
  const int32_t count = counts_[list];
  const int32_t units = kernels::UnitsOfPart(count, least_units_);
  return {part * units, std::min((part + 1) * units, count)};
}

// Returns whether the part was free, and is the caller's now. The order of claims means nothing,
// because whoever claims a part reads nothing that another claimer wrote.
bool PartBoard::Take(int64_t list, int part, uint32_t* before) const {
  const uint32_t bit = uint32_t{1} << part;
  *before =
      std::atomic_ref<uint32_t>(words_[list].claimed).fetch_or(bit, std::memory_order_relaxed);
  return (*before & bit) == 0;
}

int PartBoard::Claim(int64_t list, int begin, int end) const {
  const uint32_t wanted = Bits(end) & ~Bits(begin);
  uint32_t before = std::atomic_ref<uint32_t>(words_[list].claimed).load(std::memory_order_relaxed);
  while ((wanted & ~before) != 0) {
    const int part = std::countr_zero(wanted & ~before);
    if (Take(list, part, &before)) return part;
  }
  return -1;
}

int PartBoard::ClaimLast(int64_t list) const {
  const uint32_t wanted = Bits(Parts(list));
  uint32_t before = std::atomic_ref<uint32_t>(words_[list].claimed).load(std::memory_order_relaxed);
  while ((wanted & ~before) != 0) {
    const int part = std::bit_width(wanted & ~before) - 1;
    if (Take(list, part, &before)) return part;
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
