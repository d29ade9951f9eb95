// Damages good input, a little or a lot, as a broken disk, a broken peer or an attacker does.
// Deterministic in its seed.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace sluice::fuzz {

class Mutator {
 public:
  // `corpus` has good inputs, and texts that are worth putting into them.
  Mutator(uint64_t seed, std::vector<std::string> corpus);

  // Returns one input of the corpus after 1 to 8 mutations, at most `max_bytes` long.
  std::string Next(size_t max_bytes = size_t{64} << 10);
  // Returns a number below `bound`, which is not 0.
  size_t Below(size_t bound) { return random_() % bound; }

 private:
  void Mutate(std::string& text);
  // Puts another number in place of a decimal one, if there is one behind `at`.
  void ReplaceNumber(std::string& text, size_t at);

  std::mt19937_64 random_;
  const std::vector<std::string> corpus_;
};

}  // namespace sluice::fuzz
