#include "src/bench/harness/step_device.h"

#include <functional>
#include <string>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/mailbox.h"
#include "src/device/trace.h"
#include "src/device/worker_team.h"

namespace sluice::bench {
namespace {

class TwoVersions : public Program {
 public:
  TwoVersions(const bool* version, std::unique_ptr<Program> when_false,
              std::unique_ptr<Program> when_true)
      : version_(version), when_false_(std::move(when_false)), when_true_(std::move(when_true)) {}
  void Run(Stream& stream) override { (*version_ ? when_true_ : when_false_)->Run(stream); }

 private:
  const bool* const version_;
  const std::unique_ptr<Program> when_false_, when_true_;
};

class StepDevice : public Device {
 public:
  StepDevice(Device* device, const StepDeviceOptions& options)
      : device_(device), options_(options) {}

  const std::string& name() const override { return device_->name(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string& what) override {
    return device_->Allocate(kind, bytes, what);
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override { return device_->NewStream(kind); }
  std::unique_ptr<Event> NewEvent() override { return device_->NewEvent(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return device_->NewTimedEvent(); }
  KernelSet& kernels() override { return device_->kernels(); }

  absl::StatusOr<std::unique_ptr<Program>> Record(Stream& stream,
                                                  std::function<void(Stream&)> enqueue) override {
    if (options_.version == nullptr) return device_->Record(stream, std::move(enqueue));
    const bool now = *options_.version;
    std::unique_ptr<Program> versions[2];
    absl::Status status;
    for (const bool version : {false, true}) {
      *options_.version = version;
      auto program = device_->Record(stream, enqueue);
      if (!program.ok()) {
        status = program.status();
        break;
      }
      versions[version ? 1 : 0] = *std::move(program);
    }
    *options_.version = now;
    SLUICE_RETURN_IF_ERROR(status);
    return std::make_unique<TwoVersions>(options_.version, std::move(versions[0]),
                                         std::move(versions[1]));
  }
  int RowBucket(int rows) const override { return options_.record ? device_->RowBucket(rows) : 0; }

  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) override {
    return device_->NewMailbox(options);
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(
      const WorkerTeamOptions& options, std::function<absl::Status(int, int)> work) override {
    return device_->NewWorkerTeam(options, std::move(work));
  }
  int HostThreads() const override { return device_->HostThreads(); }
  HostPlacement Placement() const override { return device_->Placement(); }
  absl::StatusOr<std::unique_ptr<DeviceTrace>> StartTrace() override {
    return device_->StartTrace();
  }
  int Processors() const override { return device_->Processors(); }
  DeviceMemory Memory() const override { return device_->Memory(); }
  absl::Status Health() const override { return device_->Health(); }

 private:
  Device* const device_;
  const StepDeviceOptions options_;
};

}  // namespace

std::unique_ptr<Device> NewStepDevice(Device* device, const StepDeviceOptions& options) {
  return std::make_unique<StepDevice>(device, options);
}

}  // namespace sluice::bench
