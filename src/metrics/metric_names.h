// Every metric that Sluice exports: name, type, help, labels. Base units (seconds, bytes), the unit
// last, counters end in _total. Dashboards and routers rely on these names: they are added, not
// renamed.
#pragma once

namespace sluice::metric_names {

enum class Type { kCounter, kGauge, kHistogram };

struct Metric {
  const char* name;
  Type type;
  const char* help;
  const char* labels;  // names, separated by commas; "" for none
};

// Requests and tokens.
inline constexpr Metric kRequests{
    "sluice_requests_total", Type::kCounter,
    "Generate calls that have ended, and Run calls of sluice-prefill, by how: finished_stop, "
    "finished_length, handed_over, cancelled, deadline, slow_reader, error, refused; the reason is "
    "that of the status, or OTHER",
    "outcome,reason"};
inline constexpr Metric kTokens{
    "sluice_tokens_total", Type::kCounter,
    "Tokens: output went to callers, prompt were computed here, handed_over arrived with their "
    "cache, kept had theirs here from the turn before",
    "kind"};
inline constexpr Metric kTimeToFirstToken{"sluice_time_to_first_token_seconds", Type::kHistogram,
                                          "From the Generate call to its first token", ""};
inline constexpr Metric kInterTokenLatency{"sluice_inter_token_latency_seconds", Type::kHistogram,
                                           "Between two tokens of one sequence", ""};
inline constexpr Metric kRequestSeconds{"sluice_request_duration_seconds", Type::kHistogram,
                                        "From the Generate call to its end", ""};
inline constexpr Metric kQueueSeconds{
    "sluice_queue_seconds", Type::kHistogram,
    "From a sequence being ready to its place in the running batch", ""};
inline constexpr Metric kSlowReaders{"sluice_slow_readers_total", Type::kCounter,
                                     "Sequences ended because nobody read their stream", ""};
inline constexpr Metric kMalformedTraceHeaders{
    "sluice_malformed_trace_headers_total", Type::kCounter,
    "Headers x-request-id, traceparent and tracestate of Generate calls that were dropped because "
    "they were malformed",
    ""};
inline constexpr Metric kPreemptions{
    "sluice_preemptions_total", Type::kCounter,
    "Running sequences moved to their DRAM home to make room for others", ""};
inline constexpr Metric kPreemptedSeconds{
    "sluice_preempted_seconds", Type::kHistogram,
    "From a preemption to the sequence's return into the running batch", ""};

// The step loop.
inline constexpr Metric kBatchSequences{"sluice_batch_sequences", Type::kGauge,
                                        "Sequences in the running batch", ""};
inline constexpr Metric kStepSequences{"sluice_step_sequences", Type::kHistogram,
                                       "Sequences that took part in a step", ""};
inline constexpr Metric kStepSeconds{"sluice_step_seconds", Type::kHistogram,
                                     "A step by phase: plan, launch and emit on the host, copy, "
                                     "compute and sample on the device, total "
                                     "from the step before",
                                     "phase"};

// What decode rows attend to where a policy selects, some steps late. The hit rate is
// 1 - missed / selected.
inline constexpr Metric kSelectedTokens{
    "sluice_selected_tokens_total", Type::kCounter,
    "Tokens that decode rows attended to in layers that select, once for each KV head", "layer"};
inline constexpr Metric kMissedTokens{
    "sluice_missed_tokens_total", Type::kCounter,
    "Of the selected tokens those that had no place in HBM: fetched, or the CPU's", "layer"};
inline constexpr Metric kFetchedTokens{
    "sluice_fetched_tokens_total", Type::kCounter,
    "Tokens that steps moved to a place in HBM, once for each KV head; without warm-ups", "layer"};
inline constexpr Metric kSelectingRows{"sluice_selecting_rows_total", Type::kCounter,
                                       "Decode rows that selected, in every such layer", ""};
inline constexpr Metric kLinkBytes{
    "sluice_link_bytes_total", Type::kCounter,
    "Bytes of caches that decode rows moved over the link: fetched, and written through", ""};
inline constexpr Metric kResidentPlaces{
    "sluice_resident_places", Type::kGauge,
    "Tokens for which running sequences have places in HBM, in each layer (policy ess)", ""};

// CPU workers that attend to what is not in HBM.
inline constexpr Metric kWorkers{"sluice_attention_workers", Type::kGauge,
                                 "CPU workers that attend, less those that have died", ""};
inline constexpr Metric kWorkerBusySeconds{"sluice_attention_worker_busy_seconds_total",
                                           Type::kCounter,
                                           "Time that CPU workers attended, all together", ""};
inline constexpr Metric kWorkerTokens{"sluice_attention_worker_tokens_total", Type::kCounter,
                                      "Tokens that CPU workers attended to, once for each KV head",
                                      ""};
inline constexpr Metric kWorkerFailures{
    "sluice_attention_worker_failures_total", Type::kCounter,
    "Times that a CPU worker failed, died (left) or missed its deadline (late); each ends the "
    "sequences that it serves",
    "reason"};

// Policy ess.
inline constexpr Metric kScheduleLayers{
    "sluice_ess_schedule_layers", Type::kGauge,
    "Layers by what runs beneath their fetching in the steps that run: nothing (none), "
    "attention to what is in HBM (da), the indexer of half the batch too (dba)",
    "schedule"};
inline constexpr Metric kScheduleChanges{
    "sluice_ess_schedule_changes_total", Type::kCounter,
    "Times that steps of a size were given other schedules, by what they had missed", ""};

// Connections.
inline constexpr Metric kConnections{"sluice_connections", Type::kGauge,
                                     "Connections to the gRPC port", ""};
inline constexpr Metric kConnectionsRefused{
    "sluice_connections_refused_total", Type::kCounter,
    "Connections to the gRPC port that were reset: their peer has max_connections_per_peer (peer), "
    "or max_connections are open (all); or the system had no file descriptor for one, which waits "
    "(system)",
    "reason"};

// Ingest.
inline constexpr Metric kReserves{
    "sluice_reserves_total", Type::kCounter,
    "Reserve calls, by outcome: accepted or refused; the reason is that of the status, or OTHER",
    "outcome,reason"};
inline constexpr Metric kIngestBytes{"sluice_ingest_bytes_total", Type::kCounter,
                                     "Payload of verified chunks", ""};
inline constexpr Metric kIngestBlocks{"sluice_ingest_blocks_total", Type::kCounter,
                                      "Blocks of verified chunks", ""};
inline constexpr Metric kIngestSeconds{"sluice_ingest_seconds", Type::kHistogram,
                                       "From Reserve to Commit of a transfer", ""};
inline constexpr Metric kChecksumFailures{"sluice_ingest_checksum_failures_total", Type::kCounter,
                                          "Chunks whose crc32c did not match their payload", ""};
inline constexpr Metric kResumes{
    "sluice_ingest_resumes_total", Type::kCounter,
    "Write streams that went on with a transfer whose stream before them broke", ""};
inline constexpr Metric kPulls{"sluice_pulls_total", Type::kCounter,
                               "Prompts whose caches were to be read from where they are held, by "
                               "outcome: done or failed; the "
                               "reason is that of the status, or OTHER",
                               "outcome,reason"};
inline constexpr Metric kPullBytes{"sluice_pull_bytes_total", Type::kCounter,
                                   "Caches of the pulls that were done", ""};
inline constexpr Metric kPullSeconds{"sluice_pull_seconds", Type::kHistogram,
                                     "From the request to the last block of a pull, done or not",
                                     ""};
inline constexpr Metric kLocalPrefills{
    "sluice_local_prefills_total", Type::kCounter,
    "Prompts computed here because their caches did not arrive (local_prefill)", ""};
inline constexpr Metric kTransfersOpen{"sluice_transfers_open", Type::kGauge,
                                       "Transfers that are reserved and have no sequence yet", ""};
inline constexpr Metric kLeasesExpired{"sluice_leases_expired_total", Type::kCounter,
                                       "Transfers dropped because their lease ran out", ""};

// Memory.
inline constexpr Metric kTierCapacity{
    "sluice_tier_capacity_bytes", Type::kGauge,
    "Bytes of a tier set aside for a kind of cache; where kinds share "
    "a tier, all but what the others were promised",
    "tier,kind"};
inline constexpr Metric kTierReserved{"sluice_tier_reserved_bytes", Type::kGauge,
                                      "Bytes promised to sequences, their growth included",
                                      "tier,kind"};
inline constexpr Metric kTierUsed{"sluice_tier_used_bytes", Type::kGauge,
                                  "Bytes of pages that sequences hold", "tier,kind"};
inline constexpr Metric kTierCapacityBlocks{"sluice_tier_capacity_blocks", Type::kGauge,
                                            "Blocks of a kind of cache that a tier has room for",
                                            "tier,kind"};
inline constexpr Metric kTierReservedBlocks{"sluice_tier_reserved_blocks", Type::kGauge,
                                            "Blocks promised to sequences, their growth included",
                                            "tier,kind"};
inline constexpr Metric kTierUsedBlocks{"sluice_tier_used_blocks", Type::kGauge,
                                        "Blocks that sequences hold", "tier,kind"};

// The process: names that every Prometheus client shares, and what runs.
inline constexpr Metric kBuildInfo{"sluice_build_info", Type::kGauge,
                                   "Always 1; what runs is in the labels",
                                   "version,model,device,kernels,policy"};
inline constexpr Metric kProcessCpu{"process_cpu_seconds_total", Type::kCounter,
                                    "User and system CPU time spent", ""};
inline constexpr Metric kProcessResident{"process_resident_memory_bytes", Type::kGauge,
                                         "Resident memory", ""};
inline constexpr Metric kProcessOpenFds{"process_open_fds", Type::kGauge, "Open file descriptors",
                                        ""};
inline constexpr Metric kProcessMaxFds{"process_max_fds", Type::kGauge,
                                       "File descriptors that may be open", ""};
inline constexpr Metric kProcessStart{"process_start_time_seconds", Type::kGauge,
                                      "Start of the process, in seconds since 1970", ""};

// What routers read, by the names that they know from vLLM.
inline constexpr Metric kVllmRunning{"vllm:num_requests_running", Type::kGauge,
                                     "Sequences in the running batch", ""};
inline constexpr Metric kVllmWaiting{"vllm:num_requests_waiting", Type::kGauge,
                                     "Sequences that wait for a place in the running batch", ""};
inline constexpr Metric kVllmKvUsage{"vllm:kv_cache_usage_perc", Type::kGauge,
                                     "Share of the HBM for caches that is in use, of the kind of "
                                     "caches with the least left; 1 is all of it",
                                     ""};

inline constexpr const Metric* kAll[] = {
    &kRequests,
    &kTokens,
    &kTimeToFirstToken,
    &kInterTokenLatency,
    &kRequestSeconds,
    &kQueueSeconds,
    &kSlowReaders,
    &kMalformedTraceHeaders,
    &kPreemptions,
    &kPreemptedSeconds,
    &kBatchSequences,
    &kStepSequences,
    &kStepSeconds,
    &kSelectedTokens,
    &kMissedTokens,
    &kFetchedTokens,
    &kSelectingRows,
    &kLinkBytes,
    &kResidentPlaces,
    &kWorkers,
    &kWorkerBusySeconds,
    &kWorkerTokens,
    &kWorkerFailures,
    &kScheduleLayers,
    &kScheduleChanges,
    &kConnections,
    &kConnectionsRefused,
    &kReserves,
    &kIngestBytes,
    &kIngestBlocks,
    &kIngestSeconds,
    &kChecksumFailures,
    &kResumes,
    &kPulls,
    &kPullBytes,
    &kPullSeconds,
    &kLocalPrefills,
    &kTransfersOpen,
    &kLeasesExpired,
    &kTierCapacity,
    &kTierReserved,
    &kTierUsed,
    &kTierCapacityBlocks,
    &kTierReservedBlocks,
    &kTierUsedBlocks,
    &kBuildInfo,
    &kProcessCpu,
    &kProcessResident,
    &kProcessOpenFds,
    &kProcessMaxFds,
    &kProcessStart,
    &kVllmRunning,
    &kVllmWaiting,
    &kVllmKvUsage,
};

}  // namespace sluice::metric_names
