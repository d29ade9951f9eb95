// A mailbox: how a step on a device hands work to CPU threads and waits for their answer without
// the host between them, also inside a recorded Program that runs again and again.
//
// A mailbox has *channels*, one for each request that may be under way (one per layer, say). The
// device raises a request on a channel once the request's input (queries, work lists) is in pinned
// memory. Every worker then does its share, writes its results to pinned memory and answers. The
// device waits for the last answer. That is a *round*.
//
// The word. A recorded program writes and awaits the same constants each time it runs, so a channel
// has one word in pinned memory that the two sides write in turns: the device raises it to 1 and
// waits for 0, and the worker with the last answer puts it to 0. The device raises it again only
// after it has seen that 0, and it cannot take the 0 of an earlier round for its answer, since its
// own 1 came before it began to wait. Workers open a round when they find the word raised and no
// round open. "Open" is put back after the word is, and looked at before it: a worker that read the
// word's 1 and was held up until the round was over finds the word again when it has claimed the
// round, and lets go (OpenIfRaised). Workers look again and again, so nothing is lost by letting
// go. The device never writes the state that workers share among themselves (who still owes an
// answer): an addition by one side of the link can undo one by the other.
//
// Failure. The answer comes whatever happens. A watchdog thread answers for a worker that has left,
// or that owes its answer past the deadline. Every sequence that this worker serves then has an
// error, which device and host can read; the others go on. A worker that comes back late finds its
// answer refused, and takes part again from the next round on.
//
// The request changes as soon as the round is over, and the results are read then. So a worker
// touches the two only while it holds the round (Hold to LetGo). That is all that the watchdog
// waits for: holding is for copies in and out, not for work.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/device/device.h"

namespace sluice {

// Why a sequence's results mean nothing. The first error that happens stays.
enum class MailboxError : uint32_t {
  kNone = 0,
  kFailed = 1,    // a worker reported a failure
  kLeft = 2,      // a worker that serves the sequence has left
  kDeadline = 3,  // a worker that serves the sequence did not answer in time
};

inline constexpr size_t kMailboxErrors = 4;

struct MailboxOptions {
  int channels = 1;
  int workers = 1;  // at most Mailbox::kMaxWorkers
  int slots = 1;    // slots of the running batch
  // Time from the moment that a request is seen. It should be long against any answer: a worker
  // that misses it ends its sequences.
  absl::Duration deadline = absl::Seconds(1);
};

// Device::NewMailbox makes one. REQUIRES, when it is destroyed: no stream has anything of it to do,
// and no worker uses it.
class Mailbox {
 public:
  static constexpr int kMaxWorkers = 64;  // bits of a set of workers
  virtual ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // The device's side. The calls are enqueued like operators, in turns for each channel. Nobody
  // sees the request before everything that the stream did earlier is visible. After Await the
  // stream sees everything that the workers wrote.
  virtual void Raise(Stream& stream, int channel) = 0;
  virtual void Await(Stream& stream, int channel) = 0;

  // Returns the channel's word, in memory that the device reads: 0 once the round is over. An
  // operator of the stream that raised the round may wait for that in place of Await.
  const uint32_t* open_word(int channel) const { return word(channel); }

  // Returns [slots] of MailboxError, in memory that the device reads. Once set, a slot's error
  // stays until Reset: a program that runs again does not wipe it out before the host has looked.
  const uint32_t* errors() const { return errors_; }

  // A worker's side. Each `worker` in [0, workers) is one thread at a time.
  //
  // Returns a channel on which this worker owes an answer, or -1. The worker takes that round up:
  // it must call Answer before the next Poll.
  int Poll(int worker);
  // Says that this worker's results for the sequence in `slot` mean nothing. To be called before
  // Answer.
  void Fail(int worker, int slot);
  // Says the same of every sequence that the worker serves.
  void FailAll(int worker);
  // Returns whether the round that the worker took up still waits for it. If true, the round is not
  // over before LetGo, past any deadline. Until LetGo the worker only copies, and calls nothing of
  // the mailbox.
  bool Hold(int worker);
  void LetGo(int worker);
  // Returns whether the round still waits for the worker now. The round may be over a moment later:
  // see Hold.
  bool Owes(int worker) const;
  // Says that this worker's results are written. Returns false if that was too late: the round went
  // on without them.
  bool Answer(int worker);
  // Takes the worker out for good; it answers nothing that it owes. Any thread may call it.
  // REQUIRES: the worker holds nothing.
  void Leave(int worker);

  // The host's side. Any thread may call these functions.
  //
  // Sets the workers that serve the sequence in `slot`, as bits; at first all do. The set bounds
  // what the loss of a worker costs.
  void SetServers(int slot, uint64_t workers);
  MailboxError error(int slot) const;
  // Clears the slot's error, for a new sequence.
  void Reset(int slot);

  // Returns how many times a worker failed, left or was late.
  int64_t failures(MailboxError error) const {
    return failures_[static_cast<size_t>(error)].load(std::memory_order_relaxed);
  }
  // Returns the workers that have left, as bits.
  uint64_t gone() const { return gone_.load(std::memory_order_acquire); }
  // Returns the workers that missed a deadline and have not polled since, as bits. Every sequence
  // that they serve has an error in each round until they do.
  uint64_t late() const { return late_.load(std::memory_order_acquire); }

  int channels() const { return options_.channels; }
  int workers() const { return options_.workers; }

  // INVALID_ARGUMENT names the option that is out of range.
  static absl::Status CheckOptions(const MailboxOptions& options);
  // Returns the bytes of pinned memory that a mailbox needs.
  static size_t PinnedBytes(const MailboxOptions& options);

 protected:
  // REQUIRES: `pinned` is zeroed and of PinnedBytes().
  Mailbox(Buffer pinned, const MailboxOptions& options);

  // The values of a channel's word.
  static constexpr uint32_t kAnswered = 0;
  static constexpr uint32_t kAsked = 1;
  uint32_t* word(int channel) const { return &words_[channel].value; }

 private:
  // A word holds the number of a round and this many workers.
  static constexpr int kPartWorkers = 32;
  static constexpr int kParts = kMaxWorkers / kPartWorkers;

  struct alignas(64) Word {
    uint32_t value;
  };
  // The state of a channel that workers share. A thread that claims a round does not disturb those
  // that wait for it.
  struct Channel {
    alignas(64) std::atomic<bool> open{false};
    // For each part of the workers: the round's number << 32 | those of the part that owe an
    // answer. The number is beside them so that nobody takes a worker out of a later round by
    // mistake.
    alignas(64) std::atomic<uint64_t> rounds[kParts]{};
    std::atomic<int> parts_left{0};     // parts in which somebody owes; written before `rounds`
    std::atomic<int64_t> opened_ns{0};  // steady clock; written before `rounds`
  };
  // The state of one worker, which only that worker writes.
  struct alignas(64) WorkerState {
    std::atomic<bool> holds{false};  // the watchdog reads it; only the worker reads the rest
    int channel = 0;                 // channel of the round taken up last
    uint32_t number = 0;             // number of that round
    uint32_t polls = 0;
  };

  uint64_t Everyone() const;
  bool LooksAtWords(int worker);
  void OpenIfRaised(int channel);
  void Close(int channel);
  void EndPart(int channel);
  void SetError(int slot, MailboxError error);
  void SetErrors(uint64_t workers, MailboxError error);
  void AwaitLetGo(uint64_t workers) const;
  void Count(MailboxError error, int times) {
    failures_[static_cast<size_t>(error)].fetch_add(times, std::memory_order_relaxed);
  }
  void Watch(int channel);
  void WatchPart(int channel, int part);
  void WatchdogLoop();

  const MailboxOptions options_;
  const Buffer pinned_;
  Word* const words_;       // [channels]
  uint32_t* const errors_;  // [slots]
  const std::unique_ptr<Channel[]> channels_;
  const std::unique_ptr<WorkerState[]> worker_states_;
  const std::unique_ptr<std::atomic<uint64_t>[]> servers_;  // [slots]
  std::atomic<uint64_t> gone_{0};                           // workers that have left, as bits
  std::atomic<int64_t> failures_[kMailboxErrors]{};         // indexed by MailboxError
  std::atomic<uint64_t> late_{0};  // workers that missed a deadline and have not polled since

  absl::Mutex mutex_;
  absl::CondVar changed_;  // not Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_ ABSL_GUARDED_BY(mutex_) = false;  // tells the watchdog to look at once
  std::thread watchdog_;
};

}  // namespace sluice
