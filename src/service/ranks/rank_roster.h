// RankRoster is what a rank knows of the others that it is joined with by streams, and what it has
// yet to tell them: plans, meetings, failures, beats. Rank 0 has a stream with every other rank,
// and passes on what concerns all; the others have one, with rank 0. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "sluice/v1/ranks.pb.h"
#include "src/device/rank_group.h"

namespace sluice {

class RankRoster {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::string name;  // the leader's address, for messages
    std::string host;  // names this host and its /dev/shm
    std::string version;
    absl::Duration deadline;     // for room to send, and for orders to be carried out
    absl::Duration still_limit;  // a rank that is not heard for so long is lost
  };
  explicit RankRoster(Options options);
  ~RankRoster();
  RankRoster(const RankRoster&) = delete;
  RankRoster& operator=(const RankRoster&) = delete;

  // A side that has nothing to say sends an empty message this often.
  static constexpr absl::Duration kBeat = absl::Milliseconds(100);

  // ---- Joining ----

  v1::RankHello Hello() const;
  // Takes another rank in. The errors are those of RankService.Join. REQUIRES: rank 0.
  absl::Status Admit(const v1::RankHello& hello);
  // Waits until all are in, and tells them. UNAVAILABLE names those that did not come in time.
  // REQUIRES: rank 0.
  absl::Status AwaitAll(absl::Duration timeout);
  // All are in, as rank 0 says. REQUIRES: not rank 0.
  void Welcomed(const v1::RankWelcome& welcome);

  // ---- A stream, by the rank at its other end ----

  // Takes a message.
  void Take(int other, const v1::RankMessage& message);
  // Waits for something to say, a beat at most, and returns whether there is a message to send:
  // after the last one there is none. One thread for each `other`.
  bool Next(int other, v1::RankMessage* message);
  // The stream has ended, for a reason that its status may give.
  void Ended(int other, const absl::Status& status);
  // Nobody uses that stream any more: before all were in, the rank may come by another.
  void Forget(int other);

  // ---- RankChannel and RankMembers, which say what these do ----

  void EndWith(const RankGroup* group);
  absl::Status Send(absl::Span<const uint8_t> plan);
  absl::Status Receive(std::string* plan);
  uint32_t sent() const;
  void Done();
  absl::Status AwaitDone(uint32_t plans);
  void Show(uint32_t number);
  uint32_t Shown(int rank) const;
  absl::Status Meet(absl::Duration timeout);
  void Report(absl::Span<const uint8_t> bytes);
  std::optional<std::vector<uint8_t>> ReportOf(int rank) const;
  absl::Status Share(absl::Span<uint8_t> bytes, absl::Duration timeout);
  void Part(absl::Duration timeout);
  bool OneHost() const;
  int Alive() const;
  absl::Status Fail(const absl::Status& why);
  absl::Status failure() const;
  // Fails because a stream of another kind with a rank has broken. A rank that fails says why on
  // its own stream, which may come a moment later: so this waits for that first.
  absl::Status FailAfterLastWords(const absl::Status& why);

  // Calls `end` soon after the node has failed, on a thread of the roster's. Null: nobody is
  // called any more, nor is a call under way.
  void OnFailure(std::function<void()> end);
  // Bytes of caches have been written that the thread of Receive() may read. Returns whether the
  // node has not failed.
  bool Landed();
  // Leaves in good order: tells the others, and waits for the streams to end, or for `timeout`;
  // after a failure only for a moment in which the others can hear of it.
  void Leave(absl::Duration timeout);

 private:
  struct Peer {  // the other end of a stream
    bool here = false;
    bool ended = false;
    bool told_last = false;
    std::string host;
    absl::Time heard;
    v1::RankMessage next;
    bool dirty = false;  // `next` is not to wait for the beat
  };
  bool leads() const { return options_.rank == 0; }
  v1::RankState& own() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return states_[static_cast<size_t>(options_.rank)];
  }
  Peer& PeerOf(int other) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return peers_[static_cast<size_t>(other)];
  }
  bool IsGone(int rank) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Tells the other ends this rank's state; rank 0 tells all states.
  void TellStates() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until `there` holds, which it is up to `rank` to bring about. Returns the failure of the
  // node or the group, which begins here if the rank has ended or the time has passed.
  absl::Status Await(int rank, const std::function<bool()>& there, absl::Duration timeout,
                     const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Looks for ends that no stream shows: of processes that stand still, and of hosts.
  void Watch();
  void LookForStill(absl::Time now, bool awake) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::atomic<bool> failed_ = false;
  std::atomic<const RankGroup*> group_ = nullptr;
  mutable absl::Mutex mutex_;
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);  // by rank; rank 0's, or only of rank 0
  std::vector<v1::RankState> states_ ABSL_GUARDED_BY(mutex_);  // by rank
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> on_failure_ ABSL_GUARDED_BY(mutex_);
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  bool one_host_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::string> plans_ ABSL_GUARDED_BY(mutex_);  // that are to be received
  uint32_t messages_ ABSL_GUARDED_BY(mutex_) = 0;          // sent or received so far; wraps
  uint64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t told_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // taken_bytes as rank 0 was told at once
  std::string shared_ ABSL_GUARDED_BY(mutex_);
  // By rank: what it has left for rank 0. On another rank its own alone, until it is told.
  std::vector<std::string> reports_ ABSL_GUARDED_BY(mutex_);
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watch_;
};

}  // namespace sluice
