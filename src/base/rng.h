// Random numbers: from the system for ids and seeds that nobody may guess, and from a small seeded
// generator for runs that must repeat.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// Fills `bytes` bytes from getrandom(2). Thread-safe.
void RandomBytes(void* out, size_t bytes);

// Returns 64 random bits from getrandom(2). Thread-safe.
uint64_t RandomU64();

// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
// Every seed is a good one. It satisfies UniformRandomBitGenerator. Not thread-safe.
class SplitMix64 {
 public:
  using result_type = uint64_t;

  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}

  constexpr uint64_t operator()() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  // Returns a number that is uniform in [0, 1), with 53 bits.
  constexpr double Uniform() { return static_cast<double>((*this)() >> 11) * 0x1.0p-53; }

  // Returns a number that is uniform in [0, bound), but for a bias of at most bound / 2^64.
  // REQUIRES: bound > 0.
  constexpr uint64_t Below(uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<Wide>((*this)()) * bound) >> 64);
  }

  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }

 private:
  uint64_t state_;
};

}  // namespace sluice
