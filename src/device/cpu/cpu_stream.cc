#include "src/device/cpu/cpu_stream.h"

#include "src/base/failpoint.h"
#include "src/device/cpu/spin_wait.h"

namespace sluice {

void CpuEvent::Wait() const {
  const uint32_t wanted = recorded_.load(std::memory_order_relaxed);
  // Signed distance: the counters may wrap.
  for (uint32_t done = done_.load(std::memory_order_acquire);
       static_cast<int32_t>(done - wanted) < 0; done = done_.load(std::memory_order_acquire)) {
    WaitWhileEqual(done_, done);
  }
}

absl::Duration CpuEvent::Since(const TimedEvent& earlier) const {
  const auto& from = static_cast<const CpuEvent&>(earlier);
  SLUICE_CHECK(Ready() && from.Ready(), "only what has been reached is timed");
  return absl::FromChrono(reached_ - from.reached_);
}

CpuStream::CpuStream(CpuTeam* team) : team_(team), thread_([this] { Loop(); }) {}

CpuStream::~CpuStream() {
  Command& slot = NextSlot();
  slot.run = nullptr;
  Publish();
  thread_.join();
}

void CpuStream::Copy(void* target, const void* source, size_t bytes) {
  struct Work {
    void* target;
    const void* source;
    size_t bytes;
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { std::memcpy(w.target, w.source, w.bytes); },
                Work{target, source, bytes});
}

void CpuStream::CopyBatch(const CopyOp* ops, size_t count) {
  struct Work {
    const CopyOp* ops;
    size_t count;
  };
  Enqueue<Work>(
      [](const Work& w, CpuTeam*) {
        SLUICE_FAILPOINT_PAUSE(kKvCopy);
        for (size_t i = 0; i < w.count; ++i) {
          std::memcpy(w.ops[i].target, w.ops[i].source, w.ops[i].bytes);
        }
      },
      Work{ops, count});
}

void CpuStream::Fill(void* target, uint8_t value, size_t bytes) {
  struct Work {
    void* target;
    size_t bytes;
    uint8_t value;
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { std::memset(w.target, w.value, w.bytes); },
                Work{target, bytes, value});
}

void CpuStream::Record(Event& event) {
  auto& cpu_event = static_cast<CpuEvent&>(event);
  struct Work {
    CpuEvent* event;
    uint32_t value;
  };
  const uint32_t value = cpu_event.recorded_.fetch_add(1, std::memory_order_relaxed) + 1;
  Enqueue<Work>(
      [](const Work& w, CpuTeam*) {
        w.event->reached_ = std::chrono::steady_clock::now();
        StoreAndNotify(w.event->done_, w.value);
      },
      Work{&cpu_event, value});
}

void CpuStream::WaitFor(Event& event) {
  struct Work {
    CpuEvent* event;
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { w.event->Wait(); },
                Work{&static_cast<CpuEvent&>(event)});
}

CpuStream::Command& CpuStream::NextSlot() {
  const uint32_t head = head_.load(std::memory_order_relaxed);
  for (uint32_t tail = tail_.load(std::memory_order_acquire); head - tail >= kCommands;
       tail = tail_.load(std::memory_order_acquire)) {
    WaitWhileEqual(tail_, tail);
  }
  return ring_[head % kCommands];
}

void CpuStream::Publish() { StoreAndNotify(head_, head_.load(std::memory_order_relaxed) + 1); }

void CpuStream::Loop() {
  for (uint32_t tail = 0;;) {
    WaitWhileEqual(head_, tail);
    const Command& command = ring_[tail % kCommands];
    if (command.run == nullptr) return;
    command.run(command.payload, team_);
    StoreAndNotify(tail_, ++tail);
  }
}

}  // namespace sluice
