#include "src/device/sim/sim_stream.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

absl::Duration SimDeviceState::DrawTime(absl::Duration mean) {
  absl::Duration time = 2 * random.Uniform() * mean;
  if (Chance(options.stall_share)) {
    ++stalls;
    time += options.stall;
  }
  return time;
}

SimStream::~SimStream() {
  device_->clock->RunUntil([this] { return queue_.empty(); });
}

void SimStream::Copy(void* target, const void* source, size_t bytes) {
  if (device_->Chance(device_->options.lost_copies)) return;
  HostStream::Copy(target, source, bytes);
}

void SimStream::CopyBatch(const CopyOp* ops, size_t count) {
  Entry& entry = Push(Entry::Kind::kCopyBatch, device_->options.copy_time);
  entry.ops = ops;
  entry.remaining.resize(count);
  std::iota(entry.remaining.begin(), entry.remaining.end(), size_t{0});
  for (size_t i = count; i > 1; --i) {
    std::swap(entry.remaining[i - 1], entry.remaining[device_->random.Below(i)]);
  }
  StartIfIdle();
}

void SimStream::Record(Event& event) {
  auto& sim_event = static_cast<SimEvent&>(event);
  Entry& entry = Push(Entry::Kind::kRecord, absl::ZeroDuration());
  entry.event = &sim_event;
  entry.value = ++sim_event.recorded_;
  sim_event.early_ = device_->Chance(device_->options.early_events);
  StartIfIdle();
}

void SimStream::WaitFor(Event& event) {
  Push(Entry::Kind::kWait, absl::ZeroDuration()).event = &static_cast<SimEvent&>(event);
  StartIfIdle();
}

void SimStream::WaitFor(SimGate& gate) {
  Push(Entry::Kind::kGate, absl::ZeroDuration()).gate = &gate;
  StartIfIdle();
}

void SimStream::WaitFor(std::unique_ptr<SimGate> gate) {
  Entry& entry = Push(Entry::Kind::kGate, absl::ZeroDuration());
  entry.gate = gate.get();
  entry.own = std::move(gate);
  StartIfIdle();
}

Stream& SimStream::Branch(int number) {
  SLUICE_CHECK(number >= 0 && number < kBranches);
  std::unique_ptr<SimStream>& branch = trunk_->branches_[number];
  if (branch == nullptr) branch.reset(new SimStream(device_, team_, trunk_));
  return *branch;
}

void SimStream::After(Stream& other) {
  auto& first = static_cast<SimStream&>(other);
  SLUICE_CHECK(first.trunk_ == trunk_, "only branches of one stream come after one another");
  if (&first == this) return;
  Entry& entry = Push(Entry::Kind::kGate, absl::ZeroDuration());
  entry.own = std::make_unique<SimGate>(SimGate{.open = false, .waiters = {}});
  entry.gate = entry.own.get();
  first.Enqueue<SimGate*>([](SimGate* const& gate, CpuTeam*) { gate->Open(); }, entry.gate);
  StartIfIdle();
}

HostStream::Command& SimStream::NextSlot() {
  return Push(Entry::Kind::kCommand,
              team_ != nullptr ? device_->options.kernel_time : device_->options.copy_time)
      .command;
}

void SimStream::Publish() { StartIfIdle(); }

SimStream::Entry& SimStream::Push(Entry::Kind kind, absl::Duration mean) {
  Entry& entry = queue_.emplace_back();
  entry.kind = kind;
  entry.mean = mean;
  return entry;
}

void SimStream::StartIfIdle() {
  if (!busy_) Begin();
}

void SimStream::Begin() {
  busy_ = true;
  Entry& entry = queue_.front();
  switch (entry.kind) {
    case Entry::Kind::kCommand:
      Timed(
          entry.mean, [this] { queue_.front().command.run(queue_.front().command.payload, team_); },
          [this] { Done(); });
      return;
    case Entry::Kind::kCopyBatch:
      RunPiece();
      return;
    case Entry::Kind::kRecord:
      // The event goes through the clock although it takes no time: so nobody is called back inside
      // a Record.
      device_->clock->After(absl::ZeroDuration(), [this] {
        SimEvent& event = *queue_.front().event;
        event.done_ = queue_.front().value;
        event.reached_ = device_->clock->Now();
        event.early_ = false;
        for (auto& waiter : std::exchange(event.waiters_, {})) waiter();
        Done();
      });
      return;
    case Entry::Kind::kWait:
      if (entry.event->done_ == entry.event->recorded_) {
        device_->clock->After(absl::ZeroDuration(), [this] { Done(); });
      } else {
        entry.event->waiters_.push_back([this] { Done(); });
      }
      return;
    case Entry::Kind::kGate:
      if (entry.gate->open) {
        device_->clock->After(absl::ZeroDuration(), [this] { Done(); });
      } else {
        entry.gate->waiters.push_back([this] { Done(); });
      }
      return;
  }
}

void SimStream::Done() {
  queue_.pop_front();
  busy_ = false;
  if (!queue_.empty()) Begin();
}

void SimStream::RunPiece() {
  Entry& batch = queue_.front();
  if (batch.remaining.empty()) return Done();
  Timed(
      batch.mean,
      [this] {
        const CopyOp& op = queue_.front().ops[queue_.front().remaining.back()];
        if (!device_->Chance(device_->options.lost_copies)) {
          std::memcpy(op.target, op.source, op.bytes);
        }
      },
      [this] {
        queue_.front().remaining.pop_back();
        RunPiece();
      });
}

void SimStream::Timed(absl::Duration mean, std::function<void()> work, std::function<void()> next) {
  const absl::Duration time = device_->DrawTime(mean);
  const bool at_once = device_->random.Below(2) == 0;
  if (at_once) work();
  device_->clock->After(time, [at_once, work = std::move(work), next = std::move(next)] {
    if (!at_once) work();
    next();
  });
}

}  // namespace sluice
