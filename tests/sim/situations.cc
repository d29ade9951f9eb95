#include "tests/sim/situations.h"

namespace sluice::sim {

const char* Name(Situation situation) {
  switch (situation) {
    case Situation::kGenerateBeforeReserve:
      return "Generate before Reserve";
    case Situation::kGenerateDuringTransfer:
      return "Generate during the transfer";
    case Situation::kGenerateAfterCommit:
      return "Generate after Commit";
    case Situation::kGenerateNever:
      return "transfer without a Generate";
    case Situation::kGenerateTwice:
      return "second Generate of a transfer";
    case Situation::kLocalPrefill:
      return "prompt computed here";
    case Situation::kPartialContext:
      return "part of the prompt handed over";
    case Situation::kFirstTokens:
      return "first tokens handed over";
    case Situation::kHinted:
      return "hints with the handoff";
    case Situation::kHintsRefused:
      return "hints refused";
    case Situation::kSampled:
      return "sampled, not greedy";
    case Situation::kReserveRefusedForRoom:
      return "Reserve refused, no room";
    case Situation::kReserveRetriedWithItsKey:
      return "Reserve with a key in use";
    case Situation::kPrefixFound:
      return "Reserve finds a prefix";
    case Situation::kPrefixFoundLocally:
      return "a prompt that is computed here begins with a known prefix";
    case Situation::kPrefixSentAllTheSame:
      return "a sender sends the known prefix too";
    case Situation::kPrefixEvicted:
      return "known prefixes made room";
    case Situation::kChunkTwice:
      return "same chunk twice";
    case Situation::kChunkCorrupted:
      return "chunk with a wrong checksum";
    case Situation::kChunkDiffers:
      return "landed block sent with other bytes";
    case Situation::kChunkDropped:
      return "stream broken inside a chunk";
    case Situation::kChunkHeldUp:
      return "writer held up inside a chunk";
    case Situation::kChunkHeldUpPastTheEnd:
      return "writer held up past its transfer's end";
    case Situation::kBlockBusy:
      return "block under another's hand";
    case Situation::kCommitTooEarly:
      return "Commit with blocks missing";
    case Situation::kCommitTwice:
      return "Commit twice";
    case Situation::kWriteAfterCommit:
      return "chunk after Commit";
    case Situation::kAbort:
      return "Abort";
    case Situation::kAbortDuringChunk:
      return "Abort inside a chunk";
    case Situation::kLeaseExpired:
      return "lease over";
    case Situation::kTooManyWaiting:
      return "Generate refused, too many wait";
    case Situation::kWaitedForHbm:
      return "waited for HBM with a slot free";
    case Situation::kOutgrewItsBudget:
      return "exact, and approximate once it outgrew its budget";
    case Situation::kReadOutsideHbm:
      return "part of what is outside HBM read by fluxion";
    case Situation::kTwoStepsInFlight:
      return "two steps in flight";
    case Situation::kDraftAccepted:
      return "draft accepted";
    case Situation::kDraftRefuted:
      return "draft refuted";
    case Situation::kParked:
      return "parked for its reader";
    case Situation::kReadAgainAfterParking:
      return "ended well after a pause of its reader";
    case Situation::kEndedByStop:
      return "ended by a stop token";
    case Situation::kEndedByLength:
      return "ended by length";
    case Situation::kEndedByCancel:
      return "ended by Cancel";
    case Situation::kEndedByDeadline:
      return "ended by its deadline";
    case Situation::kEndedByTransferWait:
      return "ended by the wait for its transfer";
    case Situation::kEndedBySlowReader:
      return "ended by its slow reader";
    case Situation::kEndedByBadLogits:
      return "ended by logits that are not finite";
    case Situation::kEndedByWorker:
      return "ended by a worker's failure";
    case Situation::kEndedByPoison:
      return "ended by a poisoned transfer";
    case Situation::kEndedByAbort:
      return "ended by the sender's Abort";
    case Situation::kEndedByDrain:
      return "ended by a drain";
    case Situation::kCancelMissed:
      return "Cancel after the end";
    case Situation::kCancelAll:
      return "everything cancelled";
    case Situation::kRefusedWhileDraining:
      return "Generate refused, draining";
    case Situation::kEndedByDrainTime:
      return "ended by the end of a drain's time";
    case Situation::kResumed:
      return "drain taken back";
    case Situation::kPreempted:
      return "preempted, and not back yet";
    case Situation::kDrained:
      return "drained to idle";
    case Situation::kClockLeapt:
      return "clock leapt";
    case Situation::kStreamStalled:
      return "device stream stalled";
    case Situation::kAllocationRefused:
      return "allocation refused at start";
    case Situation::kCount:
      break;
  }
  return "?";
}

}  // namespace sluice::sim
