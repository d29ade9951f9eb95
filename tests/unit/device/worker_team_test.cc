#include "src/device/worker_team.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "src/device/cpu_topology.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"
#include "tests/unit/device/devices.h"

namespace sluice {
namespace {

constexpr int kChannels = 2, kWorkers = 3, kSlots = 6;

// A round: the stream writes a question, each worker answers for itself, and the stream takes the
// answers away.
struct Round {
  uint64_t question[kChannels] = {};
  uint64_t answers[kChannels][kWorkers] = {};
};

WorkerTeamOptions Options(absl::Duration deadline = absl::Seconds(60)) {
  WorkerTeamOptions options;
  options.mailbox = {kChannels, kWorkers, kSlots, deadline};
  return options;
}

void AskAndAnswer(Device& device) {
  const Buffer memory = *device.Allocate(MemoryKind::kPinned, sizeof(Round), "a test");
  auto& round = *memory.as<Round>();
  const auto stream = device.NewStream(Device::StreamKind::kCompute);
  const auto done = device.NewEvent();
  WorkerTeam* owner = nullptr;
  auto made = device.NewWorkerTeam(Options(), [&](int worker, int channel) {
    round.answers[channel][worker] = round.question[channel] * 10 + static_cast<uint64_t>(worker);
    return owner->Owes(worker) ? absl::OkStatus() : absl::InternalError("not owed");
  });
  REQUIRE(made.ok());
  WorkerTeam& team = **made;
  owner = &team;
  std::vector<std::array<uint64_t, kWorkers>> got(200);
  std::vector<uint64_t> tickets(got.size());
  std::iota(tickets.begin(), tickets.end(), uint64_t{1});
  // The next question is asked before the last one's answer is taken.
  const auto ask = [&](size_t i) {
    stream->Copy(&round.question[i % kChannels], &tickets[i], sizeof(uint64_t));
    team.Raise(*stream, static_cast<int>(i % kChannels));
  };
  ask(0);
  for (size_t i = 0; i < got.size(); ++i) {
    if (i + 1 < got.size()) ask(i + 1);
    team.Await(*stream, static_cast<int>(i % kChannels));
    stream->Copy(got[i].data(), round.answers[i % kChannels], sizeof(got[i]));
  }
  stream->Record(*done);
  done->Wait();
  for (size_t i = 0; i < got.size(); ++i) {
    for (size_t w = 0; w < kWorkers; ++w) REQUIRE(got[i][w] == tickets[i] * 10 + w);
  }
  for (int slot = 0; slot < kSlots; ++slot) CHECK(team.error(slot) == MailboxError::kNone);
  CHECK(team.gone() == 0);
}
SLUICE_TEST_ON_EVERY_DEVICE("a team answers every question of two channels at once", AskAndAnswer)

// Worker 1 does as `what` says in the third round; worker s % 3 serves slot s.
void FailOnce(Device& device, const absl::Status& what, MailboxError wanted) {
  const auto stream = device.NewStream(Device::StreamKind::kCompute);
  const auto done = device.NewEvent();
  std::atomic<int> rounds{0};
  auto made = device.NewWorkerTeam(Options(), [&](int worker, int) {
    return worker == 1 && rounds.load() == 2 ? what : absl::OkStatus();
  });
  REQUIRE(made.ok());
  WorkerTeam& team = **made;
  for (int slot = 0; slot < kSlots; ++slot) team.SetServers(slot, 1u << (slot % kWorkers));
  for (; rounds < 5; ++rounds) {
    team.Raise(*stream, 0);
    team.Await(*stream, 0);
    stream->Record(*done);
    done->Wait();
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool hit = slot % kWorkers == 1 && rounds >= 2;
      CHECK(team.error(slot) == (hit ? wanted : MailboxError::kNone));
      CHECK(team.errors()[slot] == static_cast<uint32_t>(team.error(slot)));
    }
  }
  CHECK(team.failures(wanted) == 1);
  CHECK(team.gone() == (wanted == MailboxError::kLeft ? 2u : 0u));
  // A worker that has died also fails the slot's next sequence; one that failed once does not.
  team.Reset(1);
  team.Raise(*stream, 0);
  team.Await(*stream, 0);
  stream->Record(*done);
  done->Wait();
  CHECK(team.error(1) == (wanted == MailboxError::kLeft ? wanted : MailboxError::kNone));
}
void FailOnEach(Device& device) {
  FailOnce(device, absl::InternalError("a fault"), MailboxError::kFailed);
  FailOnce(device, absl::AbortedError("a death"), MailboxError::kLeft);
}
SLUICE_TEST_ON_EVERY_DEVICE("a share that fails, or whose worker dies, is its sequences' alone",
                            FailOnEach)

SimDeviceOptions Simulated(uint64_t seed) {
  SimDeviceOptions options;
  options.kernels = kernels::FindKernelTable("portable");
  options.seed = seed;
  return options;
}

TEST_CASE("a team in virtual time answers as threads do") {
  SimClock clock;
  const auto device = NewSimDevice(Simulated(1), &clock);
  AskAndAnswer(*device);
  FailOnEach(*device);
}

TEST_CASE("workers in virtual time fail, come late and leave by the seed, and rounds go on") {
  struct Seen {
    std::vector<MailboxError> errors;
    absl::Time end;
  };
  const auto run = [](const SimDeviceOptions& options) {
    SimClock clock;
    const auto device = NewSimDevice(options, &clock);
    const auto stream = device->NewStream(Device::StreamKind::kCompute);
    const auto done = device->NewEvent();
    auto team = *device->NewWorkerTeam(Options(absl::Milliseconds(2)),
                                       [](int, int) { return absl::OkStatus(); });
    for (int slot = 0; slot < kSlots; ++slot) team->SetServers(slot, 1u << (slot % kWorkers));
    Seen seen;
    for (int i = 0; i < 100; ++i) {
      team->Raise(*stream, i % kChannels);
      team->Await(*stream, i % kChannels);
      stream->Record(*done);
      done->Wait();
      for (int slot = 0; slot < kSlots; ++slot) {
        seen.errors.push_back(team->error(slot));
        team->Reset(slot);
      }
    }
    seen.end = clock.Now();
    return seen;
  };
  const auto count = [](const Seen& seen, MailboxError error) {
    return std::count(seen.errors.begin(), seen.errors.end(), error);
  };
  SimDeviceOptions options = Simulated(TestSeed());
  CHECK(count(run(options), MailboxError::kNone) == 100 * kSlots);
  options.worker_failures = 0.1;
  const Seen failing = run(options);
  CHECK(count(failing, MailboxError::kFailed) > 0);
  CHECK(count(failing, MailboxError::kNone) > 0);
  options.worker_failures = 0;
  options.late_workers = 0.1;
  const Seen late = run(options);
  CHECK(count(late, MailboxError::kDeadline) > 0);
  CHECK(count(late, MailboxError::kNone) > 0);
  options.late_workers = 0;
  options.leaving_workers = 0.2;  // so high that all workers have left after 100 steps
  const Seen leaving = run(options);
  CHECK(count(leaving, MailboxError::kLeft) > 0);
  CHECK(leaving.errors.back() == MailboxError::kLeft);
  // The same seed gives the same run.
  const Seen again = run(options);
  CHECK(again.errors == leaving.errors);
  CHECK(again.end == leaving.end);
}

TEST_CASE("workers stay on the cpus that they are given") {
  const auto device = testing::TestDevice("portable");
  REQUIRE(device.ok());
  const int cpu = UsableCpus().back().id;
  std::array<std::atomic<int>, kWorkers> found{};
  const auto work = [&](int worker, int) {
    const std::vector<Cpu> cpus = UsableCpus();
    found[static_cast<size_t>(worker)] = cpus.size() == 1 ? cpus.front().id : -1;
    return absl::OkStatus();
  };
  WorkerTeamOptions options = Options();
  options.cpus = {cpu, cpu};
  CHECK((*device)->NewWorkerTeam(options, work).status().message() ==
        "a worker team: 2 cpus for 3 workers; give one for each, or none");
  const auto ask = [&] {
    auto team = *(*device)->NewWorkerTeam(options, work);
    const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
    team->Raise(*stream, 0);
    team->Await(*stream, 0);
  };
  options.cpus = {cpu, cpu, cpu};
  ask();
  for (const auto& at : found) CHECK(at == cpu);
  options.pin = false;
  ask();
  if (UsableCpus().size() > 1) {
    for (const auto& at : found) CHECK(at == -1);
  }
}

}  // namespace
}  // namespace sluice
