// A path through topics that follows from a formula: a token's topic follows from its number. Every
// 1 / drift tokens the path has turned into another of a few hundred topics, which come back; each
// token also has a little noise of its own. Topics are random directions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace sluice::bench {

struct TopicPath {
  uint64_t seed = 1;
  std::string name;  // Seeds the draws: paths of other names have topics of their own.
  int topics = 256;
  double drift = 0.01;  // Fraction of the way to the next topic per token.
  double noise = 0.05;  // A token's own part; its topic's part is 1.
  int jump = 0;         // Tokens between jumps to an unrelated topic; 0: the path never jumps.

  // Adds to `out` the topic that the path has reached at `token` and the token's noise: elements of
  // variance 1.
  void Add(int64_t token, absl::Span<double> out) const;

 private:
  int64_t TopicOf(double knot) const;
};

// Adds `factor` times row `row` of the matrix of that name to `out`. The matrix has uniform values
// of variance 1, which are the same for the same seed.
void AddUniformRow(const std::string& name, uint64_t seed, int64_t row, double factor,
                   absl::Span<double> out);

}  // namespace sluice::bench
