#include "tests/sim/hints.h"

#include <limits>

#include "tests/sim/hash.h"
#include "tests/sim/scenario.h"

namespace sluice::sim {

SelectionHints DrawHints(SplitMix64& random, const HintShape& shape) {
  SelectionHints hints;
  hints.unit_tokens = OneIn(random, 3) ? shape.block_tokens : 1;
  const uint32_t units = (shape.context + hints.unit_tokens - 1) / hints.unit_tokens;
  const auto most =
      shape.places > 0 ? static_cast<uint64_t>(shape.places) / hints.unit_tokens : units;
  for (uint64_t i = random.Below(8); i > 0; --i) {
    SelectionHints::Entry& entry = hints.entries.emplace_back();
    entry.layer = static_cast<uint32_t>(random.Below(kLayers));
    if (OneIn(random, 2)) entry.position = static_cast<uint32_t>(random.Below(shape.context));
    const uint64_t part = 1 + random.Below(4);
    for (uint32_t u = 0; u < units && entry.units.size() < most; ++u) {
      if (OneIn(random, part)) entry.units.push_back(u);
    }
  }
  if (shape.queries > 0 && OneIn(random, 2)) {
    for (int64_t i = 0; i < shape.queries; ++i) {
      hints.queries.push_back(static_cast<float>(random.Uniform() - 0.5));
    }
    if (OneIn(random, 4)) hints.queries[0] = std::numeric_limits<float>::quiet_NaN();
  }
  return hints;
}

}  // namespace sluice::sim
