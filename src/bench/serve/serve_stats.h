// From what was noted of each request to the figures of `sluice-bench serve`. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/bench/report/report.h"
#include "src/bench/serve/load_driver.h"

namespace sluice::bench {

// Bounds under which a request counts as good; 0: none.
struct ServiceLevel {
  double ttft_seconds = 0;
  double itl_seconds = 0;
};

struct Percentiles {
  double mean = 0, p10 = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
  int64_t samples = 0;
};
// By nearest rank; zeros where there are no values.
Percentiles PercentilesOf(std::vector<double> values);

struct PhaseStats {
  std::string name;
  double seconds =
      0;  // from its begin until no more came, or until its last ended if it was counted
  int64_t came = 0, done = 0, refused = 0, failed = 0;
  int64_t refusals = 0;  // each time that one was refused
  int64_t refusals_without_retry_info = 0;
  double longest_retry_delay = 0;
  std::map<std::string, int64_t> errors;        // of those refused for good or failed
  std::map<std::string, std::string> messages;  // the first of each
  int64_t tokens = 0;                           // of its own requests
  // Counted phase: its tokens over its seconds. Timed: all that came while it lasted, whosever.
  double tokens_per_second = 0;
  Percentiles slices;  // tokens/s of slices of its time: a second each, or a tenth if it is short
  double requests_per_second = 0;  // of its own that were done
  double good_per_second = 0;
  double good_share = 0;  // of those that came
  Percentiles ingest;     // due to committed
  Percentiles ttft;       // due to the first token
  Percentiles tpot;       // of a request: mean time of each token after the first
  Percentiles itl;        // gaps between messages with tokens; its own requests'
  Percentiles latency;    // due to the end
};

PhaseStats StatsOf(const LoadResult& result, const Phase& phase, size_t number,
                   const ServiceLevel& bounds);

// A phase's figures, each named "NAME: ...".
std::vector<Figure> FiguresOf(const PhaseStats& stats);
// Requests that were decoding (from their first token to their last) in the middle of each bucket.
std::vector<uint32_t> DecodingOverTime(const LoadResult& result);
// The phase as an object of details.phases.
nlohmann::json DetailsOf(const PhaseStats& stats, const LoadResult& result, size_t number);
std::string TableOf(const PhaseStats& stats, const ServiceLevel& bounds);

}  // namespace sluice::bench
