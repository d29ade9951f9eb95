// CPU workers that serve the sequences of the running batch beside the device: their groups, their
// health and their statistics. The owner (CoAttention, or a RowMover that gathers on the CPU) says
// what a worker's share of a round is. Rounds and channels are the mailbox's
// (src/device/mailbox.h).
//
// Workers form groups. A sequence (a slot) belongs to one group. A worker that fails, dies or
// misses the deadline ends the sequences of its group (Health); the step goes on. A worker that
// missed the deadline may still read the host cache of the sequence that it is working on: until it
// has come back the slot is not at rest (AtRest), and nothing of the slot may be given to another
// sequence.
//
// There may be a *common* worker, which belongs to no group and serves every slot beside the slot's
// group, with work of another kind. Its faults end the sequences that it serves. Once it is retired
// or has left, and while it is late, sequences that join are served by their group alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/attention/policy_statistics.h"
#include "src/device/device.h"
#include "src/device/worker_team.h"

namespace sluice {

class SlotWorkers {
 public:
  struct Options {
    Device* device = nullptr;
    int channels = 1;
    int workers = 1;
    int slots = 0;
    int groups = 1;                  // from 1 to `workers`
    bool has_common_worker = false;  // it is worker number `workers`
    absl::Duration deadline = absl::Seconds(1);
    WorkerDuty duty = WorkerDuty::kAttend;
  };
  // Does a worker's share of a round, with the functions of a worker's side below. Returns whether
  // there was a sequence to serve; if so, the time counts as busy. An error counts as a failure of
  // the worker, and ABORTED as its death.
  using Share = std::function<absl::StatusOr<bool>(int worker, int channel)>;

  // Returns the errors of Device::NewWorkerTeam. Workers call `share` for rounds that were raised,
  // and no longer when the result has been destroyed.
  static absl::StatusOr<std::unique_ptr<SlotWorkers>> Create(const Options& options, Share share);
  SlotWorkers(const SlotWorkers&) = delete;
  SlotWorkers& operator=(const SlotWorkers&) = delete;

  // The device's side, as in Mailbox.
  void Raise(Stream& stream, int channel) { team_->Raise(stream, channel); }
  void Await(Stream& stream, int channel) { team_->Await(stream, channel); }
  const uint32_t* OpenWord(int channel) const { return team_->open_word(channel); }

  // The engine's side.
  //
  // Takes note that a new sequence moves into the slot.
  void Join(int slot);
  // Returns INTERNAL with reason WORKER_FAILED if workers failed the slot's sequence since Join.
  absl::Status Health(int slot) const;
  // Returns whether Health is an error. Any thread, workers among them.
  bool Failed(int slot) const { return team_->error(slot) != MailboxError::kNone; }
  // Returns whether no worker reads the host cache of the slot's sequence for a step that is done.
  // REQUIRES, for an answer that stays true: every step that has the slot is done.
  bool AtRest(int slot) const;
  // Returns an event to wait for AtRest. It belongs to the host: no stream records it.
  Event& RestEvent(int slot) { return rests_[static_cast<size_t>(slot)]; }
  // Returns the statistics of the groups' workers; faults count the common worker's too. Any
  // thread.
  WorkerStatistics Statistics() const;

  // A worker's side, from within its share.
  //
  // A worker's hold on the round, as long as the round waits for the worker (Mailbox::Hold).
  class Held {
   public:
    Held(SlotWorkers& workers, int worker);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    explicit operator bool() const { return held_; }

   private:
    WorkerTeam& team_;
    const int worker_;
    const bool held_;
  };
  bool Owes(int worker) const { return team_->Owes(worker); }
  // Returns the workers of a group that serve the slot, as bits.
  uint64_t Servers(int slot) const { return AllServers(slot) & ~CommonBit(); }
  // Returns whether the common worker serves the slot.
  bool CommonServes(int slot) const { return (AllServers(slot) & CommonBit()) != 0; }
  // Says that the common worker serves no sequence that joins from now on. Any thread.
  void RetireCommon() { common_retired_.store(true, std::memory_order_relaxed); }
  // Says that the worker reads the host cache of `slot` from now on without holding the round; -1:
  // of none. REQUIRES: it holds the round, unless slot is -1.
  void SetReading(int worker, int slot);
  // Says how many tokens the worker has served since it began.
  void SetTokens(int worker, int64_t tokens);
  // Says how long the worker has waited for others in the share that it does now. The time does not
  // count as busy.
  void SetWaited(int worker, absl::Duration waited);
  // Returns the fault that an armed failpoint asks for.
  static absl::Status InjectedFault();

 private:
  // The state of a worker that other threads read. Only the worker writes it.
  struct alignas(64) WorkerState {
    std::atomic<int64_t> busy_ns{0};
    std::atomic<int64_t> tokens{0};
    std::atomic<int32_t> slot{-1};  // slot whose host cache it reads
    absl::Duration waited;          // in the share under way; no other thread reads it
  };
  // The event that a slot is at rest. Nothing signals it, because it is awaited only after a
  // worker's fault.
  class SlotRest : public Event {
   public:
    SlotRest(const SlotWorkers* owner, int slot) : owner_(owner), slot_(slot) {}
    bool Ready() const override { return owner_->AtRest(slot_); }
    void Wait() const override;

   private:
    const SlotWorkers* const owner_;
    const int slot_;
  };

  SlotWorkers(const Options& options, Share share);
  absl::Status Begin();
  int AllWorkers() const { return options_.workers + (options_.has_common_worker ? 1 : 0); }
  uint64_t CommonBit() const {
    return options_.has_common_worker ? uint64_t{1} << options_.workers : 0;
  }
  uint64_t AllServers(int slot) const {
    return servers_[static_cast<size_t>(slot)].load(std::memory_order_relaxed);
  }
  uint64_t WorkersLeftFor(int slot) const;
  absl::Status Work(int worker, int channel);

  const Options options_;
  const Share share_;
  std::unique_ptr<WorkerState[]> states_;             // by worker
  std::deque<SlotRest> rests_;                        // by slot
  std::unique_ptr<std::atomic<uint64_t>[]> servers_;  // [slots] workers, as bits
  std::atomic<bool> common_retired_{false};
  std::unique_ptr<WorkerTeam> team_;  // last: its threads use all members above
};

}  // namespace sluice
