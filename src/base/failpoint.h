// Failpoints are named places where a fault can be made to happen, for tests of what survives it.
//
//   if (SLUICE_FAILPOINT(kKvReserve)) return DramFull();   // a fault
//   SLUICE_FAILPOINT_PAUSE(kIngestLanding);                // a delay
//
// They are armed by terms, which are separated by ';':
//
//   kv.reserve=error               every time
//   ingest.landing=delay(50ms)     the thread sleeps there
//   clock.jump=jump(-1h)           the clock leaps
//   engine.step=kill@20            the process dies there, as by kill -9
//   kv.wake=error%0.2*3@10         after 10 hits with probability 0.2, at most 3 times
//   kv.wake=off                    disarmed
//
// A term draws its random numbers from the seed it was armed with, so one thread's run repeats
// itself.
//
// The CMake option SLUICE_FAILPOINTS compiles failpoints in. An unarmed failpoint is then one
// relaxed load of an atomic (0.1 ns or less in a loop; 90 ns armed). Without the option it is the
// constant false, and arming is refused. All functions may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

// F(id, name, kind, what happens, what survives). For each failpoint a test that names it shows
// what survives.
#define SLUICE_FAILPOINTS_LIST(F)                                                                \
  F(kDeviceAllocate, "device.allocate", kFault, "the device has no memory for a buffer",         \
    "the program ends at start with a status that names the buffer")                             \
  F(kDeviceFailure, "device.failure", kFault, "the GPU, or the CPU device in its place, fails",  \
    "every sequence ends with INTERNAL, reason GPU_FAILED; then the program ends with status 1") \
  F(kWeightsRead, "weights.read", kFault, "a weights file ends too soon",                        \
    "the program ends at start and names the file and the tensor")                               \
  F(kWeightsHeader, "weights.header", kFault, "the header of a weights file is damaged",         \
    "the program ends at start, naming the file")                                                \
  F(kConfigRead, "config.read", kFault, "the configuration file cannot be read",                 \
    "the program ends at start, naming the file")                                                \
  F(kAddressFileWrite, "address_file.write", kFault, "the address file cannot be written",       \
    "the program ends with a status that names it; no half-written file stays")                  \
  F(kServerCanary, "server.canary", kFault, "the canary decode fails, or takes long",            \
    "the node never becomes ready")                                                              \
  F(kServerDrain, "server.drain", kFault, "the notice that everything has finished is lost",     \
    "a drain ends by its timeout, and the program ends with it")                                 \
  F(kClockJump, "clock.jump", kClock, "the clock jumps, forward or back",                        \
    "no wait hangs; deadlines and leases that the jump passes end as if their time had come")    \
  F(kKvReserve, "kv.reserve", kFault, "Reserve finds no room in the host KV cache",              \
    "RESOURCE_EXHAUSTED with RetryInfo; nothing stays reserved")                                 \
  F(kKvAdmit, "kv.admit", kFault, "Admit finds no room in HBM",                                  \
    "the sequence waits and is admitted later, with the same tokens")                            \
  F(kKvCopy, "kv.copy", kPause, "a copy between the host KV cache and HBM is slow",              \
    "the sequence starts later; others never wait for it")                                       \
  F(kKvWake, "kv.wake", kFault, "the engine is not told that a transfer changed",                \
    "the engine looks again by itself: the stream starts late and never hangs")                  \
  F(kKvReap, "kv.reap", kFault, "the engine skips a pass over the leases",                       \
    "the lease ends at the next pass")                                                           \
  F(kIngestChecksum, "ingest.checksum", kFault, "a chunk arrives damaged",                       \
    "DATA_LOSS names the block, which stays missing and may be sent again")                      \
  F(kIngestLanding, "ingest.landing", kPause, "a chunk is copied to its pages slowly",           \
    "its pages get no second owner before the writer is gone, even if the lease ends first")     \
  F(kIngestReset, "ingest.reset", kFault, "a Write stream breaks",                               \
    "the transfer resumes from the blocks that have landed")                                     \
  F(kIngestWriteAnswer, "ingest.write_answer", kFault, "the answer to a Write is lost",          \
    "GetTransfer says what has landed; a repeated Write is accepted")                            \
  F(kIngestCommitAnswer, "ingest.commit_answer", kFault, "the answer to a Commit is lost",       \
    "a second Commit gets the answer of the first")                                              \
  F(kEngineQueue, "engine.queue", kFault, "too many sequences wait",                             \
    "RESOURCE_EXHAUSTED with RetryInfo; the transfer stays for the next Generate call")          \
  F(kEngineWake, "engine.wake", kFault, "the engine is not woken for new messages in its inbox", \
    "the engine looks again by itself: the work is done late and never hangs")                   \
  F(kEngineStep, "engine.step", kPause, "a step takes long",                                     \
    "cancels and deadlines still end their sequences")                                           \
  F(kEngineLogits, "engine.logits", kFault, "the first sampled row of a step has logits of NaN", \
    "that sequence ends with INTERNAL, reason BAD_LOGITS; the others go on")                     \
  F(kAttentionWorker, "attention.worker", kFault, "a CPU attention worker fails, or is late",    \
    "its sequences end with INTERNAL, reason WORKER_FAILED; the others go on, to the bit")       \
  F(kAttentionWorkerExit, "attention.worker_exit", kFault, "a CPU attention worker dies",        \
    "its sequences end with WORKER_FAILED too; the remaining workers serve later sequences")     \
  F(kAttentionArbiter, "attention.arbiter", kFault,                                              \
    "the arbiter of parts that a GPU pulls fails, or is late (policy fluxion)",                  \
    "all sequences end with WORKER_FAILED; the CPU workers alone serve later ones")              \
  F(kAttentionArbiterExit, "attention.arbiter_exit", kFault, "that arbiter dies",                \
    "all sequences end with WORKER_FAILED; the CPU workers alone serve later ones")              \
  F(kAttentionWarmUp, "attention.warm_up", kFault,                                               \
    "the warm-up copy of a sequence to HBM is lost, or late (policy ess)",                       \
    "the sequence ends with INTERNAL, reason TRANSFER_FAILED, or starts late; no other waits")   \
  F(kAttentionGather, "attention.gather", kFault,                                                \
    "the KV that the first decode row of a step fetches is lost (policy ess)",                   \
    "the sequence ends with INTERNAL, reason TRANSFER_FAILED; the others go on, to the bit")     \
  F(kRankOrder, "rank.order", kPause, "another rank than 0 comes late to what rank 0 orders",    \
    "the ranks wait for it; a rank that is killed ends the group with RANK_LOST")                \
  F(kRankCollective, "rank.collective", kPause,                                                  \
    "a rank of the CPU device stays in the middle of a collective",                              \
    "the ranks wait for it; a rank that is killed there leaves no token of that step")           \
  F(kDecodeSink, "decode.sink", kFault, "a stream has no room, as if its reader were slow",      \
    "the sequence is parked and goes on without losing a token")                                 \
  F(kDecodeReset, "decode.reset", kFault, "a Generate stream breaks",                            \
    "its sequence ends and its memory comes back; the others go on")                             \
  F(kServiceQueue, "service.queue", kFault, "a worker queue is full",                            \
    "RESOURCE_EXHAUSTED with RetryInfo")                                                         \
  F(kServiceHandler, "service.handler", kFault, "the handler of a call throws an exception",     \
    "that call ends with INTERNAL, reason EXCEPTION; the next one is answered")                  \
  F(kPrefillPush, "prefill.push", kFault, "the stream to the decode node breaks within a layer", \
    "the missing blocks are sent again on a new stream")                                         \
  F(kSourceReset, "source.reset", kFault, "a Read of held KV breaks",                            \
    "the missing blocks are read on another connection, once")                                   \
  F(kSourceChecksum, "source.checksum", kFault,                                                  \
    "a chunk that is read does not match its checksum",                                          \
    "its blocks stay missing and are read again, once")                                          \
  F(kLinkSend, "link.send", kFault, "a link to another node breaks, or its sender stands still", \
    "both ends give it up in time, and the missing blocks go over gRPC")                         \
  F(kAdminHttp, "admin.http", kFault, "an admin HTTP handler throws an exception",               \
    "status 500; the next request is answered")

namespace sluice {

enum class Failpoint : uint8_t {
#define SLUICE_FAILPOINT_ID_(id, name, kind, effect, survives) id,
  SLUICE_FAILPOINTS_LIST(SLUICE_FAILPOINT_ID_)
#undef SLUICE_FAILPOINT_ID_
};

inline constexpr size_t kFailpoints = 0
#define SLUICE_FAILPOINT_ONE_(id, name, kind, effect, survives) +1
    SLUICE_FAILPOINTS_LIST(SLUICE_FAILPOINT_ONE_)
#undef SLUICE_FAILPOINT_ONE_
    ;

enum class FailpointKind : uint8_t {
  kFault,  // takes error, delay and kill
  kPause,  // takes delay and kill
  kClock,  // takes jump
};

struct FailpointInfo {
  const char* name;
  FailpointKind kind;
  const char* effect;
  const char* survives;
};
const FailpointInfo& InfoOf(Failpoint point);

struct FailpointTerm {
  enum class Action : uint8_t { kOff, kError, kDelay, kJump, kKill };
  Failpoint point{};
  Action action = Action::kOff;
  absl::Duration argument;  // for kDelay and kJump
  double probability = 1;
  uint64_t count = UINT64_MAX;  // maximum number of faults
  uint64_t skip = 0;            // hits before the first fault
};

// The largest arguments.
inline constexpr absl::Duration kMaxFailpointDelay = absl::Minutes(1);
inline constexpr absl::Duration kMaxFailpointJump = absl::Hours(1000);

// Returns the terms, or INVALID_ARGUMENT, which says which term is wrong and what would be right.
// It gives the nearest known name for an unknown one.
absl::StatusOr<std::vector<FailpointTerm>> ParseFailpoints(std::string_view terms);
// Returns the term in the form that ParseFailpoints reads.
std::string FormatFailpoint(const FailpointTerm& term);

// Arms all of `terms` or, with an error, none. The failpoints' counts start again at zero. Returns
// FAILED_PRECONDITION, reason NO_FAILPOINTS, if failpoints are not compiled in.
absl::Status ArmFailpoints(std::string_view terms, uint64_t seed = 0);
// Disarms all failpoints. Their counts stay.
void DisarmFailpoints();

struct FailpointState {
  Failpoint point{};
  FailpointTerm term;  // as armed last
  bool armed = false;  // false also once its count is used up
  uint64_t hits = 0;   // times the place was passed while armed
  uint64_t fired = 0;  // times the fault happened
};
FailpointState StateOf(Failpoint point);
// Returns the states of all failpoints, in the order of the list above.
std::vector<FailpointState> ListFailpoints();

// Makes delay() call `sleep` instead of sleeping, for example to move a simulated clock. Null:
// delay() sleeps again.
void SetFailpointSleep(std::function<void(absl::Duration)> sleep);

// Keeps terms armed while it lives. For tests.
class ScopedFailpoints {
 public:
  // REQUIRES: the terms are right and failpoints are compiled in.
  explicit ScopedFailpoints(std::string_view terms, uint64_t seed = 0);
  ~ScopedFailpoints() { DisarmFailpoints(); }
  ScopedFailpoints(const ScopedFailpoints&) = delete;
  ScopedFailpoints& operator=(const ScopedFailpoints&) = delete;
};

namespace failpoint_internal {
extern std::array<std::atomic<bool>, kFailpoints> armed;
// Counts a hit, and sleeps if that is the action. Returns whether the fault happens.
bool Hit(Failpoint point);

inline bool Fires(Failpoint point) {
  if (armed[static_cast<size_t>(point)].load(std::memory_order_relaxed)) [[unlikely]] {
    return Hit(point);
  }
  return false;
}
}  // namespace failpoint_internal

#ifndef SLUICE_NO_FAILPOINTS
inline constexpr bool kFailpointsCompiledIn = true;
#define SLUICE_FAILPOINT(id) (::sluice::failpoint_internal::Fires(::sluice::Failpoint::id))
#else
inline constexpr bool kFailpointsCompiledIn = false;
#define SLUICE_FAILPOINT(id) (false)
#endif
#define SLUICE_FAILPOINT_PAUSE(id) static_cast<void>(SLUICE_FAILPOINT(id))

}  // namespace sluice
