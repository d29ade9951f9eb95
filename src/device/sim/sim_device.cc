#include "src/device/sim/sim_device.h"

#include <cstdlib>
#include <cstring>

#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_kernel_set.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/mailbox.h"
#include "src/device/sim/sim_ranks.h"
#include "src/device/sim/sim_stream.h"
#include "src/device/sim/sim_worker_team.h"

namespace sluice {
namespace {

class SimDeviceImpl : public SimDevice {
 public:
  SimDeviceImpl(const SimDeviceOptions& options, SimClock* clock)
      : state_{options, clock, SplitMix64(options.seed)},
        team_(1),
        kernels_(NewCpuKernelSet(*options.kernels, &team_, this)) {}

  const std::string& name() const override { return name_; }
  absl::StatusOr<Buffer> Allocate(MemoryKind, size_t bytes, const std::string& what) override {
    if (allocations_++ == state_.options.refused_allocation) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", what, ": ", bytes, " bytes were asked for (simulated)"));
    }
    if (bytes == 0) return Buffer();
    constexpr size_t kAlignment = 64;
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded);
    SLUICE_CHECK(memory != nullptr);
    std::memset(memory, 0, rounded);
    return Buffer(memory, bytes, [](void* data, size_t) { std::free(data); });
  }
  std::unique_ptr<Stream> NewStream(StreamKind kind) override {
    return std::make_unique<SimStream>(&state_, kind == StreamKind::kCompute ? &team_ : nullptr);
  }
  std::unique_ptr<Event> NewEvent() override { return std::make_unique<SimEvent>(state_.clock); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override {
    return std::make_unique<SimEvent>(state_.clock);
  }
  KernelSet& kernels() override { return *kernels_; }
  int RowBucket(int rows) const override {
    const int bucket = state_.options.row_bucket;
    return bucket == 0 ? 0 : (rows + bucket - 1) / bucket * bucket;
  }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions&) override {
    return absl::UnimplementedError(
        "the simulated device has one thread: there is nobody to answer a mailbox");
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(const WorkerTeamOptions& options,
                                                            WorkerFn work) override {
    SLUICE_RETURN_IF_ERROR(Mailbox::CheckOptions(options.mailbox));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer errors,
        Allocate(MemoryKind::kPinned, sizeof(uint32_t) * static_cast<size_t>(options.mailbox.slots),
                 "a worker team"));
    return NewSimWorkerTeam(&state_, options.mailbox, std::move(errors), std::move(work));
  }
  absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RankGroupOptions& options) override {
    SLUICE_CHECK(state_.options.ranks != nullptr, "SimDeviceOptions::ranks");
    return state_.options.ranks->Join(options, &state_.health);
  }
  absl::Status Health() const override { return state_.health.status(); }
  // Its workers are events that happen when its streams have nothing to do.
  bool WorkersRunBesideStreams() const override { return false; }
  uint64_t stalls() const override { return state_.stalls; }

 private:
  const std::string name_ = "sim";
  SimDeviceState state_;
  CpuTeam team_;
  int allocations_ = 0;
  const std::unique_ptr<KernelSet> kernels_;
};

}  // namespace

std::unique_ptr<SimDevice> NewSimDevice(const SimDeviceOptions& options, SimClock* clock) {
  SLUICE_CHECK(options.kernels != nullptr);
  return std::make_unique<SimDeviceImpl>(options, clock);
}

}  // namespace sluice
