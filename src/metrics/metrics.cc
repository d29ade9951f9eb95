#include "src/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"
#include "src/metrics/metric_names.h"

namespace sluice {
namespace {

namespace names = metric_names;
using Buckets = prometheus::Histogram::BucketBoundaries;

// Bounds lie a factor of about 2 apart, which is the worst error of a quantile that is read from
// them.
//
// These are for steps and the gaps between tokens: from 50 us, a plan, to 10 s, a stall.
const Buckets& ShortSeconds() {
  static const Buckets buckets = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
                                  50e-3, 100e-3, 200e-3, 500e-3, 1,    2,    5,    10};
  return buckets;
}

// Returns the index of `reason` in a table whose last entry is for reasons that are not listed.
template <size_t kCount>
size_t IndexOf(const std::string_view (&reasons)[kCount], std::string_view reason) {
  const auto* const found = std::find(std::begin(reasons), std::end(reasons) - 1, reason);
  return static_cast<size_t>(found - std::begin(reasons));
}

// These are for requests, queues and transfers: from 1 ms to 10 minutes.
const Buckets& LongSeconds() {
  static const Buckets buckets = {1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3,
                                  1,    2,    5,    10,    30,    60,    120,    300,    600};
  return buckets;
}

// These are for sequences: up to the largest max_sequences that the configuration takes.
const Buckets& Sequences() {
  static const Buckets buckets = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  return buckets;
}

constexpr std::array<const char*, kTokenKinds> kTokenKindNames = {"output", "prompt", "handed_over",
                                                                  "kept", "reused"};
constexpr std::array<const char*, kStepPhases> kPhaseNames = {"plan",   "launch", "copy", "compute",
                                                              "sample", "emit",   "total"};
constexpr std::array<const char*, 3> kWorkerFailureNames = {"failed", "left", "late"};
constexpr std::array<const char*, 3> kRefusalNames = {"peer", "all", "system"};
constexpr std::array<const char*, 2> kSpanLossNames = {"full", "failed"};
constexpr std::array<const char*, 3> kKvTransportNames = {"grpc", "nccl", "shared_memory"};
constexpr std::array<const char*, 3> kLinkUseNames = {"done", "refused", "broken"};
constexpr std::array<const char*, 3> kScheduleNames = {"none", "da", "dba"};
constexpr std::array<const char*, 2> kMoverNames = {"uva", "cpu"};

// Raises a counter to `total`. Two scrapes at once may bring older totals after newer ones; an
// older total changes nothing.
void Raise(const Counter& counter, double total, double& before) {
  if (total <= before) return;
  counter.Add(total - before);
  before = total;
}

}  // namespace

// The families of metrics, each made with the name and help of metric_names.h.
struct Metrics::Registry {
  Counter MakeCounter(const names::Metric& metric, const prometheus::Labels& labels = {}) {
    SLUICE_CHECK(metric.type == names::Type::kCounter, metric.name);
    auto& family =
        prometheus::BuildCounter().Name(metric.name).Help(metric.help).Register(registry);
    return Counter(&family.Add(labels));
  }

  Gauge MakeGauge(const names::Metric& metric, const prometheus::Labels& labels = {}) {
    SLUICE_CHECK(metric.type == names::Type::kGauge, metric.name);
    auto& family = prometheus::BuildGauge().Name(metric.name).Help(metric.help).Register(registry);
    return Gauge(&family.Add(labels));
  }

  Histogram MakeHistogram(const names::Metric& metric, const Buckets& buckets,
                          const prometheus::Labels& labels = {}) {
    SLUICE_CHECK(metric.type == names::Type::kHistogram, metric.name);
    auto& family =
        prometheus::BuildHistogram().Name(metric.name).Help(metric.help).Register(registry);
    return Histogram(&family.Add(labels, buckets));
  }

  // Returns make(value) for each value of a label, in order.
  template <typename Instrument, size_t n, typename Make>
  static std::array<Instrument, n> ForEach(const std::array<const char*, n>& values, Make make) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return std::array<Instrument, n>{make(values[i])...};
    }
    (std::make_index_sequence<n>());
  }

  std::vector<Counter> MakeRequests() {
    std::vector<Counter> counters;
    for (const RequestReason& r : kRequestReasons) {
      const std::string_view outcome = kRequestOutcomeNames[static_cast<size_t>(r.outcome)];
      counters.push_back(MakeCounter(names::kRequests, {{"outcome", std::string(outcome)},
                                                        {"reason", std::string(r.reason)}}));
    }
    return counters;
  }

  std::vector<Counter> MakeForEach(const names::Metric& metric, const char* outcome,
                                   absl::Span<const std::string_view> reasons) {
    std::vector<Counter> counters;
    for (const std::string_view reason : reasons) {
      counters.push_back(
          MakeCounter(metric, {{"outcome", outcome}, {"reason", std::string(reason)}}));
    }
    return counters;
  }

  // Registering a family twice under one name, help and set of labels gives the same family.
  prometheus::Registry registry{prometheus::Registry::InsertBehavior::Merge};

  absl::Mutex mutex;
  WorkerTotals counted ABSL_GUARDED_BY(mutex);
  double counted_changes ABSL_GUARDED_BY(mutex) = 0;
  double counted_evicted ABSL_GUARDED_BY(mutex) = 0;  // tokens of the prefix cache
  ConnectionTotals counted_connections ABSL_GUARDED_BY(mutex);
  SelectionTotals counted_selection ABSL_GUARDED_BY(mutex);
  struct LayerCounters {
    Counter selected, missed, fetched;
  };
  std::vector<LayerCounters> layers ABSL_GUARDED_BY(mutex);
  struct RankCounters {
    Counter rows, missed, link_bytes, worker_tokens, worker_busy_seconds;
    RankTotals counted;
  };
  std::map<int, RankCounters> ranks ABSL_GUARDED_BY(mutex);
};

Metrics::Metrics()
    : registry_(std::make_unique<Registry>()),
      exact_limit(registry_->MakeGauge(names::kExactLimit)),
      rehearsed_rows(registry_->MakeCounter(names::kRehearsedRows)),
      time_to_first_token(registry_->MakeHistogram(names::kTimeToFirstToken, LongSeconds())),
      inter_token_latency(registry_->MakeHistogram(names::kInterTokenLatency, ShortSeconds())),
      request_seconds(registry_->MakeHistogram(names::kRequestSeconds, LongSeconds())),
      queue_seconds(registry_->MakeHistogram(names::kQueueSeconds, LongSeconds())),
      slow_readers(registry_->MakeCounter(names::kSlowReaders)),
      dropped_drafts(registry_->MakeCounter(names::kDroppedDrafts)),
      draft_limit(registry_->MakeGauge(names::kDraftLimit)),
      malformed_trace_headers(registry_->MakeCounter(names::kMalformedTraceHeaders)),
      spans_exported(registry_->MakeCounter(names::kSpansExported)),
      kv_event_batches(registry_->MakeCounter(names::kKvEventBatches)),
      kv_events_dropped(registry_->MakeCounter(names::kKvEventsDropped)),
      kv_events_begun_anew(registry_->MakeCounter(names::kKvEventsBegunAnew)),
      preemptions(registry_->MakeCounter(names::kPreemptions)),
      preempted_seconds(registry_->MakeHistogram(names::kPreemptedSeconds, LongSeconds())),
      step_sequences(registry_->MakeHistogram(names::kStepSequences, Sequences())),
      reserves_accepted(
          registry_->MakeCounter(names::kReserves, {{"outcome", "accepted"}, {"reason", "NONE"}})),
      ingest_bytes(registry_->MakeCounter(names::kIngestBytes)),
      ingest_blocks(registry_->MakeCounter(names::kIngestBlocks)),
      ingest_seconds(registry_->MakeHistogram(names::kIngestSeconds, LongSeconds())),
      checksum_failures(registry_->MakeCounter(names::kChecksumFailures)),
      resumes(registry_->MakeCounter(names::kResumes)),
      pulls_done(registry_->MakeCounter(names::kPulls, {{"outcome", "done"}, {"reason", "NONE"}})),
      pull_seconds(registry_->MakeHistogram(names::kPullSeconds, LongSeconds())),
      local_prefills(registry_->MakeCounter(names::kLocalPrefills)),
      rank(registry_->MakeGauge(names::kRank)),
      ranks_alive(registry_->MakeGauge(names::kRanksAlive)),
      transfers_open(registry_->MakeGauge(names::kTransfersOpen)),
      leases_expired(registry_->MakeCounter(names::kLeasesExpired)),
      prefix_queries(registry_->MakeCounter(names::kVllmPrefixQueries)),
      prefix_hits(registry_->MakeCounter(names::kVllmPrefixHits)),
      prefix_tokens(registry_->MakeGauge(names::kPrefixTokens)),
      waiting(registry_->MakeGauge(names::kVllmWaiting)),
      kv_usage(registry_->MakeGauge(names::kVllmKvUsage)),
      process_cpu_seconds(registry_->MakeCounter(names::kProcessCpu)),
      process_resident_bytes(registry_->MakeGauge(names::kProcessResident)),
      process_open_fds(registry_->MakeGauge(names::kProcessOpenFds)),
      process_max_fds(registry_->MakeGauge(names::kProcessMaxFds)),
      process_start_seconds(registry_->MakeGauge(names::kProcessStart)),
      requests_(registry_->MakeRequests()),
      reserves_refused_(registry_->MakeForEach(names::kReserves, "refused", kReserveReasons)),
      pulls_failed_(registry_->MakeForEach(names::kPulls, "failed", kPullReasons)),
      pull_bytes_(Registry::ForEach<Counter>(
          kKvTransportNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kPullBytes, {{"transport", name}});
          })),
      link_reads_(Registry::ForEach<Counter>(
          kLinkUseNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kLinkReads, {{"outcome", name}});
          })),
      push_bytes_(Registry::ForEach<Counter>(
          kKvTransportNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kPushBytes, {{"transport", name}});
          })),
      link_writes_(Registry::ForEach<Counter>(
          kLinkUseNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kLinkWrites, {{"outcome", name}});
          })),
      tokens_(Registry::ForEach<Counter>(
          kTokenKindNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kTokens, {{"kind", name}});
          })),
      decoded_tokens_(Registry::ForEach<Counter>(
          std::array<const char*, 2>{"false", "true"},
          [&](const char* name) {
            return registry_->MakeCounter(names::kDecodedTokens, {{"exact", name}});
          })),
      step_seconds_(Registry::ForEach<Histogram>(
          kPhaseNames,
          [&](const char* name) {
            return registry_->MakeHistogram(names::kStepSeconds, ShortSeconds(), {{"phase", name}});
          })),
      spans_dropped_(Registry::ForEach<Counter>(
          kSpanLossNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kSpansDropped, {{"reason", name}});
          })),
      batch_sequences_(registry_->MakeGauge(names::kBatchSequences)),
      vllm_running_(registry_->MakeGauge(names::kVllmRunning)),
      prefix_evicted_(registry_->MakeCounter(names::kPrefixEvicted)),
      selecting_rows_(registry_->MakeCounter(names::kSelectingRows)),
      link_bytes_(registry_->MakeCounter(names::kLinkBytes)),
      resident_places_(registry_->MakeGauge(names::kResidentPlaces)),
      workers_(registry_->MakeGauge(names::kWorkers)),
      worker_busy_seconds_(registry_->MakeCounter(names::kWorkerBusySeconds)),
      worker_tokens_(registry_->MakeCounter(names::kWorkerTokens)),
      worker_failures_(Registry::ForEach<Counter>(
          kWorkerFailureNames,
          [&](const char* name) {
            return registry_->MakeCounter(names::kWorkerFailures, {{"reason", name}});
          })),
      schedule_layers_(Registry::ForEach<Gauge>(
          kScheduleNames,
          [&](const char* name) {
            return registry_->MakeGauge(names::kScheduleLayers, {{"schedule", name}});
          })),
      schedule_changes_(registry_->MakeCounter(names::kScheduleChanges)),
      movers_(
          Registry::ForEach<Gauge>(kMoverNames,
                                   [&](const char* name) {
                                     return registry_->MakeGauge(names::kMover, {{"mover", name}});
                                   })),
      mover_rates_(Registry::ForEach<Gauge>(
          kMoverNames,
          [&](const char* name) {
            return registry_->MakeGauge(names::kMoverRate, {{"mover", name}});
          })),
      drafts_(registry_->MakeCounter(names::kVllmDrafts)),
      draft_tokens_(registry_->MakeCounter(names::kVllmDraftTokens)),
      accepted_tokens_(registry_->MakeCounter(names::kVllmAcceptedTokens)),
      connections_(registry_->MakeGauge(names::kConnections)),
      connections_refused_(Registry::ForEach<Counter>(kRefusalNames, [&](const char* name) {
        return registry_->MakeCounter(names::kConnectionsRefused, {{"reason", name}});
      })) {
  // These make names be there whatever the policy, and without speculation.
  SetSelection({.layers = {{}}});
  SetDraftTokens(1);
  registry_
      ->MakeGauge(names::kVllmLora,
                  {{"max_lora", "0"}, {"running_lora_adapters", ""}, {"waiting_lora_adapters", ""}})
      .Set(static_cast<double>(absl::ToUnixSeconds(absl::Now())));
}

Metrics::~Metrics() = default;

TierGauges Metrics::Tier(std::string_view tier, std::string_view kind) {
  const prometheus::Labels labels = {{"tier", std::string(tier)}, {"kind", std::string(kind)}};
  return TierGauges{registry_->MakeGauge(names::kTierCapacity, labels),
                    registry_->MakeGauge(names::kTierReserved, labels),
                    registry_->MakeGauge(names::kTierUsed, labels),
                    registry_->MakeGauge(names::kTierCapacityBlocks, labels),
                    registry_->MakeGauge(names::kTierReservedBlocks, labels),
                    registry_->MakeGauge(names::kTierUsedBlocks, labels)};
}

const Counter& Metrics::requests(RequestOutcome outcome, std::string_view reason) const {
  size_t other = 0;
  for (size_t i = 0; i < std::size(kRequestReasons); ++i) {
    if (kRequestReasons[i].outcome != outcome) continue;
    if (kRequestReasons[i].reason == reason) return requests_[i];
    other = i;
  }
  return requests_[other];
}

const Counter& Metrics::reserves_refused(std::string_view reason) const {
  return reserves_refused_[IndexOf(kReserveReasons, reason)];
}

const Counter& Metrics::pulls_failed(std::string_view reason) const {
  return pulls_failed_[IndexOf(kPullReasons, reason)];
}

void Metrics::SetWorkers(const WorkerTotals& totals) const {
  absl::MutexLock lock(&registry_->mutex);
  WorkerTotals& counted = registry_->counted;
  workers_.Set(totals.alive);
  Raise(worker_busy_seconds_, totals.busy_seconds, counted.busy_seconds);
  Raise(worker_tokens_, totals.tokens, counted.tokens);
  for (size_t i = 0; i < totals.failures.size(); ++i) {
    Raise(worker_failures_[i], totals.failures[i], counted.failures[i]);
  }
}

void Metrics::SetPrefixEvicted(double tokens) const {
  absl::MutexLock lock(&registry_->mutex);
  Raise(prefix_evicted_, tokens, registry_->counted_evicted);
}

void Metrics::SetSchedules(const ScheduleTotals& totals) const {
  absl::MutexLock lock(&registry_->mutex);
  for (size_t i = 0; i < totals.layers.size(); ++i) schedule_layers_[i].Set(totals.layers[i]);
  Raise(schedule_changes_, totals.changes, registry_->counted_changes);
}

void Metrics::SetLink(const LinkTotals& totals) const {
  for (size_t i = 0; i < movers_.size(); ++i) {
    movers_[i].Set(static_cast<int>(i) == totals.mover ? 1 : 0);
    mover_rates_[i].Set(totals.bytes_per_s[i]);
  }
}

void Metrics::SetConnections(const ConnectionTotals& totals) const {
  absl::MutexLock lock(&registry_->mutex);
  connections_.Set(totals.open);
  for (size_t i = 0; i < totals.refused.size(); ++i) {
    Raise(connections_refused_[i], totals.refused[i], registry_->counted_connections.refused[i]);
  }
}

void Metrics::SetSelection(const SelectionTotals& totals) const {
  absl::MutexLock lock(&registry_->mutex);
  SelectionTotals& counted = registry_->counted_selection;
  while (counted.layers.size() < totals.layers.size()) {
    const prometheus::Labels layer = {{"layer", std::to_string(counted.layers.size())}};
    registry_->layers.push_back({registry_->MakeCounter(names::kSelectedTokens, layer),
                                 registry_->MakeCounter(names::kMissedTokens, layer),
                                 registry_->MakeCounter(names::kFetchedTokens, layer)});
    counted.layers.emplace_back();
  }
  for (size_t i = 0; i < totals.layers.size(); ++i) {
    const Registry::LayerCounters& counters = registry_->layers[i];
    Raise(counters.selected, totals.layers[i].selected, counted.layers[i].selected);
    Raise(counters.missed, totals.layers[i].missed, counted.layers[i].missed);
    Raise(counters.fetched, totals.layers[i].fetched, counted.layers[i].fetched);
  }
  Raise(selecting_rows_, totals.rows, counted.rows);
  Raise(link_bytes_, totals.link_bytes, counted.link_bytes);
  resident_places_.Set(totals.places);
}

void Metrics::SetRank(int number, const RankTotals& totals) const {
  absl::MutexLock lock(&registry_->mutex);
  auto found = registry_->ranks.find(number);
  if (found == registry_->ranks.end()) {
    const prometheus::Labels label = {{"rank", std::to_string(number)}};
    found = registry_->ranks
                .insert({number,
                         {registry_->MakeCounter(names::kRankRows, label),
                          registry_->MakeCounter(names::kRankMissed, label),
                          registry_->MakeCounter(names::kRankLinkBytes, label),
                          registry_->MakeCounter(names::kRankWorkerTokens, label),
                          registry_->MakeCounter(names::kRankWorkerBusySeconds, label),
                          {}}})
                .first;
  }
  Registry::RankCounters& counters = found->second;
  Raise(counters.rows, totals.rows, counters.counted.rows);
  Raise(counters.missed, totals.missed, counters.counted.missed);
  Raise(counters.link_bytes, totals.link_bytes, counters.counted.link_bytes);
  Raise(counters.worker_tokens, totals.worker_tokens, counters.counted.worker_tokens);
  Raise(counters.worker_busy_seconds, totals.worker_busy_seconds,
        counters.counted.worker_busy_seconds);
}

void Metrics::SetDraftTokens(int tokens) {
  while (std::ssize(accepted_at_) < tokens) {
    accepted_at_.push_back(registry_->MakeCounter(
        names::kVllmAcceptedPerPosition, {{"position", std::to_string(accepted_at_.size())}}));
  }
}

void Metrics::Drafted(int tokens) const {
  drafts_.Add();
  draft_tokens_.Add(tokens);
}

void Metrics::AcceptedDraft(int position) const {
  accepted_tokens_.Add();
  accepted_at_[static_cast<size_t>(position)].Add();
}

void Metrics::SetBuildInfo(const BuildInfo& info) {
  registry_
      ->MakeGauge(names::kBuildInfo, {{"version", info.version},
                                      {"model", info.model},
                                      {"device", info.device},
                                      {"kernels", info.kernels},
                                      {"policy", info.policy}})
      .Set(1);
}

void Metrics::SetCacheConfig(const CacheConfigInfo& info) {
  registry_
      ->MakeGauge(names::kVllmCacheConfig,
                  {{"block_size", std::to_string(info.block_tokens)},
                   {"num_gpu_blocks", std::to_string(info.gpu_blocks)},
                   {"num_cpu_blocks", std::to_string(info.cpu_blocks)},
                   {"cache_dtype", info.dtype},
                   {"enable_prefix_caching", info.prefix_cache ? "True" : "False"},
                   {"engine", "0"}})
      .Set(1);
}

void Metrics::SetRunning(double sequences) const {
  batch_sequences_.Set(sequences);
  vllm_running_.Set(sequences);
}

std::string Metrics::Render() const {
  return prometheus::TextSerializer().Serialize(registry_->registry.Collect());
}

void Counter::Add(double amount) const {
  SLUICE_CHECK(amount >= 0, "a counter was asked to go down by ", -amount);
  counter_->Increment(amount);
}
double Counter::Value() const { return counter_->Value(); }

void Gauge::Set(double value) const { gauge_->Set(value); }

void Gauge::Add(double amount) const { gauge_->Increment(amount); }

void Histogram::Observe(double value) const { histogram_->Observe(value); }

void Histogram::Observe(absl::Duration duration) const {
  histogram_->Observe(absl::ToDoubleSeconds(duration));
}

}  // namespace sluice
