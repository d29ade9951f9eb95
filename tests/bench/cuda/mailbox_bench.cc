// Measures how long a step stands still for a mailbox: the time of a round trip inside a recorded
// program, whose workers answer at once.
//
//   sluice-mailbox-bench
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_device.h"
#include "src/device/mailbox.h"
#include "src/device/mailbox_team.h"

namespace sluice {
namespace {

constexpr int kChannels = 32;  // channels, one after the other in each run of the program
constexpr int kRuns = 200;

void Measure(Device& device, int workers, bool work_between) {
  const auto stream = device.NewStream(Device::StreamKind::kCompute);
  auto mailbox = device.NewMailbox({.channels = kChannels, .workers = workers, .slots = 64});
  SLUICE_CHECK(mailbox.ok(), mailbox.status().message());
  const auto scratch = device.Allocate(MemoryKind::kDevice, 4096, "a benchmark");
  SLUICE_CHECK(scratch.ok());
  MailboxTeam team(mailbox->get(), [](int, int) { return absl::OkStatus(); });
  auto program = device.Record(*stream, [&](Stream& s) {
    for (int channel = 0; channel < kChannels; ++channel) {
      (*mailbox)->Raise(s, channel);
      if (work_between) s.Fill(scratch->data(), 1, 64);
      (*mailbox)->Await(s, channel);
    }
  });
  SLUICE_CHECK(program.ok(), program.status().message());
  const auto start = device.NewTimedEvent(), stop = device.NewTimedEvent();
  std::vector<double> us;
  for (int run = 0; run < kRuns; ++run) {
    stream->Record(*start);
    (*program)->Run(*stream);
    stream->Record(*stop);
    stop->Wait();
    if (run >= kRuns / 10)
      us.push_back(absl::ToDoubleMicroseconds(stop->Since(*start)) / kChannels);
  }
  std::sort(us.begin(), us.end());
  SLUICE_CHECK(device.Health().ok() && (*mailbox)->error(0) == MailboxError::kNone);
  std::printf("%2d workers, %s: %.2f us a round trip (%.2f-%.2f)\n", workers,
              work_between ? "a fill between request and answer" : "nothing in between",
              us[us.size() / 2], us.front(), us.back());
}

int Main() {
  const auto device = NewCudaDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  for (const int workers : {1, 4, 14}) {
    Measure(**device, workers, false);
    Measure(**device, workers, true);
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main() { return sluice::Main(); }
