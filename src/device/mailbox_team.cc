#include "src/device/mailbox_team.h"

#include <chrono>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "src/base/logging.h"
#include "src/device/cpu/spin_wait.h"
#include "src/device/cpu_topology.h"

namespace sluice {
namespace {

// The pauses of a thread that waits for a word that another device writes, where nobody can wake a
// sleeper. A thread spins as long as an answer may be wanted within microseconds, then lets others
// have its core between two looks, and naps when nothing has come for longer than a step takes.
class Idle {
 public:
  void Reset() { since_ = std::chrono::steady_clock::now(); }
  void Pause() {
    CpuRelax();
    const auto idle = std::chrono::steady_clock::now() - since_;
    if (idle > kPatience) {
      std::this_thread::sleep_for(kNap);
    } else if (idle > kSpin) {
      std::this_thread::yield();
    }
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{100};
  static constexpr std::chrono::microseconds kNap{50};
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace

MailboxTeam::MailboxTeam(Mailbox* mailbox, WorkerFn work, std::vector<int> cpus)
    : mailbox_(mailbox), work_(std::move(work)), cpus_(std::move(cpus)) {
  for (int i = 0; i < mailbox_->workers(); ++i) {
    threads_.emplace_back([this, i] { Loop(i); });
  }
}

MailboxTeam::~MailboxTeam() {
  stop_.store(true, std::memory_order_relaxed);
  for (std::thread& thread : threads_) thread.join();
}

void MailboxTeam::Loop(int worker) {
  // This runs however the thread ends.
  const absl::Cleanup leave = [this, worker] { mailbox_->Leave(worker); };
  if (!cpus_.empty()) {
    // A worker that is not pinned works as well, only less evenly.
    const absl::Status pinned = PinThisThread({cpus_[static_cast<size_t>(worker)]});
    if (!pinned.ok()) {
      Log(LogLevel::kWarn, "a mailbox worker is not pinned",
          {{"worker", worker}, {"error", pinned.ToString()}});
    }
  }
  Idle idle;
  absl::Status last;
  while (!stop_.load(std::memory_order_relaxed)) {
    const int channel = mailbox_->Poll(worker);
    if (channel < 0) {
      idle.Pause();
      continue;
    }
    absl::Status status;
    try {
      status = work_(worker, channel);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    } catch (...) {
      status = absl::InternalError("an exception of an unknown kind");
    }
    const bool dies = absl::IsAborted(status);
    if (!dies) {
      if (!status.ok()) mailbox_->FailAll(worker);
      mailbox_->Answer(worker);
    }
    // Only the first of consecutive failures is logged: a fault that stays comes with every layer
    // of every step.
    if (!status.ok() && last.ok()) {
      Log(LogLevel::kError, "a mailbox worker failed",
          {{"worker", worker}, {"channel", channel}, {"error", status.ToString()}});
    }
    if (dies) return;
    last = std::move(status);
    idle.Reset();
  }
}

}  // namespace sluice
