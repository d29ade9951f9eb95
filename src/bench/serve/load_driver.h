// The client side of `sluice-bench serve`: one thread and one completion queue drive every request
// through Reserve, Write, Commit and Generate, several hundred at once. The records of requests are
// plain data, from which serve_stats.h computes figures.
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

// Times are seconds since the run began; 0 means that the request did not get so far.
struct RequestRecord {
  size_t phase = 0;
  int64_t prompt_tokens = 0;
  int64_t output_wanted = 0, output_tokens = 0;
  double due = 0;        // When the request was due; all latencies count from here.
  double reserved = 0;   // When a reservation was accepted.
  double committed = 0;  // When its caches were complete.
  double first_token = 0, last_token = 0;
  double end = 0;
  std::vector<float> gaps;      // Times between messages that carry tokens.
  std::vector<float> gap_ends;  // The end of each gap.
  uint32_t refusals = 0;
  uint32_t refusals_without_retry_info = 0;
  double longest_retry_delay = 0;  // Longest delay that a refusal named.
  enum class Outcome { kRunning, kDone, kRefused, kFailed } outcome = Outcome::kRunning;
  // Error of a refused or failed request, such as "RESOURCE_EXHAUSTED DRAM_FULL".
  std::string error;
  std::string message;
};

struct LoadOptions {
  std::string address;
  int channels = 2;  // Connections.
  Lengths prompt, output;
  double temperature = 0;
  double timeout_seconds = 300;  // Deadline of one call.
  uint64_t seed = 1;
  std::vector<Phase> phases;
};

struct LoadResult {
  std::vector<RequestRecord> requests;  // In order of arrival.
  struct PhaseTimes {
    double begin = 0;
    double end = 0;   // No request came later.
    double rate = 0;  // Open loop: the resulting requests/s.
  };
  std::vector<PhaseTimes> phases;
  double end = 0;  // End of the last request.
  // Tokens received in each kBucketSeconds since the run began.
  static constexpr double kBucketSeconds = 0.1;
  std::vector<uint32_t> tokens;
  uint64_t bytes_pushed = 0;
  double client_cpu_seconds = 0;
};

// The content of a progress line, updated a few times per second.
struct LoadProgress {
  double seconds = 0;
  std::string phase;
  size_t running = 0, done = 0, refused = 0, failed = 0;
  double tokens_per_second = 0;
};

// Returns the model of the node at `address`. UNAVAILABLE names the address and the remedy.
absl::StatusOr<v1::GetModelResponse> AskModel(const std::string& address);

// Runs the load. Blocks until the last request has ended.
LoadResult RunLoad(const LoadOptions& options, const v1::ModelInfo& model, KvSource& kv,
                   const std::function<void(const LoadProgress&)>& progress);

}  // namespace sluice::bench
