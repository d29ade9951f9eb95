// KvEvent is a change of a prefix cache that waits to be published.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace sluice {

struct KvEvent {
  enum class Kind {
    kStored,   // others find the units from now on
    kRemoved,  // nobody finds them any more
    kCleared,  // nothing that was said before holds; what is there follows
  };
  Kind kind = Kind::kCleared;
  std::vector<uint64_t> hashes;    // of each unit
  std::optional<uint64_t> parent;  // kStored: the unit before the first; none: the prompt begins
  std::vector<int32_t> tokens;     // kStored: of all units
};

}  // namespace sluice
