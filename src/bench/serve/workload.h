// The load of `sluice-bench serve`: when requests come, and how long their prompts and outputs are.
// Pure: a phase's requests follow from its description and its seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/base/rng.h"

namespace sluice::bench {

// A number of tokens: always N, or drawn as exp(N(log median, sigma)) and cut to [1, most].
struct Lengths {
  int64_t median = 1;
  double sigma = 0;  // 0: always the median.

  // Parses "512" or "lognormal:512:0.6" (median, sigma).
  static absl::StatusOr<Lengths> Parse(const std::string& text);
  std::string ToString() const;
  int64_t Draw(SplitMix64& random, int64_t most) const;
};

// One stretch of load. Phases follow each other without a pause. A request belongs to the phase in
// which it came, even if it ends later.
struct Phase {
  std::string name;
  // One of `rate` and `concurrency` is set. Open loop: requests come at random (a Poisson process),
  // whatever became of earlier ones. Closed loop: so many run at once, including those left from
  // earlier phases; each one that ends is replaced.
  double rate = 0;              // Requests/s.
  bool rate_is_factor = false;  // `rate` times the requests/s that the previous phase finished.
  int64_t concurrency = 0;
  // The phase ends after so many requests have come, or after so much time; one of these is set.
  int64_t requests = 0;
  double seconds = 0;
  // True: a refused request (RESOURCE_EXHAUSTED) is retried after its RetryInfo. False: it ends.
  bool retry = true;

  // Parses "name=full,concurrency=64,seconds=30" or
  // "name=over,rate=4x,seconds=180,on-refusal=count". The error names the key and the values that
  // it takes.
  static absl::StatusOr<Phase> Parse(const std::string& text);
  // Checks that the numbers make a phase. The error names what is wrong.
  absl::Status Check() const;
  std::string ToString() const;
};

struct PlannedRequest {
  double at = 0;  // Seconds after the phase began; closed loop: 0.
  int64_t prompt = 0, output = 0;
  uint64_t seed = 0;
};

// Generates the requests of a phase, one by one.
class Arrivals {
 public:
  // `most` bounds the tokens of prompt and output together.
  Arrivals(const Phase& phase, const Lengths& prompt, const Lengths& output, int64_t most,
           uint64_t seed);
  PlannedRequest Next();

 private:
  const Phase phase_;
  const Lengths prompt_, output_;
  const int64_t most_;
  SplitMix64 times_, lengths_;
  double at_ = 0;
};

}  // namespace sluice::bench
