// Computes the figures of `sluice-bench serve` from the records of requests. Pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/bench/report/report.h"
#include "src/bench/serve/load_driver.h"

namespace sluice::bench {

// Bounds within which a request counts as good; 0: no bound.
struct ServiceLevel {
  double ttft_seconds = 0;
  double itl_seconds = 0;
};

struct Percentiles {
  double mean = 0, p10 = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
  int64_t samples = 0;
};
// Returns percentiles by nearest rank; zeros if there are no values.
Percentiles PercentilesOf(std::vector<double> values);

struct PhaseStats {
  std::string name;
  // From the phase's begin until no more requests came; for a phase with a number of requests,
  // until its last request ended.
  double seconds = 0;
  int64_t came = 0, done = 0, refused = 0, failed = 0;
  int64_t refusals = 0;  // Refusals, including those of requests that were retried.
  int64_t refusals_without_retry_info = 0;
  double longest_retry_delay = 0;
  // Errors of requests that were refused for good or failed.
  std::map<std::string, int64_t> errors;
  std::map<std::string, std::string> messages;  // The first message of each error.
  int64_t tokens = 0;                           // Tokens of its own requests.
  // In a phase with a number of requests: its tokens over its seconds. In a timed phase: all tokens
  // that came while it lasted, of any phase's requests.
  double tokens_per_second = 0;
  // Tokens/s of slices of its time, each a second long, or a tenth if the phase is short.
  Percentiles slices;
  double requests_per_second = 0;  // Its own finished requests per second.
  double good_per_second = 0;
  double good_share = 0;  // Share of the requests that came.
  Percentiles ingest;     // From due to committed.
  Percentiles ttft;       // From due to the first token.
  Percentiles tpot;       // Mean time of each token after the first, per request.
  Percentiles itl;        // Gaps between messages with tokens, of its own requests.
  Percentiles latency;    // From due to the end.
};

PhaseStats StatsOf(const LoadResult& result, const Phase& phase, size_t number,
                   const ServiceLevel& bounds);

// Returns a phase's figures, each named "NAME: ...".
std::vector<Figure> FiguresOf(const PhaseStats& stats);
// Returns the number of requests that were decoding (between their first and last token) in the
// middle of each bucket.
std::vector<uint32_t> DecodingOverTime(const LoadResult& result);
// Returns the phase as an object of details.phases.
nlohmann::json DetailsOf(const PhaseStats& stats, const LoadResult& result, size_t number);
std::string TableOf(const PhaseStats& stats, const ServiceLevel& bounds);

}  // namespace sluice::bench
