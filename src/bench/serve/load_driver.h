// The client side of `sluice-bench serve`: one thread and one completion queue drive every request
// through Reserve, Write, Commit and Generate, several hundred at once. What it notes of a request
// is plain data; serve_stats.h makes figures of it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/admin.pb.h"
#include "src/bench/serve/kv_source.h"
#include "src/bench/serve/workload.h"

namespace sluice::bench {

// Times are seconds since the run began; 0: it did not come to that.
struct RequestRecord {
  size_t phase = 0;
  int64_t prompt_tokens = 0;
  int64_t output_wanted = 0, output_tokens = 0;
  double due = 0;        // when it was to come; everything is counted from here
  double reserved = 0;   // the reservation that was not refused
  double committed = 0;  // its caches are there
  double first_token = 0, last_token = 0;
  double end = 0;
  std::vector<float> gaps;      // between messages that carry tokens
  std::vector<float> gap_ends;  // when each was over
  uint32_t refusals = 0;
  uint32_t refusals_without_retry_info = 0;
  double longest_retry_delay = 0;  // that a refusal named
  enum class Outcome { kRunning, kDone, kRefused, kFailed } outcome = Outcome::kRunning;
  std::string error;  // of a request that was refused or failed: "RESOURCE_EXHAUSTED DRAM_FULL"
  std::string message;
};

struct LoadOptions {
  std::string address;
  int channels = 2;  // connections
  Lengths prompt, output;
  double temperature = 0;
  double timeout_seconds = 300;  // of one call
  uint64_t seed = 1;
  std::vector<Phase> phases;
};

struct LoadResult {
  std::vector<RequestRecord> requests;  // in order of arrival
  struct PhaseTimes {
    double begin = 0;
    double end = 0;   // no request came later
    double rate = 0;  // open loop: requests/s that it was
  };
  std::vector<PhaseTimes> phases;
  double end = 0;  // the last request's
  // Tokens received in each kBucketSeconds since the run began.
  static constexpr double kBucketSeconds = 0.1;
  std::vector<uint32_t> tokens;
  uint64_t bytes_pushed = 0;
  double client_cpu_seconds = 0;
};

// For a progress line, some times a second.
struct LoadProgress {
  double seconds = 0;
  std::string phase;
  size_t running = 0, done = 0, refused = 0, failed = 0;
  double tokens_per_second = 0;
};

// What answers there. UNAVAILABLE names the address and what to do.
absl::StatusOr<v1::GetModelResponse> AskModel(const std::string& address);

// Blocks until the last request has ended.
LoadResult RunLoad(const LoadOptions& options, const v1::ModelInfo& model, KvSource& kv,
                   const std::function<void(const LoadProgress&)>& progress);

}  // namespace sluice::bench
