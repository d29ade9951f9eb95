// Failpoints: named places where a fault can be made to happen, for tests of what survives it.
//
//   if (SLUICE_FAILPOINT(kKvReserve)) return DramFull();   // a fault
//   SLUICE_FAILPOINT_PAUSE(kIngestLanding);                // a delay
//
// Armed by terms, several of them with ';' between:
//
//   kv.reserve=error               every time
//   ingest.landing=delay(50ms)     the thread sleeps there
//   clock.jump=jump(-1h)           the clock leaps
//   kv.wake=error%0.2*3@10         after 10 hits with probability 0.2, at most 3 times
//   kv.wake=off                    disarmed
//
// The draws of a term come from the seed it was armed with, so one thread's run repeats itself.
//
// Compiled in with the CMake option SLUICE_FAILPOINTS; then an unarmed failpoint is one relaxed
// load of an atomic (0.1 ns or less in a loop; 90 ns armed), and without the option it is the
// constant false and arming is refused. All functions may be called from any thread.
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

// F(id, name, kind, what happens, what survives). Each is named by the test that shows the last.
#define SLUICE_FAILPOINTS_LIST(F)                                                                 \
  F(kDeviceAllocate, "device.allocate", kFault, "a buffer of the device finds no memory",         \
    "the program ends at start with a status that names the buffer")                              \
  F(kDeviceFailure, "device.failure", kFault, "the GPU fails, or what stands in for it",          \
    "every sequence ends with INTERNAL, reason GPU_FAILED; then the program, with status 1")      \
  F(kWeightsRead, "weights.read", kFault, "a file of weights ends too soon",                      \
    "the program ends at start, naming file and tensor")                                          \
  F(kWeightsHeader, "weights.header", kFault, "the header of a file of weights is damaged",       \
    "the program ends at start, naming the file")                                                 \
  F(kConfigRead, "config.read", kFault, "the configuration file cannot be read",                  \
    "the program ends at start, naming the file")                                                 \
  F(kAddressFileWrite, "address_file.write", kFault, "the address file cannot be written",        \
    "the program ends with a status that names it; no half-written file stays")                   \
  F(kServerCanary, "server.canary", kFault, "the canary decode fails, or takes long",             \
    "the node never becomes ready")                                                               \
  F(kServerDrain, "server.drain", kFault, "what says that everything has finished is lost",       \
    "a drain ends by its timeout, and the program with it")                                       \
  F(kClockJump, "clock.jump", kClock, "the clock leaps, forward or back",                         \
    "no wait hangs; deadlines and leases that the leap passes end as if their time had come")     \
  F(kKvReserve, "kv.reserve", kFault, "Reserve finds no room in DRAM",                            \
    "RESOURCE_EXHAUSTED with RetryInfo; nothing stays reserved")                                  \
  F(kKvAdmit, "kv.admit", kFault, "Admit finds no room in HBM",                                   \
    "the sequence waits and is admitted later, with the same tokens")                             \
  F(kKvCopy, "kv.copy", kPause, "a copy between tiers is slow",                                   \
    "the sequence starts later; others never wait for it")                                        \
  F(kKvWake, "kv.wake", kFault, "the engine is not told that a transfer changed",                 \
    "it looks again by itself: the stream starts late, and never hangs")                          \
  F(kKvReap, "kv.reap", kFault, "a pass over the leases is left out",                             \
    "the lease ends at the next one")                                                             \
  F(kIngestChecksum, "ingest.checksum", kFault, "a chunk arrives damaged",                        \
    "DATA_LOSS names the block, which stays missing and may be sent again")                       \
  F(kIngestLanding, "ingest.landing", kPause, "a chunk's way into its pages is slow",             \
    "its pages have no second owner before its writer is gone, even if the lease ends first")     \
  F(kIngestReset, "ingest.reset", kFault, "a Write stream breaks",                                \
    "the transfer resumes from the blocks that have landed")                                      \
  F(kIngestWriteAnswer, "ingest.write_answer", kFault, "the answer to a Write is lost",           \
    "GetTransfer says what has landed; a repeat of it is accepted")                               \
  F(kIngestCommitAnswer, "ingest.commit_answer", kFault, "the answer to a Commit is lost",        \
    "a second Commit is answered as the first was")                                               \
  F(kEngineQueue, "engine.queue", kFault, "too many sequences wait",                              \
    "RESOURCE_EXHAUSTED with RetryInfo; its transfer stays for the next Generate")                \
  F(kEngineWake, "engine.wake", kFault, "the engine is not woken for what is in its inbox",       \
    "it looks again by itself: the work is done late, and never hangs")                           \
  F(kEngineStep, "engine.step", kPause, "a step takes long",                                      \
    "cancels and deadlines still end their sequences")                                            \
  F(kEngineLogits, "engine.logits", kFault, "the first sampled row of a step has logits of NaN",  \
    "that sequence ends with INTERNAL, reason BAD_LOGITS; the others go on")                      \
  F(kAttentionWorker, "attention.worker", kFault, "a CPU worker that attends fails, or is late",  \
    "its sequences end with INTERNAL, reason WORKER_FAILED; the others go on, to the bit")        \
  F(kAttentionWorkerExit, "attention.worker_exit", kFault, "a CPU worker that attends dies",      \
    "its sequences end likewise; later ones are served by the workers that are left")             \
  F(kAttentionWarmUp, "attention.warm_up", kFault,                                                \
    "what a sequence begins with in HBM is lost on its way, or late (policy ess)",                \
    "its sequence ends with INTERNAL, reason TRANSFER_FAILED, or starts late; no other waits")    \
  F(kAttentionGather, "attention.gather", kFault,                                                 \
    "what the first decode row of a step fetches is lost (policy ess)",                           \
    "its sequence ends with INTERNAL, reason TRANSFER_FAILED; the others go on, to the bit")      \
  F(kDecodeSink, "decode.sink", kFault, "a stream has no room, as with a slow reader",            \
    "the sequence is parked and goes on without losing a token")                                  \
  F(kDecodeReset, "decode.reset", kFault, "a Generate stream breaks",                             \
    "its sequence ends and its memory comes back; the others go on")                              \
  F(kServiceQueue, "service.queue", kFault, "a queue of workers is full",                         \
    "RESOURCE_EXHAUSTED with RetryInfo")                                                          \
  F(kServiceHandler, "service.handler", kFault, "the handler of a call throws an exception",      \
    "that call ends with INTERNAL, reason EXCEPTION; the next one is answered")                   \
  F(kPrefillPush, "prefill.push", kFault, "the stream to the decode node breaks under a layer",   \
    "what is missing is sent again on a new one")                                                 \
  F(kSourceReset, "source.reset", kFault, "a Read of held caches breaks",                         \
    "what has not landed is read on another connection, once")                                    \
  F(kSourceChecksum, "source.checksum", kFault, "a chunk that is read does not fit its checksum", \
    "its blocks stay missing and are read again, once")                                           \
  F(kAdminHttp, "admin.http", kFault, "an admin HTTP handler throws an exception",                \
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
  kFault,  // takes error and delay
  kPause,  // takes delay
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
  enum class Action : uint8_t { kOff, kError, kDelay, kJump };
  Failpoint point{};
  Action action = Action::kOff;
  absl::Duration argument;  // of kDelay and kJump
  double probability = 1;
  uint64_t count = UINT64_MAX;  // faults at most
  uint64_t skip = 0;            // hits before the first
};

// Bounds of arguments.
inline constexpr absl::Duration kMaxFailpointDelay = absl::Minutes(1);
inline constexpr absl::Duration kMaxFailpointJump = absl::Hours(1000);

// INVALID_ARGUMENT says which term is wrong and what would be right; for an unknown name the
// nearest known one.
absl::StatusOr<std::vector<FailpointTerm>> ParseFailpoints(std::string_view terms);
// The term as ParseFailpoints reads it.
std::string FormatFailpoint(const FailpointTerm& term);

// Arms all of `terms` or, with an error, none. A failpoint's counts start again at zero.
// FAILED_PRECONDITION, reason NO_FAILPOINTS, where they are not compiled in.
absl::Status ArmFailpoints(std::string_view terms, uint64_t seed = 0);
// Disarms all. Counts stay.
void DisarmFailpoints();

struct FailpointState {
  Failpoint point{};
  FailpointTerm term;  // as armed last
  bool armed = false;  // false also once its count is used up
  uint64_t hits = 0;   // times the place was passed while armed
  uint64_t fired = 0;  // times the fault happened
};
FailpointState StateOf(Failpoint point);
// Every one there is, in the order of the list above.
std::vector<FailpointState> ListFailpoints();

// What delay() does instead of sleeping, e.g. move a simulated clock; null: sleep again.
void SetFailpointSleep(std::function<void(absl::Duration)> sleep);

// For tests: armed while this lives.
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
// Counts a hit, sleeps where that is the action. Whether the fault happens.
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
