// Streams and events of the CPU device.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>

#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/device.h"

namespace sluice {

// Every event is timed: reading the steady clock takes some 20 ns.
class CpuEvent : public TimedEvent {
 public:
  bool Ready() const override {
    return done_.load(std::memory_order_acquire) == recorded_.load(std::memory_order_relaxed);
  }
  void Wait() const override;
  absl::Duration Since(const TimedEvent& earlier) const override;

 private:
  friend class CpuStream;
  std::chrono::steady_clock::time_point reached_;  // written before done_, read after it
  std::atomic<uint32_t> recorded_{0};
  std::atomic<uint32_t> done_{0};
};

// A ring of small commands and a thread that runs them in order. Enqueueing allocates nothing.
class CpuStream : public Stream {
 public:
  // `team` null: a copy stream, which takes no operators.
  explicit CpuStream(CpuTeam* team);
  ~CpuStream() override;  // runs what is queued first

  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Fill(void* target, uint8_t value, size_t bytes) override;
  void Record(Event& event) override;
  void WaitFor(Event& event) override;

  // Queues run(work, team). Work is copied bytewise.
  template <typename Work>
  void Enqueue(void (*run)(const Work& work, CpuTeam* team), const Work& work) {
    static_assert(std::is_trivially_copyable_v<Work> &&
                  sizeof(Work) + sizeof(run) <= kPayloadBytes);
    struct Packed {
      void (*run)(const Work&, CpuTeam*);
      Work work;
    };
    Command& slot = NextSlot();
    new (slot.payload) Packed{run, work};
    slot.run = [](const std::byte* payload, CpuTeam* team) {
      const auto* packed = std::launder(reinterpret_cast<const Packed*>(payload));
      packed->run(packed->work, team);
    };
    Publish();
  }

 private:
  static constexpr size_t kPayloadBytes = 240;
  static constexpr uint32_t kCommands = 2048;  // a step of a 64-layer model is about 700
  struct Command {
    void (*run)(const std::byte* payload, CpuTeam* team);
    alignas(16) std::byte payload[kPayloadBytes];
  };
  Command& NextSlot();
  void Publish();
  void Loop();

  CpuTeam* const team_;
  const std::unique_ptr<Command[]> ring_ = std::make_unique<Command[]>(kCommands);
  alignas(64) std::atomic<uint32_t> head_{0};  // commands queued so far; written by the producer
  alignas(64) std::atomic<uint32_t> tail_{0};  // commands run so far; written by the thread
  std::thread thread_;
};

}  // namespace sluice
