// How lists of units are cut into parts, which several processors share.
#pragma once

#include <cstdint>

namespace sluice::kernels {

inline constexpr int32_t kMostListParts = 32;  // bits of a word

// Functions have internal linkage for the reason that scalar.h gives.
namespace {

// Returns the units of every part of a list of `count` units; the last part may have fewer. It is
// `least_units`, or more where that would make too many parts. The cut depends on the list's length
// alone, so that no result depends on who takes which part.
constexpr int32_t UnitsOfPart(int32_t count, int32_t least_units) {
  const int32_t even = (count + kMostListParts - 1) / kMostListParts;
  return even > least_units ? even : least_units;
}

// Returns the parts of a list of `count` units. An empty list has one, so that somebody answers for
// it.
constexpr int32_t PartsOfList(int32_t count, int32_t least_units) {
  const int32_t units = UnitsOfPart(count, least_units);
  const int32_t parts = (count + units - 1) / units;
  return parts > 1 ? parts : 1;
}

}  // namespace
}  // namespace sluice::kernels
