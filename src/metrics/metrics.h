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
#include <vector>

#include "absl/time/time.h"
#include "src/metrics/reasons.h"

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
  double Value() const;

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

enum class TokenKind {
  kOutput,      // sampled here
  kPrompt,      // computed here
  kHandedOver,  // came with its cache
  kKept,        // was kept with its cache from the turn before
};
inline constexpr size_t kTokenKinds = 4;

// On the host: kPlan (choose the rows, and pages for their growth), kLaunch (enqueue them) and
// kEmit. On the device: kCopy (rows and tables in, results out), kCompute (the model) and kSample.
// Host and device overlap, so that they do not add up to kTotal, which begins where the step before
// ended.
enum class StepPhase { kPlan, kLaunch, kCopy, kCompute, kSample, kEmit, kTotal };
inline constexpr size_t kStepPhases = 7;

// Memory of one kind of cache in one tier.
struct TierGauges {
  Gauge capacity_bytes;
  Gauge reserved_bytes;
  Gauge used_bytes;
  Gauge capacity_blocks;
  Gauge reserved_blocks;
  Gauge used_blocks;
};

// What a policy selected since the process began.
struct SelectionTotals {
  struct Layer {
    double selected = 0;
    double missed = 0;
    double fetched = 0;
  };
  std::vector<Layer> layers;
  double rows = 0;
  double link_bytes = 0;
  double places = 0;  // now
};

// What CPU workers did since the process began.
struct WorkerTotals {
  double alive = 0;
  double busy_seconds = 0;
  double tokens = 0;
  std::array<double, 3> failures{};  // failed, left, late
};

// How policy ess lays fetching beside compute.
struct ScheduleTotals {
  std::array<double, 3> layers{};  // none, da, dba
  double changes = 0;              // since the process began
};

// Connections to the gRPC port.
struct ConnectionTotals {
  double open = 0;                  // now
  std::array<double, 3> refused{};  // since the process began: peer, all, system
};

// The labels of sluice_build_info.
struct BuildInfo {
  std::string version;
  std::string model;
  std::string device;
  std::string kernels;
  std::string policy;
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

  // The reason is one of src/metrics/reasons.h; any other counts as OTHER.
  const Counter& requests(RequestOutcome outcome, std::string_view reason) const;
  const Counter& reserves_refused(std::string_view reason) const;
  const Counter& pulls_failed(std::string_view reason) const;
  const Counter& tokens(TokenKind kind) const { return tokens_[static_cast<size_t>(kind)]; }
  const Histogram& step_seconds(StepPhase phase) const {
    return step_seconds_[static_cast<size_t>(phase)];
  }

  // The gauges of a cache kind ("kv") in a tier ("dram", "hbm"). Allocates: for use at start. The
  // same names give the same gauges.
  TierGauges Tier(std::string_view tier, std::string_view kind);

  // Brings the instruments of selection up to these totals, which never go down. Makes those of a
  // layer when it first appears.
  void SetSelection(const SelectionTotals& totals) const;

  // Brings the instruments of CPU workers up to these totals, which never go down.
  void SetWorkers(const WorkerTotals& totals) const;

  // The same of policy ess's schedules.
  void SetSchedules(const ScheduleTotals& totals) const;

  // The same of connections.
  void SetConnections(const ConnectionTotals& totals) const;

  // Once, when it is known what runs.
  void SetBuildInfo(const BuildInfo& info);

  // The text exposition format, version 0.0.4.
  std::string Render() const;

  const Histogram time_to_first_token;
  const Histogram inter_token_latency;
  const Histogram request_seconds;
  const Histogram queue_seconds;
  const Counter slow_readers;
  const Counter malformed_trace_headers;
  const Counter preemptions;
  const Histogram preempted_seconds;
  const Histogram step_sequences;
  const Counter reserves_accepted;
  const Counter ingest_bytes;
  const Counter ingest_blocks;
  const Histogram ingest_seconds;
  const Counter checksum_failures;
  const Counter resumes;
  const Counter pulls_done;
  const Counter pull_bytes;
  const Histogram pull_seconds;
  const Counter local_prefills;
  const Gauge transfers_open;
  const Counter leases_expired;
  const Gauge waiting;   // vllm:num_requests_waiting
  const Gauge kv_usage;  // vllm:kv_cache_usage_perc, in [0, 1]
  const Counter process_cpu_seconds;
  const Gauge process_resident_bytes;
  const Gauge process_open_fds;
  const Gauge process_max_fds;
  const Gauge process_start_seconds;

  // Sequences in the running batch, under Sluice's name and vLLM's.
  void SetRunning(double sequences) const;

 private:
  const std::vector<Counter> requests_;          // by index in kRequestReasons
  const std::vector<Counter> reserves_refused_;  // by index in kReserveReasons
  const std::vector<Counter> pulls_failed_;      // by index in kPullReasons
  const std::array<Counter, kTokenKinds> tokens_;
  const std::array<Histogram, kStepPhases> step_seconds_;
  const Gauge batch_sequences_;
  const Gauge vllm_running_;
  const Counter selecting_rows_;
  const Counter link_bytes_;
  const Gauge resident_places_;
  const Gauge workers_;
  const Counter worker_busy_seconds_;
  const Counter worker_tokens_;
  const std::array<Counter, 3> worker_failures_;
  const std::array<Gauge, 3> schedule_layers_;
  const Counter schedule_changes_;
  const Gauge connections_;
  const std::array<Counter, 3> connections_refused_;
};

}  // namespace sluice
