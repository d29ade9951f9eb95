// Ids that do not convert into each other.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <utility>

namespace sluice {

template <typename Tag, typename T = uint64_t>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(T value) : value_(value) {}
  constexpr T value() const { return value_; }
  friend constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend constexpr auto operator<=>(StrongId a, StrongId b) { return a.value_ <=> b.value_; }
  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }
  friend std::ostream& operator<<(std::ostream& os, StrongId id) { return os << id.value_; }

 private:
  T value_{};
};

using SequenceId = StrongId<struct SequenceIdTag>;

}  // namespace sluice
