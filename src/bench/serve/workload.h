// What `sluice-bench serve` asks for: when requests come, how long their prompts and outputs are.
// Pure: a phase's requests follow from its description and its seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/base/rng.h"

namespace sluice::bench {

// A number of tokens: N always, or drawn as exp(N(log median, sigma)), cut to [1, most].
struct Lengths {
  int64_t median = 1;
  double sigma = 0;  // 0: always the median

  // "512", or "lognormal:512:0.6" (median, sigma).
  static absl::StatusOr<Lengths> Parse(const std::string& text);
  std::string ToString() const;
  int64_t Draw(SplitMix64& random, int64_t most) const;
};

// One stretch of load. Phases follow each other without a pause: a request belongs to the phase in
// which it came, also if it ends later.
struct Phase {
  std::string name;
  // One of these is set. Open loop: requests come at random (a Poisson process), whatever became of
  // those before. Closed loop: so many at once, what earlier phases left among them, each that ends
  // replaced.
  double rate = 0;              // requests/s
  bool rate_is_factor = false;  // `rate` times what the phase before finished per second
  int64_t concurrency = 0;
  // It ends after so many requests have come, or so much time; one of these is set.
  int64_t requests = 0;
  double seconds = 0;
  // What a refusal (RESOURCE_EXHAUSTED) is: asked again after its RetryInfo, or the end.
  bool retry = true;

  // "name=full,concurrency=64,seconds=30"; "name=over,rate=4x,seconds=180,on-refusal=count". The
  // error names the key and what it takes.
  static absl::StatusOr<Phase> Parse(const std::string& text);
  // Whether the numbers make a phase; names `what` is wrong.
  absl::Status Check() const;
  std::string ToString() const;
};

struct PlannedRequest {
  double at = 0;  // seconds after the phase began; closed loop: 0
  int64_t prompt = 0, output = 0;
  uint64_t seed = 0;
};

// The requests of a phase, one by one.
class Arrivals {
 public:
  // `most`: tokens of prompt and output together.
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
