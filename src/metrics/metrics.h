// Metrics holds everything that a node counts and times, and renders it for Prometheus. The main
// program makes one and hands it down; a class that takes a Metrics needs one.
//
// Every instrument is resolved when Metrics is made, so updating one looks nothing up and allocates
// nothing. Counters and gauges are atomics. A histogram takes a mutex of its own for a few
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

// A number that only goes up.
class Counter {
 public:
  explicit Counter(prometheus::Counter* counter) : counter_(counter) {}
  // REQUIRES: amount >= 0.
  void Add(double amount = 1) const;
  double Value() const;

 private:
  prometheus::Counter* counter_;
};

// A number that goes up and down.
class Gauge {
 public:
  explicit Gauge(prometheus::Gauge* gauge) : gauge_(gauge) {}
  void Set(double value) const;
  void Add(double amount) const;

 private:
  prometheus::Gauge* gauge_;
};

// A distribution of values.
class Histogram {
 public:
  explicit Histogram(prometheus::Histogram* histogram) : histogram_(histogram) {}
  void Observe(double value) const;
  // Observes the duration in seconds.
  void Observe(absl::Duration duration) const;

 private:
  prometheus::Histogram* histogram_;
};

enum class TokenKind {
  kOutput,      // sampled on this node
  kPrompt,      // computed on this node
  kHandedOver,  // arrived with its KV
  kKept,        // its KV was kept here from the turn before
  kReused,      // its KV was left here by an earlier sequence with the same prefix
};
inline constexpr size_t kTokenKinds = 5;

// The phases of a step. The host runs kPlan (choose the rows, and pages for their growth), kLaunch
// (enqueue them) and kEmit. The device runs kCopy (rows and tables in, results out), kCompute (the
// model) and kSample. kTotal begins where the step before ended. Host and device overlap, so the
// phases do not add up to kTotal.
enum class StepPhase { kPlan, kLaunch, kCopy, kCompute, kSample, kEmit, kTotal };
inline constexpr size_t kStepPhases = 7;

// Why spans were dropped.
enum class SpanLoss { kFull, kFailed };

// The ways on which KV goes from a prefill node to a decode node.
enum class KvTransport { kGrpc, kNccl, kSharedMemory };

// How a pull or a push over a link between devices ended.
enum class LinkUse { kDone, kRefused, kBroken };

// The memory of one kind of cache in one tier.
struct TierGauges {
  Gauge capacity_bytes;
  Gauge reserved_bytes;
  Gauge used_bytes;
  Gauge capacity_blocks;
  Gauge reserved_blocks;
  Gauge used_blocks;
};

// The tokens that a policy selected since the process began.
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

// The work of CPU attention workers since the process began.
struct WorkerTotals {
  double alive = 0;
  double busy_seconds = 0;
  double tokens = 0;
  std::array<double, 3> failures{};  // failed, left, late
};

// The work of one rank's policy since the process began.
struct RankTotals {
  double rows = 0;
  double missed = 0;  // in all layers
  double link_bytes = 0;
  double worker_tokens = 0;
  double worker_busy_seconds = 0;
};

// How policy ess overlaps fetching with computing.
struct ScheduleTotals {
  std::array<double, 3> layers{};  // none, da, dba
  double changes = 0;              // since the process began
};

// How entries come over the link, of policy ess.
struct LinkTotals {
  int mover = -1;                       // uva, cpu; -1: there is no choice
  std::array<double, 2> bytes_per_s{};  // of each, at the node's start; 0: not measured
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

// The labels of vllm:cache_config_info. A block is `block_tokens` tokens of all layers.
struct CacheConfigInfo {
  int64_t block_tokens = 0;
  int64_t gpu_blocks = 0;
  int64_t cpu_blocks = 0;
  std::string dtype;
  bool prefix_cache = false;
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

  // Return the counter of a reason of src/metrics/reasons.h. Any other reason counts as OTHER.
  const Counter& requests(RequestOutcome outcome, std::string_view reason) const;
  const Counter& reserves_refused(std::string_view reason) const;
  const Counter& pulls_failed(std::string_view reason) const;
  const Counter& pull_bytes(KvTransport transport) const {
    return pull_bytes_[static_cast<size_t>(transport)];
  }
  const Counter& link_reads(LinkUse outcome) const {
    return link_reads_[static_cast<size_t>(outcome)];
  }
  const Counter& push_bytes(KvTransport transport) const {
    return push_bytes_[static_cast<size_t>(transport)];
  }
  const Counter& link_writes(LinkUse outcome) const {
    return link_writes_[static_cast<size_t>(outcome)];
  }
  const Counter& spans_dropped(SpanLoss why) const {
    return spans_dropped_[static_cast<size_t>(why)];
  }
  const Counter& tokens(TokenKind kind) const { return tokens_[static_cast<size_t>(kind)]; }
  const Counter& decoded_tokens(bool exact) const { return decoded_tokens_[exact ? 1 : 0]; }
  const Histogram& step_seconds(StepPhase phase) const {
    return step_seconds_[static_cast<size_t>(phase)];
  }

  // Returns the gauges of a cache kind ("kv") in a tier ("dram", "hbm"). It allocates, so call it
  // at start. The same names give the same gauges.
  TierGauges Tier(std::string_view tier, std::string_view kind);

  // Brings the instruments of selection up to these totals, which never go down. Makes a layer's
  // instruments when the layer first appears.
  void SetSelection(const SelectionTotals& totals) const;

  // Brings the instruments of CPU attention workers up to these totals, which never go down.
  void SetWorkers(const WorkerTotals& totals) const;

  // Brings a rank's instruments up to these totals, which never go down. Makes them when the rank
  // first appears.
  void SetRank(int number, const RankTotals& totals) const;

  // Brings the instruments of policy ess's schedules up to these totals.
  void SetSchedules(const ScheduleTotals& totals) const;
  // Sets who brings entries over the link.
  void SetLink(const LinkTotals& totals) const;

  // Brings the counter of tokens that left the prefix cache up to this total.
  void SetPrefixEvicted(double tokens) const;

  // Brings the instruments of connections up to these totals.
  void SetConnections(const ConnectionTotals& totals) const;

  // Makes the counters of accepted drafts for `tokens` drafts of a sequence in a step. Call it
  // once, before AcceptedDraft.
  void SetDraftTokens(int tokens);
  // Counts that a step verified `tokens` drafts of a sequence.
  void Drafted(int tokens) const;
  // Counts that the draft at `position`, from 0, became a token. REQUIRES: position is below
  // SetDraftTokens's tokens.
  void AcceptedDraft(int position) const;

  // Sets the labels of sluice_build_info. Call it once, when it is known what runs.
  void SetBuildInfo(const BuildInfo& info);

  // Sets the labels of vllm:cache_config_info. Call it once, when the caches have their sizes.
  void SetCacheConfig(const CacheConfigInfo& info);

  // Returns all metrics in the text exposition format, version 0.0.4.
  std::string Render() const;

  const Gauge exact_limit;
  const Counter rehearsed_rows;
  const Histogram time_to_first_token;
  const Histogram inter_token_latency;
  const Histogram request_seconds;
  const Histogram queue_seconds;
  const Counter slow_readers;
  const Counter dropped_drafts;
  const Gauge draft_limit;
  const Counter malformed_trace_headers;
  const Counter spans_exported;
  const Counter kv_event_batches;
  const Counter kv_events_dropped;
  const Counter kv_events_begun_anew;
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
  const Histogram pull_seconds;
  const Counter local_prefills;
  const Gauge rank;
  const Gauge ranks_alive;
  const Gauge transfers_open;
  const Counter leases_expired;
  const Counter prefix_queries;  // vllm:prefix_cache_queries_total, in tokens
  const Counter prefix_hits;     // vllm:prefix_cache_hits_total, in tokens
  const Gauge prefix_tokens;
  const Gauge waiting;   // vllm:num_requests_waiting
  const Gauge kv_usage;  // vllm:kv_cache_usage_perc, in [0, 1]
  const Counter process_cpu_seconds;
  const Gauge process_resident_bytes;
  const Gauge process_open_fds;
  const Gauge process_max_fds;
  const Gauge process_start_seconds;

  // Sets the number of sequences in the running batch, under Sluice's name and under vLLM's.
  void SetRunning(double sequences) const;

 private:
  const std::vector<Counter> requests_;          // by index in kRequestReasons
  const std::vector<Counter> reserves_refused_;  // by index in kReserveReasons
  const std::vector<Counter> pulls_failed_;      // by index in kPullReasons
  const std::array<Counter, 3> pull_bytes_;      // by KvTransport
  const std::array<Counter, 3> link_reads_;      // by LinkUse
  const std::array<Counter, 3> push_bytes_;      // by KvTransport
  const std::array<Counter, 3> link_writes_;     // by LinkUse
  const std::array<Counter, kTokenKinds> tokens_;
  const std::array<Counter, 2> decoded_tokens_;  // false, true
  const std::array<Histogram, kStepPhases> step_seconds_;
  const std::array<Counter, 2> spans_dropped_;  // by SpanLoss
  const Gauge batch_sequences_;
  const Gauge vllm_running_;
  const Counter prefix_evicted_;
  const Counter selecting_rows_;
  const Counter link_bytes_;
  const Gauge resident_places_;
  const Gauge workers_;
  const Counter worker_busy_seconds_;
  const Counter worker_tokens_;
  const std::array<Counter, 3> worker_failures_;
  const std::array<Gauge, 3> schedule_layers_;
  const Counter schedule_changes_;
  const std::array<Gauge, 2> movers_, mover_rates_;
  const Counter drafts_;
  const Counter draft_tokens_;
  const Counter accepted_tokens_;
  std::vector<Counter> accepted_at_;  // by position
  const Gauge connections_;
  const std::array<Counter, 3> connections_refused_;
};

}  // namespace sluice
