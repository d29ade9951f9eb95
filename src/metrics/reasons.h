// The values of the label `reason`. They are a closed set, so that no caller can create series.
// They are spelled like the reasons that statuses carry on the wire (ErrorInfo.reason), so that a
// log line, an error and a metric use the same word.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace sluice {

// How a Generate call, or a Run call of a prefill node, ended. Each ends in exactly one of these.
enum class RequestOutcome {
  kFinishedStop,    // a stop token, stop string or EOS
  kFinishedLength,  // max_tokens, or the end of the context
  kHandedOver,      // Run only: a decode node has the prompt's KV
  kCancelled,       // by a Cancel call, or because the caller went away
  kDeadline,
  kSlowReader,
  kError,
  kRefused,  // before it was a sequence: bad input, no room, draining
};
inline constexpr std::array<std::string_view, 8> kRequestOutcomeNames = {
    "finished_stop", "finished_length", "handed_over", "cancelled",
    "deadline",      "slow_reader",     "error",       "refused"};

// Reasons of sequences that ended well, which no status carries.
inline constexpr std::string_view kStopToken = "STOP_TOKEN";
inline constexpr std::string_view kStopString = "STOP_STRING";
inline constexpr std::string_view kMaxTokens = "MAX_TOKENS";
inline constexpr std::string_view kPushed = "PUSHED";

// Counts reasons that are missing in a table below.
inline constexpr std::string_view kOtherReason = "OTHER";

struct RequestReason {
  RequestOutcome outcome;
  std::string_view reason;
};

// Every series of sluice_requests_total. The last one of an outcome is for reasons not listed.
inline constexpr RequestReason kRequestReasons[] = {
    {RequestOutcome::kFinishedStop, kStopToken},
    {RequestOutcome::kFinishedStop, kStopString},
    {RequestOutcome::kFinishedLength, kMaxTokens},
    {RequestOutcome::kHandedOver, kPushed},
    {RequestOutcome::kCancelled, "CANCEL_CALL"},
    {RequestOutcome::kCancelled, "CALLER_GONE"},
    {RequestOutcome::kCancelled, kOtherReason},
    {RequestOutcome::kDeadline, "DEADLINE_EXCEEDED"},
    {RequestOutcome::kDeadline, "TRANSFER_WAIT"},
    {RequestOutcome::kDeadline, "LEASE_EXPIRED"},
    {RequestOutcome::kDeadline, "ROOM_EMPTY"},
    {RequestOutcome::kDeadline, "SOURCE_SILENT"},
    {RequestOutcome::kDeadline, kOtherReason},
    {RequestOutcome::kSlowReader, "SLOW_READER"},
    {RequestOutcome::kError, "BAD_LOGITS"},
    {RequestOutcome::kError, "DRAINING"},
    {RequestOutcome::kError, "DRAM_FULL"},
    {RequestOutcome::kError, "GPU_FAILED"},
    {RequestOutcome::kError, "HOLD_FULL"},
    {RequestOutcome::kError, "INTERNAL"},
    {RequestOutcome::kError, "INVALID_ARGUMENT"},
    {RequestOutcome::kError, "POISONED"},
    {RequestOutcome::kError, "PREFILL_FAILED"},
    {RequestOutcome::kError, "PULLS_FULL"},
    {RequestOutcome::kError, "ROOMS_FULL"},
    {RequestOutcome::kError, "ROOM_TAKEN"},
    {RequestOutcome::kError, "SOURCE_MISMATCH"},
    {RequestOutcome::kError, "SOURCE_NOT_FOUND"},
    {RequestOutcome::kError, "SOURCE_UNREACHABLE"},
    {RequestOutcome::kError, "TRANSFER_ABORTED"},
    {RequestOutcome::kError, "TRANSFER_FAILED"},
    {RequestOutcome::kError, "UNAVAILABLE"},
    {RequestOutcome::kError, "WORKER_FAILED"},
    {RequestOutcome::kError, kOtherReason},
    {RequestOutcome::kRefused, "DRAINING"},
    {RequestOutcome::kRefused, "EXCEPTION"},
    {RequestOutcome::kRefused, "GENERATE_EXISTS"},
    {RequestOutcome::kRefused, "GPU_FAILED"},
    {RequestOutcome::kRefused, "INVALID_ARGUMENT"},
    {RequestOutcome::kRefused, "NO_HANDOFF"},
    {RequestOutcome::kRefused, "POISONED"},
    {RequestOutcome::kRefused, "QUEUE_FULL"},
    {RequestOutcome::kRefused, "REQUEST_ID_IN_USE"},
    {RequestOutcome::kRefused, "ROOM_TAKEN"},
    {RequestOutcome::kRefused, "SEQUENCE_NOT_FOUND"},
    {RequestOutcome::kRefused, "SOURCE_NOT_ALLOWED"},
    {RequestOutcome::kRefused, "OTHER_TENANT"},
    {RequestOutcome::kRefused, "TENANT_SEQUENCES"},
    {RequestOutcome::kRefused, "TENANT_TOKENS"},
    {RequestOutcome::kRefused, "TOO_MANY_EXPECTED"},
    {RequestOutcome::kRefused, "TOO_MANY_WAITING"},
    {RequestOutcome::kRefused, "TRANSFER_NOT_FOUND"},
    {RequestOutcome::kRefused, kOtherReason},
};

// The reasons why a Reserve was refused, which are the series of sluice_reserves_total with outcome
// "refused". The last one is for reasons not listed.
inline constexpr std::string_view kReserveReasons[] = {
    "DRAINING",    "DRAM_FULL",          "EXCEPTION",    "FINGERPRINT_MISMATCH",
    "GPU_FAILED",  "INVALID_ARGUMENT",   "OTHER_TENANT", "RENDEZVOUS_KEY_IN_USE",
    "TENANT_DRAM", "TOO_MANY_TRANSFERS", kOtherReason,
};

// The reasons why a pull failed, which are the series of sluice_pulls_total with outcome "failed".
// The last one is for reasons not listed.
inline constexpr std::string_view kPullReasons[] = {
    "CALLER_GONE",          "DATA_LOSS",       "DEADLINE_EXCEEDED", "DRAINING",
    "FINGERPRINT_MISMATCH", "SOURCE_MISMATCH", "SOURCE_NOT_FOUND",  "SOURCE_SILENT",
    "SOURCE_UNREACHABLE",   kOtherReason,
};

// Returns the reason that a status carries, or the name of its code.
std::string ReasonLabel(const absl::Status& status);

// Returns the outcome as which the error of a sequence that had begun is counted.
RequestOutcome OutcomeOfError(const absl::Status& status);

}  // namespace sluice
