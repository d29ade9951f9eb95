// A path through topics, from a formula: what a token is about follows from its number. Every 1 /
// drift tokens the path has turned into another of a few hundred topics, which come back; a token
// has a little noise of its own besides. Topics are random directions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace sluice::bench {

struct TopicPath {
  uint64_t seed = 1;
  std::string name;  // of the draws: paths of other names have topics of their own
  int topics = 256;
  double drift = 0.01;  // of the way to the next topic that a token goes
  double noise = 0.05;  // a token's own part; its topic's part is 1

  // out += the topic that the path has reached at `token`, and the token's noise: elements of
  // variance 1.
  void Add(int64_t token, absl::Span<double> out) const;

 private:
  int64_t TopicOf(double knot) const;
};

// out += factor x, element for element, of row `row` of a matrix of that name: uniform values of
// variance 1, the same for the same seed.
void AddUniformRow(const std::string& name, uint64_t seed, int64_t row, double factor,
                   absl::Span<double> out);

}  // namespace sluice::bench
