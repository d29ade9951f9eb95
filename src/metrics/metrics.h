// What the server counts and times, rendered for Prometheus. Made once by main and handed down.
//
// Every instrument is resolved when Metrics is made: updating one looks nothing up and allocates
// nothing. Counters and gauges are atomics; a histogram takes a mutex of its own for a few
// nanoseconds, which only Render() shares. Any thread may update and render.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/time/time.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

namespace sluice {

// Goes up.
class Counter {
 public:
  explicit Counter(prometheus::Counter* counter) : counter_(counter) {}
  // REQUIRES: amount >= 0.
  void Add(double amount = 1) const;

 private:
  prometheus::Counter* counter_;
};

// Goes up and down.
class Gauge {
 public:
  explicit Gauge(prometheus::Gauge* gauge) : gauge_(gauge) {}
  void Set(double value) const;
  void Add(double amount) const;

 private:
  prometheus::Gauge* gauge_;
};

// A distribution.
class Histogram {
 public:
  explicit Histogram(prometheus::Histogram* histogram) : histogram_(histogram) {}
  void Observe(double value) const;
  // In seconds.
  void Observe(absl::Duration duration) const;

 private:
  prometheus::Histogram* histogram_;
};

// How a Generate call ended; each ends in exactly one of these.
enum class RequestOutcome {
  kFinishedStop,    // a stop token, stop string or EOS
  kFinishedLength,  // max_tokens or the context's end
  kCancelled,       // by Cancel, or by a caller who went away
  kDeadline,
  kSlowReader,
  kError,
  kRefused,  // before it was a sequence: bad input, no room, draining
};
inline constexpr size_t kRequestOutcomes = 7;

enum class TokenKind {
  kOutput,      // sampled here
  kPrompt,      // computed here
  kHandedOver,  // came with its cache
};
inline constexpr size_t kTokenKinds = 3;

enum class StepPhase { kPlan, kCompute, kEmit, kTotal };
inline constexpr size_t kStepPhases = 4;

// Memory of one kind of cache in one tier.
struct TierGauges {
  Gauge capacity_bytes;
  Gauge reserved_bytes;
  Gauge used_bytes;
};

class Metrics {
 private:
  struct Registry;
  // Before the instruments, which point into it.
  const std::unique_ptr<Registry> registry_;

 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  const Counter& requests(RequestOutcome outcome) const {
    return requests_[static_cast<size_t>(outcome)];
  }
  const Counter& tokens(TokenKind kind) const { return tokens_[static_cast<size_t>(kind)]; }
  const Histogram& step_seconds(StepPhase phase) const {
    return step_seconds_[static_cast<size_t>(phase)];
  }

  // The gauges of a cache kind ("kv") in a tier ("dram", "hbm"). Allocates: for use at start. The
  // same names give the same gauges.
  TierGauges Tier(std::string_view tier, std::string_view kind);

  // The text exposition format, version 0.0.4.
  std::string Render() const;

  const Histogram time_to_first_token;
  const Histogram inter_token_latency;
  const Histogram request_seconds;
  const Histogram queue_seconds;
  const Counter slow_readers;
  const Histogram step_sequences;
  const Counter ingest_bytes;
  const Counter ingest_blocks;
  const Histogram ingest_seconds;
  const Counter checksum_failures;
  const Gauge transfers_open;
  const Counter leases_expired;
  const Gauge waiting;   // vllm:num_requests_waiting
  const Gauge kv_usage;  // vllm:kv_cache_usage_perc, in [0, 1]

  // Sequences in the running batch, under Sluice's name and vLLM's.
  void SetRunning(double sequences) const;

 private:
  const std::array<Counter, kRequestOutcomes> requests_;
  const std::array<Counter, kTokenKinds> tokens_;
  const std::array<Histogram, kStepPhases> step_seconds_;
  const Gauge batch_sequences_;
  const Gauge vllm_running_;
};

}  // namespace sluice
