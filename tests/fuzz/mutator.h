// Damages good input, a little or a lot: what a parser meets from a broken disk, a broken peer, or
// one who means it. Deterministic in its seed.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace sluice::fuzz {

class Mutator {
 public:
  // `corpus`: good inputs, and texts that are worth putting into them.
  Mutator(uint64_t seed, std::vector<std::string> corpus);

  // One of the corpus, after 1 to 8 mutations; at most `max_bytes` long.
  std::string Next(size_t max_bytes = size_t{64} << 10);
  // Below `bound`, which is not 0.
  size_t Below(size_t bound) { return random_() % bound; }

 private:
  void Mutate(std::string& text);
  // Another number in place of one that is written in decimal, if there is one behind `at`.
  void ReplaceNumber(std::string& text, size_t at);

  std::mt19937_64 random_;
  const std::vector<std::string> corpus_;
};

}  // namespace sluice::fuzz
