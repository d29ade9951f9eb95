// The values of the label `reason`. They are a closed set, so that no caller can create series.
// They are spelled like the reasons that statuses carry on the wire (ErrorInfo.reason), so that a
// log line, an error and a metric use the same word.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "src/base/reasons.h"

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
    {RequestOutcome::kCancelled, reasons::kCancelCall},
    {RequestOutcome::kCancelled, reasons::kCallerGone},
    {RequestOutcome::kCancelled, kOtherReason},
    {RequestOutcome::kDeadline, "DEADLINE_EXCEEDED"},
    {RequestOutcome::kDeadline, reasons::kTransferWait},
    {RequestOutcome::kDeadline, reasons::kLeaseExpired},
    {RequestOutcome::kDeadline, reasons::kRoomEmpty},
    {RequestOutcome::kDeadline, reasons::kSourceSilent},
    {RequestOutcome::kDeadline, kOtherReason},
    {RequestOutcome::kSlowReader, reasons::kSlowReader},
    {RequestOutcome::kError, reasons::kBadLogits},
    {RequestOutcome::kError, reasons::kDraining},
    {RequestOutcome::kError, reasons::kDramFull},
    {RequestOutcome::kError, reasons::kGpuFailed},
    {RequestOutcome::kError, reasons::kHoldFull},
    {RequestOutcome::kError, "INTERNAL"},
    {RequestOutcome::kError, "INVALID_ARGUMENT"},
    {RequestOutcome::kError, reasons::kPoisoned},
    {RequestOutcome::kError, reasons::kPrefillFailed},
    {RequestOutcome::kError, reasons::kPullsFull},
    {RequestOutcome::kError, reasons::kRankLost},
    {RequestOutcome::kError, reasons::kRoomsFull},
    {RequestOutcome::kError, reasons::kRoomTaken},
    {RequestOutcome::kError, reasons::kSourceMismatch},
    {RequestOutcome::kError, reasons::kSourceNotFound},
    {RequestOutcome::kError, reasons::kSourceUnreachable},
    {RequestOutcome::kError, reasons::kTransferAborted},
    {RequestOutcome::kError, reasons::kTransferFailed},
    {RequestOutcome::kError, "UNAVAILABLE"},
    {RequestOutcome::kError, reasons::kWorkerFailed},
    {RequestOutcome::kError, kOtherReason},
    {RequestOutcome::kRefused, reasons::kDraining},
    {RequestOutcome::kRefused, reasons::kException},
    {RequestOutcome::kRefused, reasons::kGenerateExists},
    {RequestOutcome::kRefused, reasons::kGpuFailed},
    {RequestOutcome::kRefused, "INVALID_ARGUMENT"},
    {RequestOutcome::kRefused, reasons::kNoHandoff},
    {RequestOutcome::kRefused, reasons::kPoisoned},
    {RequestOutcome::kRefused, reasons::kQueueFull},
    {RequestOutcome::kRefused, reasons::kRankLost},
    {RequestOutcome::kRefused, reasons::kRequestIdInUse},
    {RequestOutcome::kRefused, reasons::kRoomTaken},
    {RequestOutcome::kRefused, reasons::kSequenceNotFound},
    {RequestOutcome::kRefused, reasons::kSourceNotAllowed},
    {RequestOutcome::kRefused, reasons::kOtherTenant},
    {RequestOutcome::kRefused, reasons::kTenantSequences},
    {RequestOutcome::kRefused, reasons::kTenantTokens},
    {RequestOutcome::kRefused, reasons::kTooManyExpected},
    {RequestOutcome::kRefused, reasons::kTooManyWaiting},
    {RequestOutcome::kRefused, reasons::kTransferNotFound},
    {RequestOutcome::kRefused, kOtherReason},
};

// The reasons why a Reserve was refused, which are the series of sluice_reserves_total with outcome
// "refused". The last one is for reasons not listed.
inline constexpr std::string_view kReserveReasons[] = {
    reasons::kDraining,    reasons::kDramFull,
    reasons::kException,   reasons::kFingerprintMismatch,
    reasons::kGpuFailed,   "INVALID_ARGUMENT",
    reasons::kOtherTenant, reasons::kRendezvousKeyInUse,
    reasons::kTenantDram,  reasons::kTooManyTransfers,
    kOtherReason,
};

// The reasons why a pull failed, which are the series of sluice_pulls_total with outcome "failed".
// The last one is for reasons not listed.
inline constexpr std::string_view kPullReasons[] = {
    reasons::kCallerGone,          "DATA_LOSS",
    "DEADLINE_EXCEEDED",           reasons::kDraining,
    reasons::kFingerprintMismatch, reasons::kSourceMismatch,
    reasons::kSourceNotFound,      reasons::kSourceSilent,
    reasons::kSourceUnreachable,   kOtherReason,
};

// Returns the reason that a status carries, or the name of its code.
std::string ReasonLabel(const absl::Status& status);

// Returns the outcome as which the error of a sequence that had begun is counted.
RequestOutcome OutcomeOfError(const absl::Status& status);

}  // namespace sluice
