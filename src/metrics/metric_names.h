// Every metric that Sluice exports: its name, type, help and labels. Names use base units (seconds,
// bytes) with the unit last; counters end in _total. Dashboards and routers rely on these names:
// they are added, never renamed.
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
    "Generate calls that ended, and Run calls of sluice-prefill, by outcome: finished_stop, "
    "finished_length, handed_over, cancelled, deadline, slow_reader, error, refused. The reason is "
    "the one in the status, or OTHER",
    "outcome,reason"};
inline constexpr Metric kTokens{
    "sluice_tokens_total", Type::kCounter,
    "Tokens by kind: output tokens were sent to callers, prompt tokens were computed on this node "
    "(on "
    "a prefill node: belong to prompts that it handed over, reused ones included), "
    "handed_over tokens arrived with their KV, kept tokens had their KV here from the turn before, "
    "reused tokens had it here from another sequence with the same prefix",
    "kind"};
inline constexpr Metric kDecodedTokens{
    "sluice_decoded_tokens_total", Type::kCounter,
    "Output tokens that this node computed, by whether every row of their sequence so far attended "
    "to all tokens before it (exact true) or the policy chose a part of them for some row (false)",
    "exact"};
inline constexpr Metric kExactLimit{
    "sluice_exact_limit_tokens", Type::kGauge,
    "Up to how many tokens, prompt and output together, a sequence is attended to exactly under "
    "the policy; max_context under policy full, 0 on a prefill node",
    ""};
inline constexpr Metric kRehearsedRows{
    "sluice_rehearsed_rows_total", Type::kCounter,
    "First decode rows that were computed once before they counted, under the policies scout and "
    "recall: one for each prompt that does not fit its budget",
    ""};
inline constexpr Metric kTimeToFirstToken{"sluice_time_to_first_token_seconds", Type::kHistogram,
                                          "Time from the Generate call to its first token", ""};
inline constexpr Metric kInterTokenLatency{"sluice_inter_token_latency_seconds", Type::kHistogram,
                                           "Time between two tokens of one sequence", ""};
inline constexpr Metric kRequestSeconds{"sluice_request_duration_seconds", Type::kHistogram,
                                        "Time from the Generate call to its end", ""};
inline constexpr Metric kQueueSeconds{
    "sluice_queue_seconds", Type::kHistogram,
    "Time from when a sequence is ready until it enters the running batch", ""};
inline constexpr Metric kSlowReaders{"sluice_slow_readers_total", Type::kCounter,
                                     "Sequences that were ended because nobody read their stream",
                                     ""};
inline constexpr Metric kMalformedTraceHeaders{
    "sluice_malformed_trace_headers_total", Type::kCounter,
    "Headers x-request-id, traceparent and tracestate of Generate calls that were dropped because "
    "they were malformed",
    ""};
inline constexpr Metric kSpansExported{"sluice_otel_spans_exported_total", Type::kCounter,
                                       "Spans that the collector of otlp_endpoint took", ""};
inline constexpr Metric kSpansDropped{
    "sluice_otel_spans_dropped_total", Type::kCounter,
    "Spans that were dropped because too many waited for the collector (full), or because it "
    "refused them or could not be reached for long (failed)",
    "reason"};
inline constexpr Metric kKvEventBatches{"sluice_kv_event_batches_total", Type::kCounter,
                                        "Batches of KV events that were published", ""};
inline constexpr Metric kKvEventsDropped{
    "sluice_kv_events_dropped_total", Type::kCounter,
    "KV events that were dropped because too many waited to be published; subscribers are then "
    "told all blocks anew",
    ""};
inline constexpr Metric kKvEventsBegunAnew{
    "sluice_kv_events_begun_anew_total", Type::kCounter,
    "Times that subscribers were told AllBlocksCleared and all blocks anew: at the start, and when "
    "events were dropped",
    ""};
inline constexpr Metric kPreemptions{
    "sluice_preemptions_total", Type::kCounter,
    "Running sequences that were moved to the host KV cache to make room for others", ""};
inline constexpr Metric kPreemptedSeconds{
    "sluice_preempted_seconds", Type::kHistogram,
    "Time from a preemption until the sequence is back in the running batch", ""};

// The step loop.
inline constexpr Metric kBatchSequences{"sluice_batch_sequences", Type::kGauge,
                                        "Sequences in the running batch", ""};
inline constexpr Metric kStepSequences{"sluice_step_sequences", Type::kHistogram,
                                       "Sequences that took part in a step", ""};
inline constexpr Metric kStepSeconds{
    "sluice_step_seconds", Type::kHistogram,
    "Time of a step by phase: plan, launch and emit on the host; copy, compute and sample on the "
    "device; total since the end of the step before",
    "phase"};

// Selection: what decode rows attend to where a policy selects. The counters lag by a few steps.
// The hit rate is 1 - missed / selected.
inline constexpr Metric kSelectedTokens{
    "sluice_selected_tokens_total", Type::kCounter,
    "Tokens that the policy selected for decode rows, counted once for each KV head; scout and "
    "recall also attend to the others that are in HBM",
    "layer"};
inline constexpr Metric kMissedTokens{
    "sluice_missed_tokens_total", Type::kCounter,
    "Selected tokens that had no KV slot in HBM: they were fetched, or attended to by the CPU",
    "layer"};
inline constexpr Metric kFetchedTokens{"sluice_fetched_tokens_total", Type::kCounter,
                                       "Tokens that steps fetched into a KV slot in HBM, counted "
                                       "once for each KV head; warm-ups are not counted",
                                       "layer"};
inline constexpr Metric kSelectingRows{
    "sluice_selecting_rows_total", Type::kCounter,
    "Decode rows that selected, counted in every layer where the policy selects", ""};
inline constexpr Metric kLinkBytes{"sluice_link_bytes_total", Type::kCounter,
                                   "Bytes of KV that decode rows moved over the link between host "
                                   "and GPU: fetched, and written through",
                                   ""};
inline constexpr Metric kResidentPlaces{
    "sluice_resident_places", Type::kGauge,
    "Tokens for which running sequences have KV slots in HBM, in each layer (policy ess)", ""};

// CPU attention workers, which attend to tokens that are not in HBM.
inline constexpr Metric kWorkers{"sluice_attention_workers", Type::kGauge,
                                 "CPU attention workers that are alive", ""};
inline constexpr Metric kWorkerBusySeconds{
    "sluice_attention_worker_busy_seconds_total", Type::kCounter,
    "Time that CPU attention workers were busy, summed over all workers", ""};
inline constexpr Metric kWorkerTokens{
    "sluice_attention_worker_tokens_total", Type::kCounter,
    "Tokens that CPU attention workers attended to, counted once for each KV head", ""};
inline constexpr Metric kWorkerFailures{
    "sluice_attention_worker_failures_total", Type::kCounter,
    "Times that a CPU attention worker failed (failed), died (left) or missed its deadline (late); "
    "each ends the sequences that the worker serves",
    "reason"};

// Policy ess.
inline constexpr Metric kScheduleLayers{
    "sluice_ess_schedule_layers", Type::kGauge,
    "Layers by what overlaps with fetching in the current steps: nothing (none), attention to what "
    "is in HBM (da), or also the indexer of half the batch (dba)",
    "schedule"};
inline constexpr Metric kScheduleChanges{
    "sluice_ess_schedule_changes_total", Type::kCounter,
    "Times that the layers' schedules were changed for steps of a size, because of the misses seen",
    ""};

inline constexpr Metric kMover{
    "sluice_ess_mover", Type::kGauge,
    "1 for who reads the entries that steps miss in DRAM: the GPU by itself (uva), or CPU threads "
    "that fill a ring for it (cpu)",
    "mover"};
inline constexpr Metric kMoverRate{
    "sluice_ess_mover_bytes_per_second", Type::kGauge,
    "Rate of each at the node's start, with ess_mover auto; 0 if it was not measured", "mover"};

// Connections.
inline constexpr Metric kConnections{"sluice_connections", Type::kGauge,
                                     "Open connections to the gRPC port", ""};
inline constexpr Metric kConnectionsRefused{
    "sluice_connections_refused_total", Type::kCounter,
    "Connections to the gRPC port that were reset because their peer has max_connections_per_peer "
    "(peer) or because max_connections are open (all), and connections that wait because the "
    "system had no file descriptor for them (system)",
    "reason"};

// Ingest.
inline constexpr Metric kReserves{
    "sluice_reserves_total", Type::kCounter,
    "Reserve calls by outcome: accepted or refused. The reason is the one in the status, or OTHER",
    "outcome,reason"};
inline constexpr Metric kIngestBytes{"sluice_ingest_bytes_total", Type::kCounter,
                                     "Payload bytes of chunks whose checksum held", ""};
inline constexpr Metric kIngestBlocks{"sluice_ingest_blocks_total", Type::kCounter,
                                      "KV blocks of chunks whose checksum held", ""};
inline constexpr Metric kIngestSeconds{"sluice_ingest_seconds", Type::kHistogram,
                                       "Time from Reserve to Commit of a transfer", ""};
inline constexpr Metric kChecksumFailures{"sluice_ingest_checksum_failures_total", Type::kCounter,
                                          "Chunks whose crc32c did not match their payload", ""};
inline constexpr Metric kResumes{
    "sluice_ingest_resumes_total", Type::kCounter,
    "Write streams that continued a transfer whose previous stream broke", ""};
inline constexpr Metric kPulls{
    "sluice_pulls_total", Type::kCounter,
    "Prompts whose KV was to be read from the node that holds it, by outcome: done or failed. The "
    "reason is the one in the status, or OTHER",
    "outcome,reason"};
inline constexpr Metric kPullBytes{"sluice_pull_bytes_total", Type::kCounter,
                                   "KV bytes of the pulls that succeeded, by what carried them: "
                                   "grpc, nccl or shared_memory (setting kv_transport)",
                                   "transport"};
inline constexpr Metric kLinkReads{
    "sluice_pull_link_reads_total", Type::kCounter,
    "Pulls that were tried over a link between devices (kv_transport nccl), by outcome: done, "
    "refused (gRPC carried everything) or broken (gRPC carried the rest)",
    "outcome"};
inline constexpr Metric kPushBytes{
    "sluice_push_bytes_total", Type::kCounter,
    "KV bytes that a prefill node has pushed to decode nodes, of the pushes that succeeded, by "
    "what "
    "carried them: grpc, nccl or shared_memory (setting kv_transport)",
    "transport"};
inline constexpr Metric kLinkWrites{
    "sluice_push_link_writes_total", Type::kCounter,
    "Pushes that a prefill node has tried over a link between devices (kv_transport nccl), by "
    "outcome: done, refused (gRPC carried everything) or broken (gRPC carried the rest, or the "
    "transfer had ended)",
    "outcome"};
inline constexpr Metric kPullSeconds{
    "sluice_pull_seconds", Type::kHistogram,
    "Time from the request to the last block of a pull, whether it succeeded or not", ""};
inline constexpr Metric kLocalPrefills{
    "sluice_local_prefills_total", Type::kCounter,
    "Prompts that this node computed because their KV did not arrive (setting local_prefill)", ""};
inline constexpr Metric kRank{
    "sluice_rank", Type::kGauge,
    "Number of this process among the ranks that divide the model of a node (setting rank)", ""};
inline constexpr Metric kRanksAlive{
    "sluice_ranks_alive", Type::kGauge,
    "Ranks of this process's node that run; 1 where the model is not divided, and 0 before it is "
    "loaded and on a prefill node",
    ""};
inline constexpr Metric kRankRows{"sluice_rank_selecting_rows_total", Type::kCounter,
                                  "sluice_selecting_rows_total of each rank: rank 0 shows all "
                                  "ranks, the others show their own",
                                  "rank"};
inline constexpr Metric kRankMissed{
    "sluice_rank_missed_tokens_total", Type::kCounter,
    "sluice_missed_tokens_total of each rank, summed over layers; shown as the rows are", "rank"};
inline constexpr Metric kRankLinkBytes{
    "sluice_rank_link_bytes_total", Type::kCounter,
    "sluice_link_bytes_total of each rank; shown as the rows are", "rank"};
inline constexpr Metric kRankWorkerTokens{
    "sluice_rank_worker_tokens_total", Type::kCounter,
    "sluice_attention_worker_tokens_total of each rank; shown as the rows are", "rank"};
inline constexpr Metric kRankWorkerBusySeconds{
    "sluice_rank_worker_busy_seconds_total", Type::kCounter,
    "sluice_attention_worker_busy_seconds_total of each rank; shown as the rows are", "rank"};
inline constexpr Metric kTransfersOpen{
    "sluice_transfers_open", Type::kGauge,
    "Transfers that are reserved and not yet taken by a sequence", ""};
inline constexpr Metric kLeasesExpired{"sluice_leases_expired_total", Type::kCounter,
                                       "Transfers that were dropped because their lease ran out",
                                       ""};

// Memory.
inline constexpr Metric kTierCapacity{
    "sluice_tier_capacity_bytes", Type::kGauge,
    "Bytes of a tier for a kind of cache. Where kinds share a tier: the whole tier less what is "
    "reserved for the other kinds",
    "tier,kind"};
inline constexpr Metric kTierReserved{"sluice_tier_reserved_bytes", Type::kGauge,
                                      "Bytes reserved for sequences, including their growth",
                                      "tier,kind"};
inline constexpr Metric kTierUsed{"sluice_tier_used_bytes", Type::kGauge,
                                  "Bytes of pages that sequences hold", "tier,kind"};
inline constexpr Metric kTierCapacityBlocks{"sluice_tier_capacity_blocks", Type::kGauge,
                                            "Blocks of a kind of cache that a tier has room for",
                                            "tier,kind"};
inline constexpr Metric kTierReservedBlocks{"sluice_tier_reserved_blocks", Type::kGauge,
                                            "Blocks reserved for sequences, including their growth",
                                            "tier,kind"};
inline constexpr Metric kTierUsedBlocks{"sluice_tier_used_blocks", Type::kGauge,
                                        "Blocks that sequences hold", "tier,kind"};

// The process, under the names that every Prometheus client shares, and the build.
inline constexpr Metric kBuildInfo{"sluice_build_info", Type::kGauge,
                                   "Always 1; the labels say what runs",
                                   "version,model,device,kernels,policy"};
inline constexpr Metric kProcessCpu{"process_cpu_seconds_total", Type::kCounter,
                                    "User and system CPU time spent", ""};
inline constexpr Metric kProcessResident{"process_resident_memory_bytes", Type::kGauge,
                                         "Resident memory", ""};
inline constexpr Metric kProcessOpenFds{"process_open_fds", Type::kGauge, "Open file descriptors",
                                        ""};
inline constexpr Metric kProcessMaxFds{"process_max_fds", Type::kGauge,
                                       "Maximum number of open file descriptors", ""};
inline constexpr Metric kProcessStart{"process_start_time_seconds", Type::kGauge,
                                      "Start of the process, in seconds since 1970", ""};

inline constexpr Metric kDroppedDrafts{
    "sluice_dropped_drafts_total", Type::kCounter,
    "Times that a model's draft layer gave no usable draft, because its logits were not finite",
    ""};

inline constexpr Metric kDraftLimit{
    "sluice_draft_limit", Type::kGauge,
    "Drafts that each sequence may bring to a step now, by what steps with more and fewer gave",
    ""};

// Speculative decoding, under the names that vLLM's counters have at its endpoint.
inline constexpr Metric kVllmDrafts{"vllm:spec_decode_num_drafts_total", Type::kCounter,
                                    "Times that a step verified drafts of a sequence", ""};
inline constexpr Metric kVllmDraftTokens{"vllm:spec_decode_num_draft_tokens_total", Type::kCounter,
                                         "Drafts that steps verified", ""};
inline constexpr Metric kVllmAcceptedTokens{"vllm:spec_decode_num_accepted_tokens_total",
                                            Type::kCounter, "Drafts that became output tokens", ""};
inline constexpr Metric kVllmAcceptedPerPosition{
    "vllm:spec_decode_num_accepted_tokens_per_pos_total", Type::kCounter,
    "Drafts that became output tokens, by their place among those of one step, from 0", "position"};

// Prefix reuse, under the names that vLLM's counters have at its endpoint.
inline constexpr Metric kVllmPrefixQueries{
    "vllm:prefix_cache_queries_total", Type::kCounter,
    "Prompt tokens whose KV was looked for in the prefix cache, by Reserve or before this node "
    "computes a prompt",
    ""};
inline constexpr Metric kVllmPrefixHits{"vllm:prefix_cache_hits_total", Type::kCounter,
                                        "Prompt tokens whose KV the prefix cache had", ""};
inline constexpr Metric kPrefixTokens{
    "sluice_prefix_cache_tokens", Type::kGauge,
    "Tokens whose KV lies in the host KV cache for later sequences with the same prefix, whether a "
    "sequence has it now or not",
    ""};
inline constexpr Metric kPrefixEvicted{
    "sluice_prefix_cache_evicted_tokens_total", Type::kCounter,
    "Tokens whose KV was dropped from the prefix cache to make room", ""};

// Gauges that routers read, under the names that they know from vLLM.
inline constexpr Metric kVllmRunning{"vllm:num_requests_running", Type::kGauge,
                                     "Sequences in the running batch", ""};
inline constexpr Metric kVllmWaiting{"vllm:num_requests_waiting", Type::kGauge,
                                     "Sequences that wait to enter the running batch", ""};
inline constexpr Metric kVllmKvUsage{"vllm:kv_cache_usage_perc", Type::kGauge,
                                     "Share of the KV cache in HBM that is in use, for the kind of "
                                     "cache with the least left; 1 is all of it",
                                     ""};
inline constexpr Metric kVllmCacheConfig{
    "vllm:cache_config_info", Type::kGauge,
    "Always 1; the labels have the tokens of a KV block, and how many such blocks of whole tokens, "
    "of all layers, HBM (num_gpu_blocks) and the host KV cache (num_cpu_blocks) hold",
    "block_size,num_gpu_blocks,num_cpu_blocks,cache_dtype,enable_prefix_caching,engine"};
inline constexpr Metric kVllmLora{
    "vllm:lora_requests_info", Type::kGauge,
    "Since when the labels hold, in seconds since 1970; this engine has no adapters, so that "
    "max_lora is 0 and the lists are empty",
    "max_lora,running_lora_adapters,waiting_lora_adapters"};

inline constexpr const Metric* kAll[] = {
    &kRequests,
    &kTokens,
    &kDecodedTokens,
    &kExactLimit,
    &kRehearsedRows,
    &kTimeToFirstToken,
    &kInterTokenLatency,
    &kRequestSeconds,
    &kQueueSeconds,
    &kSlowReaders,
    &kDroppedDrafts,
    &kDraftLimit,
    &kMalformedTraceHeaders,
    &kSpansExported,
    &kSpansDropped,
    &kKvEventBatches,
    &kKvEventsDropped,
    &kKvEventsBegunAnew,
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
    &kMover,
    &kMoverRate,
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
    &kLinkReads,
    &kPushBytes,
    &kLinkWrites,
    &kPullSeconds,
    &kLocalPrefills,
    &kRank,
    &kRanksAlive,
    &kRankRows,
    &kRankMissed,
    &kRankLinkBytes,
    &kRankWorkerTokens,
    &kRankWorkerBusySeconds,
    &kTransfersOpen,
    &kLeasesExpired,
    &kPrefixTokens,
    &kPrefixEvicted,
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
    &kVllmPrefixQueries,
    &kVllmPrefixHits,
    &kVllmRunning,
    &kVllmWaiting,
    &kVllmKvUsage,
    &kVllmCacheConfig,
    &kVllmLora,
    &kVllmDrafts,
    &kVllmDraftTokens,
    &kVllmAcceptedTokens,
    &kVllmAcceptedPerPosition,
};

}  // namespace sluice::metric_names
