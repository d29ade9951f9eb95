// Streams and events of the CPU device.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "src/device/cpu/cpu_team.h"
#include "src/device/cpu/cpu_trace.h"
#include "src/device/cpu/host_stream.h"
#include "src/device/device.h"

namespace sluice {

// Every event is timed: reading the steady clock takes some 20 ns.
class CpuEvent : public TimedEvent {
 public:
  bool Ready() const override {
    return done_.load(std::memory_order_acquire) == recorded_.load(std::memory_order_relaxed);
  }
  void Wait() const override { WaitFor(recorded_.load(std::memory_order_relaxed)); }
  absl::Duration Since(const TimedEvent& earlier) const override;

 private:
  friend class CpuStream;
  // Waits until the record of that number is done.
  void WaitFor(uint32_t wanted) const;

  std::chrono::steady_clock::time_point reached_;  // written before done_, read after it
  std::atomic<uint32_t> recorded_{0};
  std::atomic<uint32_t> done_{0};
};

// A ring of small commands and a thread that runs them in order. Enqueueing allocates nothing.
class CpuStream : public HostStream {
 public:
  // A stream with a null `team` is a copy stream, which takes no operators. `log` outlives the
  // stream.
  CpuStream(CpuTeam* team, CpuTraceLog* log);
  ~CpuStream() override;  // runs first what is queued

  void Record(Event& event) override;
  void WaitFor(Event& event) override;

 private:
  static constexpr uint32_t kCommands = 2048;  // commands; a step of a 64-layer model has about 700
  Command& NextSlot() override;
  void Publish() override;
  void Loop();

  void RunTraced(const Command& command);

  CpuTeam* const team_;
  CpuTraceLog* const log_;
  const uint32_t id_;
  const std::unique_ptr<Command[]> ring_ = std::make_unique<Command[]>(kCommands);
  alignas(64) std::atomic<uint32_t> head_{0};  // commands queued so far; written by the producer
  alignas(64) std::atomic<uint32_t> tail_{0};  // commands run so far; written by the thread
  std::thread thread_;
};

}  // namespace sluice
