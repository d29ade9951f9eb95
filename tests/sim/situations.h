// The situations that seeds are meant to bring about, and how often each occurred.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sluice::sim {

enum class Situation {
  kGenerateBeforeReserve,
  kGenerateDuringTransfer,
  kGenerateAfterCommit,
  kGenerateNever,
  kGenerateTwice,
  kLocalPrefill,
  kPartialContext,
  kFirstTokens,
  kHinted,
  kHintsRefused,
  kSampled,
  kReserveRefusedForRoom,
  kReserveRetriedWithItsKey,
  kPrefixFound,
  kPrefixFoundLocally,
  kPrefixSentAllTheSame,
  kPrefixEvicted,
  kChunkTwice,
  kChunkCorrupted,
  kChunkDiffers,
  kChunkDropped,
  kChunkHeldUp,
  kChunkHeldUpPastTheEnd,
  kBlockBusy,
  kCommitTooEarly,
  kCommitTwice,
  kWriteAfterCommit,
  kAbort,
  kAbortDuringChunk,
  kLeaseExpired,
  kTooManyWaiting,
  kWaitedForHbm,
  kPreempted,
  kOutgrewItsBudget,
  kReadOutsideHbm,
  kTwoStepsInFlight,
  kDraftAccepted,
  kDraftRefuted,
  kParked,
  kReadAgainAfterParking,
  kEndedByStop,
  kEndedByLength,
  kEndedByCancel,
  kEndedByDeadline,
  kEndedByTransferWait,
  kEndedBySlowReader,
  kEndedByBadLogits,
  kEndedByWorker,
  kEndedByPoison,
  kEndedByAbort,
  kEndedByDrain,
  kEndedByDrainTime,
  kCancelMissed,
  kCancelAll,
  kRefusedWhileDraining,
  kDrained,
  kResumed,
  kClockLeapt,
  kStreamStalled,
  kAllocationRefused,
  kCount,
};
inline constexpr size_t kSituations = static_cast<size_t>(Situation::kCount);

// Returns the situation in plain words.
const char* Name(Situation situation);

// Number of times that each occurred, in memory that the processes of a run share.
using SituationCounts = std::array<std::atomic<uint64_t>, kSituations>;

}  // namespace sluice::sim
