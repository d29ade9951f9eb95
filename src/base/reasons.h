// The reasons that a status can carry (WithReason of src/base/error.h): the words by which programs
// tell errors apart. They are ErrorInfo.reason on the wire, and the label `reason` of the metrics,
// so a word that is here never changes. Each comment says when the reason is given and what the
// caller does.
#pragma once

namespace sluice::reasons {

// ---- The node ----

// The node is draining or stopping and takes no new work, or the sequence outlived the time that
// the drain gave it. The caller uses another node.
inline constexpr char kDraining[] = "DRAINING";
// Resume came after the process was told to end. The caller starts the process again.
inline constexpr char kStopping[] = "STOPPING";
// The GPU failed and the node is about to end. The caller sends the same request to another node.
inline constexpr char kGpuFailed[] = "GPU_FAILED";
// A rank of the node's group ended or did not answer, and the node is about to end. The caller
// sends the same request to another node.
inline constexpr char kRankLost[] = "RANK_LOST";
// A handler threw, for example because an allocation failed. The caller may try once more.
inline constexpr char kException[] = "EXCEPTION";

// ---- The requester ----

// The caller may not act for the tenant that the request names. It names its own, or none.
inline constexpr char kOtherTenant[] = "OTHER_TENANT";
// The tenant's transfers fill its quota of DRAM. The caller waits for RetryInfo's time.
inline constexpr char kTenantDram[] = "TENANT_DRAM";
// The tenant has as many sequences as its quota allows. The caller waits for RetryInfo's time.
inline constexpr char kTenantSequences[] = "TENANT_SEQUENCES";
// The tenant used up its tokens per second. The caller waits for RetryInfo's time.
inline constexpr char kTenantTokens[] = "TENANT_TOKENS";

// ---- A sequence ----

// The request brings no caches and the node does not compute prompts. The caller hands the caches
// over first.
inline constexpr char kNoHandoff[] = "NO_HANDOFF";
// A live sequence has the same request_id. The caller chooses another one.
inline constexpr char kRequestIdInUse[] = "REQUEST_ID_IN_USE";
// The transfer, or the kept sequence, has its Generate already. The caller sends only one.
inline constexpr char kGenerateExists[] = "GENERATE_EXISTS";
// No such sequence is kept for the tenant. The caller hands its whole prompt over again.
inline constexpr char kSequenceNotFound[] = "SEQUENCE_NOT_FOUND";
// Too many sequences wait for the batch. The caller waits for RetryInfo's time.
inline constexpr char kTooManyWaiting[] = "TOO_MANY_WAITING";
// Too many Generates wait for a transfer that is not reserved yet. The caller waits for RetryInfo's
// time.
inline constexpr char kTooManyExpected[] = "TOO_MANY_EXPECTED";
// The transfer of a waiting Generate was not complete in time. The caller starts both again.
inline constexpr char kTransferWait[] = "TRANSFER_WAIT";
// Cancel or Abort ended the sequence, as the caller wanted.
inline constexpr char kCancelCall[] = "CANCEL_CALL";
// The caller's connection or its call ended, so nobody reads the answer.
inline constexpr char kCallerGone[] = "CALLER_GONE";
// The stream was not read for too long. The caller reads faster, or asks for fewer sequences.
inline constexpr char kSlowReader[] = "SLOW_READER";
// Weights or caches gave logits that are not finite. The caller looks for corrupt caches.
inline constexpr char kBadLogits[] = "BAD_LOGITS";
// A CPU worker that attends to the sequence failed. The same request may succeed.
inline constexpr char kWorkerFailed[] = "WORKER_FAILED";
// Part of the caches that the sequence needed in HBM did not arrive. The same request may succeed.
inline constexpr char kTransferFailed[] = "TRANSFER_FAILED";

// ---- A transfer (KvIngest) ----

// The caches are of another model than the one served. The caller prefills with the same model.
inline constexpr char kFingerprintMismatch[] = "FINGERPRINT_MISMATCH";
// Another transfer of the tenant has the rendezvous key. The caller chooses another one.
inline constexpr char kRendezvousKeyInUse[] = "RENDEZVOUS_KEY_IN_USE";
// The host KV cache has no room now. The caller waits for RetryInfo's time.
inline constexpr char kDramFull[] = "DRAM_FULL";
// Too many transfers are open, or their prompts and hints take too much memory. The caller waits
// for RetryInfo's time.
inline constexpr char kTooManyTransfers[] = "TOO_MANY_TRANSFERS";
// No such transfer: it was never reserved here, or it has ended. The caller reserves anew.
inline constexpr char kTransferNotFound[] = "TRANSFER_NOT_FOUND";
// The lease of the transfer or kept sequence ended. The caller reserves anew and renews in time.
inline constexpr char kLeaseExpired[] = "LEASE_EXPIRED";
// The sender aborted the transfer. The caller of Generate asks the prefill node why.
inline constexpr char kTransferAborted[] = "TRANSFER_ABORTED";
// The transfer is committed and takes no more chunks. The sender stops writing.
inline constexpr char kCommitted[] = "COMMITTED";
// Commit came before every block did. The sender writes the missing ones and commits again.
inline constexpr char kMissingBlocks[] = "MISSING_BLOCKS";
// Another stream is writing a block of the chunk. The sender sends the chunk again later.
inline constexpr char kBlockBusy[] = "BLOCK_BUSY";
// A chunk's payload does not have the checksum of its header. The sender sends it again.
inline constexpr char kChecksumMismatch[] = "CHECKSUM_MISMATCH";
// A landed block was sent again with other bytes. The sender aborts and reserves anew.
inline constexpr char kPoisoned[] = "POISONED";

// ---- A held prompt (Prefill and KvSource), and pulling it ----

// Too many prompts wait at the prefill node. The caller waits for RetryInfo's time, or uses another
// node.
inline constexpr char kQueueFull[] = "QUEUE_FULL";
// The held prompts leave no room for one more. The caller waits for RetryInfo's time, or uses
// another node.
inline constexpr char kHoldFull[] = "HOLD_FULL";
// The prompt was not computed, and another node would not fare better. The caller changes its
// request.
inline constexpr char kPrefillFailed[] = "PREFILL_FAILED";
// The source does not hold the prompt: it was released or its lease ended. The caller prefills
// again.
inline constexpr char kSourceNotFound[] = "SOURCE_NOT_FOUND";
// The source holds another prompt, or caches of another layout. The caller names the right prompt,
// or the operator gives both nodes the same cache settings.
inline constexpr char kSourceMismatch[] = "SOURCE_MISMATCH";
// The decode node's settings do not allow the source's address. The operator adds it.
inline constexpr char kSourceNotAllowed[] = "SOURCE_NOT_ALLOWED";
// The source cannot be reached, or its connection broke twice. The caller prefills elsewhere.
inline constexpr char kSourceUnreachable[] = "SOURCE_UNREACHABLE";
// The source sent nothing for too long, twice. The caller prefills elsewhere.
inline constexpr char kSourceSilent[] = "SOURCE_SILENT";
// Too many pulls wait for a thread of the decode node. The caller waits for RetryInfo's time.
inline constexpr char kPullsFull[] = "PULLS_FULL";
// Too many decode legs wait at the prefill node. The caller waits for RetryInfo's time.
inline constexpr char kRoomsFull[] = "ROOMS_FULL";
// Another leg of the same kind has the room. The gateway chooses another room.
inline constexpr char kRoomTaken[] = "ROOM_TAKEN";
// No prefill leg came to the room in time. The gateway sends both legs again.
inline constexpr char kRoomEmpty[] = "ROOM_EMPTY";

// ---- Admin ----

// The node keeps no record of its steps. The operator starts it with trace_steps above 0.
inline constexpr char kTraceOff[] = "TRACE_OFF";
// Other traces are being written. The caller waits for RetryInfo's time.
inline constexpr char kTooManyTraces[] = "TOO_MANY_TRACES";
// The node was started without allow_failpoints. The operator starts it with that setting.
inline constexpr char kFailpointsNotAllowed[] = "FAILPOINTS_NOT_ALLOWED";
// The program was built without failpoints. The operator uses a build that has them.
inline constexpr char kNoFailpoints[] = "NO_FAILPOINTS";
// A prefill node was asked for what only a decode node has. The caller asks the decode node.
inline constexpr char kPrefillNode[] = "PREFILL_NODE";

}  // namespace sluice::reasons
