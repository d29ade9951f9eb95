#include "src/device/sim/sim_worker_team.h"

#include <exception>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

uint64_t BitOf(int worker) { return uint64_t{1} << worker; }

class SimWorkerTeam : public WorkerTeam {
 public:
  SimWorkerTeam(SimDeviceState* device, const MailboxOptions& options, Buffer errors, WorkerFn work)
      : device_(device),
        options_(options),
        errors_memory_(std::move(errors)),
        errors_(errors_memory_.as<uint32_t>()),
        work_(std::move(work)),
        channels_(static_cast<size_t>(options.channels)),
        workers_(static_cast<size_t>(options.workers)),
        servers_(static_cast<size_t>(options.slots), ~uint64_t{0}) {}
  // A late worker's share may still be to come.
  ~SimWorkerTeam() override {
    device_->clock->RunUntil([this] { return under_way_ == 0; });
  }

  void Raise(Stream& stream, int channel) override {
    struct Round {
      SimWorkerTeam* team;
      int channel;
    };
    static_cast<SimStream&>(stream).Enqueue<Round>(
        [](const Round& round, CpuTeam*) { round.team->Open(round.channel); },
        Round{this, channel});
  }
  void Await(Stream& stream, int channel) override {
    static_cast<SimStream&>(stream).WaitFor(channels_[static_cast<size_t>(channel)].gate);
  }
  const uint32_t* open_word(int /*channel*/) const override { return nullptr; }
  const uint32_t* errors() const override { return errors_; }
  // A share happens at one moment of time: nothing comes in between.
  bool Hold(int worker) override { return Owes(worker); }
  void LetGo(int /*worker*/) override {}
  bool Owes(int worker) const override { return workers_[static_cast<size_t>(worker)].owes; }
  void SetServers(int slot, uint64_t workers) override {
    servers_[static_cast<size_t>(slot)] = workers;
  }
  MailboxError error(int slot) const override { return static_cast<MailboxError>(errors_[slot]); }
  void Reset(int slot) override { errors_[slot] = 0; }
  int64_t failures(MailboxError error) const override {
    return failures_[static_cast<size_t>(error)];
  }
  uint64_t gone() const override { return gone_; }

 private:
  struct Channel {
    SimGate gate;
    int owed = 0;  // answers that the round waits for
  };
  struct WorkerState {
    int late = 0;       // shares that the worker does past their deadline
    bool owes = false;  // set during a share whose round waits for it
  };

  // The order is the same for every worker of a round, so that the draws depend on the seed alone.
  void Open(int channel) {
    Channel& c = channels_[static_cast<size_t>(channel)];
    SLUICE_CHECK(c.gate.open, "a round is raised before the last one's answer");
    c.gate.open = false;
    c.owed = options_.workers;
    for (int w = 0; w < options_.workers; ++w) {
      const uint64_t bit = BitOf(w);
      if (device_->Chance(device_->options.leaving_workers)) Leave(bit);
      if ((gone_ & bit) != 0) {
        After(DrawTime(), [this, channel, bit] { Fail(channel, bit, MailboxError::kLeft); });
      } else if (workers_[static_cast<size_t>(w)].late > 0) {
        // The worker has not come back: this round does not count on it.
        After(absl::ZeroDuration(),
              [this, channel, bit] { Fail(channel, bit, MailboxError::kDeadline); });
      } else if (device_->Chance(device_->options.late_workers)) {
        BeLate(channel, w);
      } else {
        After(DrawTime(), [this, channel, w] {
          DoShare(channel, w, true);
          Answer(channel);
        });
      }
    }
  }

  // The share is done before the deadline, and the answer is not; or the share is done after it,
  // upon whatever the device has written meanwhile.
  void BeLate(int channel, int worker) {
    ++workers_[static_cast<size_t>(worker)].late;
    ++failures_[static_cast<size_t>(MailboxError::kDeadline)];
    After(options_.deadline,
          [this, channel, worker] { Fail(channel, BitOf(worker), MailboxError::kDeadline); });
    const bool done_before = device_->Chance(0.5);
    if (done_before) {
      After(DrawTime(), [this, channel, worker] { DoShare(channel, worker, true); });
    }
    After(options_.deadline + device_->DrawTime(options_.deadline),
          [this, channel, worker, done_before] {
            if (!done_before && (gone_ & BitOf(worker)) == 0) DoShare(channel, worker, false);
            --workers_[static_cast<size_t>(worker)].late;
          });
  }

  absl::Duration DrawTime() { return device_->DrawTime(device_->options.kernel_time); }
  void After(absl::Duration delay, std::function<void()> what) {
    ++under_way_;
    device_->clock->After(delay, [this, what = std::move(what)] {
      what();
      --under_way_;
    });
  }

  void DoShare(int channel, int worker, bool owes) {
    WorkerState& state = workers_[static_cast<size_t>(worker)];
    state.owes = owes;
    absl::Status status;
    try {
      status = work_(worker, channel);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    if (device_->Chance(device_->options.worker_failures))
      status = absl::InternalError("simulated");
    state.owes = false;
    const uint64_t bit = BitOf(worker);
    if (absl::IsAborted(status)) {
      Leave(bit);
      SetErrors(bit, MailboxError::kLeft);
    } else if (!status.ok() && owes) {
      ++failures_[static_cast<size_t>(MailboxError::kFailed)];
      SetErrors(bit, MailboxError::kFailed);
    }
  }

  void Leave(uint64_t worker) {
    if ((gone_ & worker) != 0) return;
    gone_ |= worker;
    ++failures_[static_cast<size_t>(MailboxError::kLeft)];
  }
  void Fail(int channel, uint64_t worker, MailboxError error) {
    SetErrors(worker, error);
    Answer(channel);
  }
  void Answer(int channel) {
    Channel& c = channels_[static_cast<size_t>(channel)];
    if (--c.owed == 0) c.gate.Open();
  }
  void SetErrors(uint64_t workers, MailboxError error) {
    for (size_t slot = 0; slot < servers_.size(); ++slot) {
      if ((servers_[slot] & workers) != 0 && errors_[slot] == 0) {
        errors_[slot] = static_cast<uint32_t>(error);
      }
    }
  }

  SimDeviceState* const device_;
  const MailboxOptions options_;
  const Buffer errors_memory_;
  uint32_t* const errors_;  // [slots]
  const WorkerFn work_;
  std::vector<Channel> channels_;
  std::vector<WorkerState> workers_;
  std::vector<uint64_t> servers_;          // [slots]
  int64_t failures_[kMailboxErrors] = {};  // by MailboxError
  uint64_t gone_ = 0;
  int under_way_ = 0;  // events of this team to come
};

}  // namespace

std::unique_ptr<WorkerTeam> NewSimWorkerTeam(SimDeviceState* device, const MailboxOptions& options,
                                             Buffer errors, WorkerFn work) {
  return std::make_unique<SimWorkerTeam>(device, options, std::move(errors), std::move(work));
}

}  // namespace sluice
