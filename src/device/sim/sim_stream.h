// Streams and events of the simulated device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "src/device/cpu/host_stream.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"

namespace sluice {

class SimEvent : public TimedEvent {
 public:
  explicit SimEvent(SimClock* clock) : clock_(clock) {}
  bool Ready() const override { return early_ || done_ == recorded_; }
  // Lets the world go on until it is ready.
  void Wait() const override {
    clock_->RunUntil([this] { return Ready(); });
  }
  absl::Duration Since(const TimedEvent& earlier) const override {
    return reached_ - static_cast<const SimEvent&>(earlier).reached_;
  }

 private:
  friend class SimStream;
  SimClock* const clock_;
  uint64_t recorded_ = 0;
  uint64_t done_ = 0;
  absl::Time reached_ = absl::UnixEpoch();
  bool early_ = false;                          // see SimDeviceOptions::early_events
  std::vector<std::function<void()>> waiters_;  // streams that stand still for it
};

// A place where a stream stands still until it is opened: what no event marks.
struct SimGate {
  bool open = true;
  std::vector<std::function<void()>> waiters;
  void Open() {
    open = true;
    for (auto& waiter : std::exchange(waiters, {})) waiter();
  }
};

// What the streams of one device share.
struct SimDeviceState {
  SimDeviceOptions options;
  SimClock* clock;
  SplitMix64 random;
  uint64_t stalls = 0;

  // How long a command of that mean takes this time.
  absl::Duration DrawTime(absl::Duration mean);
  bool Chance(double share) { return share > 0 && random.Uniform() < share; }
};

class SimStream : public HostStream {
 public:
  // `team` null: a copy stream.
  SimStream(SimDeviceState* device, CpuTeam* team) : SimStream(device, team, nullptr) {}
  ~SimStream() override;  // runs what is queued first

  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Record(Event& event) override;
  void WaitFor(Event& event) override;
  void WaitFor(SimGate& gate);
  // Streams of their own: what is not put in order happens in any.
  Stream& Branch(int number) override;
  void After(Stream& other) override;

 private:
  // `trunk` null: no branch.
  SimStream(SimDeviceState* device, CpuTeam* team, SimStream* trunk)
      : device_(device), team_(team), trunk_(trunk != nullptr ? trunk : this) {}

  // One command; its kind says which fields are meant.
  struct Entry {
    enum class Kind { kCommand, kCopyBatch, kRecord, kWait, kGate } kind = Kind::kCommand;
    Command command{};
    absl::Duration mean;
    SimEvent* event = nullptr;      // kRecord, kWait
    SimGate* gate = nullptr;        // kGate
    std::unique_ptr<SimGate> own;   // kGate: of After
    uint64_t value = 0;             // kRecord
    const CopyOp* ops = nullptr;    // kCopyBatch: valid until all is done, read piece by piece
    std::vector<size_t> remaining;  // kCopyBatch: pieces to come, from the back
  };
  Command& NextSlot() override;
  void Publish() override;
  Entry& Push(Entry::Kind kind, absl::Duration mean);
  void StartIfIdle();
  void Begin();  // the first entry
  void Done();   // with the first entry
  void RunPiece();
  // Runs `work` when the time `mean` begins or when it ends, then `next`.
  void Timed(absl::Duration mean, std::function<void()> work, std::function<void()> next);

  SimDeviceState* const device_;
  CpuTeam* const team_;
  SimStream* const trunk_;  // the stream that this is a branch of, or this
  std::deque<Entry> queue_;
  bool busy_ = false;  // with the first entry
  std::unique_ptr<SimStream> branches_[kBranches];
};

}  // namespace sluice
