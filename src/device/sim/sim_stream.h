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
#include "src/device/device_health.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"

namespace sluice {

class SimEvent : public TimedEvent {
 public:
  explicit SimEvent(SimClock* clock) : clock_(clock) {}
  bool Ready() const override { return early_ || done_ == recorded_; }
  // Runs the clock until the event is ready.
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
  std::vector<std::function<void()>> waiters_;  // resume streams that wait for it
};

// A gate, at which a stream waits until it is opened; it orders streams where there is no event.
struct SimGate {
  bool open = true;
  std::vector<std::function<void()>> waiters;
  void Open() {
    open = true;
    for (auto& waiter : std::exchange(waiters, {})) waiter();
  }
};

// The state that the streams of one device share.
struct SimDeviceState {
  SimDeviceOptions options;
  SimClock* clock;
  SplitMix64 random;
  uint64_t stalls = 0;
  DeviceHealth health{};

  // Returns how long a command of mean time `mean` takes this time.
  absl::Duration DrawTime(absl::Duration mean);
  bool Chance(double share) { return share > 0 && random.Uniform() < share; }
};

class SimStream : public HostStream {
 public:
  // A stream with a null `team` is a copy stream.
  SimStream(SimDeviceState* device, CpuTeam* team) : SimStream(device, team, nullptr) {}
  ~SimStream() override;  // runs first what is queued

  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Record(Event& event) override;
  void WaitFor(Event& event) override;
  void WaitFor(SimGate& gate);
  // The gate is kept until the stream has passed it.
  void WaitFor(std::unique_ptr<SimGate> gate);
  // Branches are streams of their own: commands that are not put in order happen in any order.
  Stream& Branch(int number) override;
  void After(Stream& other) override;

 private:
  // A stream with a null `trunk` is no branch.
  SimStream(SimDeviceState* device, CpuTeam* team, SimStream* trunk)
      : device_(device), team_(team), trunk_(trunk != nullptr ? trunk : this) {}

  // One command; its kind says which fields are used.
  struct Entry {
    enum class Kind { kCommand, kCopyBatch, kRecord, kWait, kGate } kind = Kind::kCommand;
    Command command{};
    absl::Duration mean;
    SimEvent* event = nullptr;      // kRecord, kWait
    SimGate* gate = nullptr;        // kGate
    std::unique_ptr<SimGate> own;   // kGate: the gate of an After
    uint64_t value = 0;             // kRecord
    const CopyOp* ops = nullptr;    // kCopyBatch: valid until all is done, read piece by piece
    std::vector<size_t> remaining;  // kCopyBatch: pieces to come, from the back
  };
  Command& NextSlot() override;
  void Publish() override;
  Entry& Push(Entry::Kind kind, absl::Duration mean);
  void StartIfIdle();
  void Begin();  // begins the first entry
  void Done();   // ends the first entry
  void RunPiece();
  // Runs `work` at the beginning or at the end of a time of mean `mean`, then `next`.
  void Timed(absl::Duration mean, std::function<void()> work, std::function<void()> next);

  SimDeviceState* const device_;
  CpuTeam* const team_;
  SimStream* const trunk_;  // the stream that this is a branch of, or this
  std::deque<Entry> queue_;
  bool busy_ = false;  // whether the first entry is running
  std::unique_ptr<SimStream> branches_[kBranches];
};

}  // namespace sluice
