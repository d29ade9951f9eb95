#include "src/device/cpu/cpu_stream.h"

#include <utility>

#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/spin_wait.h"

namespace sluice {

void CpuEvent::WaitFor(uint32_t wanted) const {
  // The distance is signed: the counters may wrap.
  for (uint32_t done = done_.load(std::memory_order_acquire);
       static_cast<int32_t>(done - wanted) < 0; done = done_.load(std::memory_order_acquire)) {
    WaitWhileEqual(done_, done);
  }
}

absl::Duration CpuEvent::Since(const TimedEvent& earlier) const {
  const auto& from = static_cast<const CpuEvent&>(earlier);
  SLUICE_CHECK(Ready() && from.Ready(), "both events must have been reached");
  return absl::FromChrono(reached_ - from.reached_);
}

CpuStream::CpuStream(CpuTeam* team, CpuTraceLog* log)
    : team_(team), log_(log), id_(log->NewStreamId()), thread_([this] { Loop(); }) {}

CpuStream::~CpuStream() {
  Command& slot = NextSlot();
  slot.run = nullptr;
  Publish();
  thread_.join();
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
  auto& cpu_event = static_cast<CpuEvent&>(event);
  struct Work {
    CpuEvent* event;
    uint32_t value;  // the last record so far; later ones are not waited for
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { w.event->WaitFor(w.value); },
                Work{&cpu_event, cpu_event.recorded_.load(std::memory_order_relaxed)});
}

HostStream::Command& CpuStream::NextSlot() {
  const uint32_t head = head_.load(std::memory_order_relaxed);
  for (uint32_t tail = tail_.load(std::memory_order_acquire); head - tail >= kCommands;
       tail = tail_.load(std::memory_order_acquire)) {
    WaitWhileEqual(tail_, tail);
  }
  return ring_[head % kCommands];
}

void CpuStream::Publish() { StoreAndNotify(head_, head_.load(std::memory_order_relaxed) + 1); }

void CpuStream::RunTraced(const Command& command) {
  TraceSlice slice;
  slice.kind = command.label.kind;
  slice.name = command.label.name;
  slice.stream = id_;
  slice.bytes = static_cast<int64_t>(command.label.bytes);
  slice.begin = absl::Now();
  command.run(command.payload, team_);
  slice.end = absl::Now();
  log_->Add(std::move(slice));
}

void CpuStream::Loop() {
  for (uint32_t tail = 0;;) {
    WaitWhileEqual(head_, tail);
    const Command& command = ring_[tail % kCommands];
    if (command.run == nullptr) return;
    if (log_->on() && command.label.name != nullptr) {
      RunTraced(command);
    } else {
      command.run(command.payload, team_);
    }
    StoreAndNotify(tail_, ++tail);
  }
}

}  // namespace sluice
