// A mailbox: how a step on a device hands work to CPU threads and waits for their answer without
// the host between them, also inside a recorded Program that runs again and again.
//
// A mailbox has *channels*, one for each request that may be under way (one per layer, say). On a
// channel the device raises a request when what it asks for (queries, work lists) is in pinned
// memory; every worker does its share, writes its results to pinned memory and answers; the last
// answer is what the device waits for. That is a *round*.
//
// The word. A recorded program writes and awaits the same constants each time it runs, so a channel
// has one word in pinned memory that the two sides write in turns: the device raises it to 1 and
// waits for 0, and whoever gives the last answer puts it to 0. The device raises it again only
// after it has seen that 0, and it cannot take the 0 of an earlier round for its answer, since its
// own 1 came before it began to wait. Workers open a round when they find the word raised and no
// round open; "open" is put back after the word is, and looked at before it: a worker that read the
// word's 1 and was held up until the round was over finds the word again when it has claimed the
// round, and lets go (OpenIfRaised). They look again and again, so nothing is lost by letting go.
// What workers share among themselves (who still owes an answer) is never written by the device: an
// addition by one side of the link can undo one by the other.
//
// Failure. The answer comes whatever happens: for a worker that has left, or owes its answer past
// the deadline, a watchdog thread gives it, and every sequence that this worker serves has an error
// from then on, which device and host can read; the others go on. A worker that comes back late
// finds its answer refused, and takes part again from the next round on.
//
// What was asked changes as soon as the round is over, and the place of the results is read then.
// So a worker touches the two only while it holds the round (Hold to LetGo), and that, alone of all
// that it does, the watchdog waits for: holding is for copies in and out, not for work.
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

// Why a sequence's results mean nothing. The first that happens stays.
enum class MailboxError : uint32_t {
  kNone = 0,
  kFailed = 1,    // a worker said so
  kLeft = 2,      // a worker that serves it is no more
  kDeadline = 3,  // a worker that serves it did not answer in time
};

inline constexpr size_t kMailboxErrors = 4;

struct MailboxOptions {
  int channels = 1;
  int workers = 1;  // at most Mailbox::kMaxWorkers
  int slots = 1;    // sequences of a batch
  // From the moment that a request is seen. Long against any answer: what misses it ends sequences.
  absl::Duration deadline = absl::Seconds(1);
};

// Device::NewMailbox makes one. REQUIRES, when it is destroyed: no stream has anything of it to do,
// no worker uses it.
class Mailbox {
 public:
  static constexpr int kMaxWorkers = 32;
  virtual ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // The device's side: enqueued like operators, in turns for each channel. Nobody sees the request
  // before what the stream did earlier is visible; what the stream does after Await sees what the
  // workers wrote.
  virtual void Raise(Stream& stream, int channel) = 0;
  virtual void Await(Stream& stream, int channel) = 0;

  // [slots] of MailboxError, in memory that the device reads. Once set, a slot's error stays until
  // Reset: a program that runs again does not wipe it out before the host has looked.
  const uint32_t* errors() const { return errors_; }

  // A worker's side. Each `worker` in [0, workers) is one thread at a time.
  //
  // A channel on which this worker owes an answer, or -1. It takes up what it was given: Answer
  // comes before the next Poll.
  int Poll(int worker);
  // This worker's results for the sequence in `slot` mean nothing. Before Answer.
  void Fail(int worker, int slot);
  // The same for every sequence that it serves.
  void FailAll(int worker);
  // False: the round that it took up does not wait for it any more. True: it does, and is not over
  // before LetGo, past any deadline; in between the worker only copies, and calls nothing here.
  bool Hold(int worker);
  void LetGo(int worker);
  // Whether the round still waits for it now. It may be over a moment later: see Hold.
  bool Owes(int worker) const;
  // This worker's results are written. False: too late, the round went on without them.
  bool Answer(int worker);
  // The worker takes part no more, and answers nothing that it owes. Any thread. REQUIRES: it holds
  // nothing.
  void Leave(int worker);

  // The host's side, any thread.
  //
  // Which workers serve the sequence in `slot`, as bits; at first all. It bounds what the loss of a
  // worker costs.
  void SetServers(int slot, uint32_t workers);
  MailboxError error(int slot) const;
  // A new sequence moves in.
  void Reset(int slot);

  // Times that a worker failed, left or was late.
  int64_t failures(MailboxError error) const {
    return failures_[static_cast<size_t>(error)].load(std::memory_order_relaxed);
  }
  // Workers that have left, as bits.
  uint32_t gone() const { return gone_.load(std::memory_order_acquire); }

  int channels() const { return options_.channels; }
  int workers() const { return options_.workers; }

  // INVALID_ARGUMENT names what is out of range.
  static absl::Status CheckOptions(const MailboxOptions& options);
  // Bytes of pinned memory that a mailbox needs.
  static size_t PinnedBytes(const MailboxOptions& options);

 protected:
  // `pinned` is zeroed and of PinnedBytes().
  Mailbox(Buffer pinned, const MailboxOptions& options);

  // What a channel's word says.
  static constexpr uint32_t kAnswered = 0;
  static constexpr uint32_t kAsked = 1;
  uint32_t* word(int channel) const { return &words_[channel].value; }

 private:
  struct alignas(64) Word {
    uint32_t value;
  };
  // What workers know of a channel. Who claims a round does not disturb those who wait for it.
  struct Channel {
    alignas(64) std::atomic<bool> open{false};
    alignas(64) std::atomic<uint64_t> round{0};  // its number << 32 | workers that owe an answer
    std::atomic<int64_t> opened_ns{0};           // steady clock; written before `round`
  };
  // Of one worker; it alone writes it.
  struct alignas(64) WorkerState {
    std::atomic<bool> holds{false};  // the watchdog reads it, nobody the rest
    int channel = 0;                 // taken up last
    uint32_t number = 0;             // of the round
    uint32_t polls = 0;
  };

  uint32_t Everyone() const;
  bool LooksAtWords(int worker);
  void OpenIfRaised(int channel);
  void Close(int channel);
  void SetError(int slot, MailboxError error);
  void SetErrors(uint32_t workers, MailboxError error);
  void AwaitLetGo(uint32_t workers) const;
  void Count(MailboxError error, int times) {
    failures_[static_cast<size_t>(error)].fetch_add(times, std::memory_order_relaxed);
  }
  void Watch(int channel);
  void WatchdogLoop();

  const MailboxOptions options_;
  const Buffer pinned_;
  Word* const words_;       // [channels]
  uint32_t* const errors_;  // [slots]
  const std::unique_ptr<Channel[]> channels_;
  const std::unique_ptr<WorkerState[]> worker_states_;
  const std::unique_ptr<std::atomic<uint32_t>[]> servers_;  // [slots]
  std::atomic<uint32_t> gone_{0};                           // workers that have left
  std::atomic<int64_t> failures_[kMailboxErrors]{};         // by MailboxError
  std::atomic<uint32_t> late_{0};  // workers that missed a deadline and have not polled since

  absl::Mutex mutex_;
  absl::CondVar changed_;  // not Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_ ABSL_GUARDED_BY(mutex_) = false;  // the watchdog shall look at once
  std::thread watchdog_;
};

}  // namespace sluice
