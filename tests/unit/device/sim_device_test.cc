// The simulated device keeps the contract of device.h in virtual time, and breaks it where asked.
#include "src/device/sim/sim_device.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "src/device/kernel_set.h"
#include "src/device/sim/sim_clock.h"

namespace sluice {
namespace {

SimDeviceOptions Options(uint64_t seed = 1) {
  SimDeviceOptions options;
  options.kernels = kernels::FindKernelTable("portable");
  options.seed = seed;
  return options;
}

TEST_CASE("virtual time runs what is due in order of time, then of asking") {
  SimClock clock;
  const absl::Time start = clock.Now();
  std::vector<int> order;
  clock.After(absl::Seconds(2), [&] { order.push_back(3); });
  clock.After(absl::Seconds(1), [&] {
    order.push_back(1);
    clock.After(absl::ZeroDuration(), [&] { order.push_back(2); });
  });
  clock.After(absl::Seconds(2), [&] { order.push_back(4); });
  CHECK(clock.RunNext());
  CHECK(clock.Now() == start + absl::Seconds(1));
  clock.Leap(absl::Seconds(5));
  while (clock.RunNext()) {
  }
  CHECK(order == std::vector<int>{1, 2, 3, 4});
  CHECK(clock.Now() == start + absl::Seconds(6));  // late, and never back
}

TEST_CASE("a simulated stream runs its commands in order, and takes time for it") {
  SimClock clock;
  const auto device = NewSimDevice(Options(), &clock);
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  const auto event = device->NewEvent();
  CHECK(event->Ready());
  std::vector<int> chain(101, 0);
  chain[0] = 42;
  for (size_t i = 0; i < 100; ++i) stream->Copy(&chain[i + 1], &chain[i], sizeof(int));
  stream->Record(*event);
  CHECK_FALSE(event->Ready());
  CHECK(chain.back() == 0);
  const absl::Time start = clock.Now();
  event->Wait();
  CHECK(event->Ready());
  CHECK(chain == std::vector<int>(101, 42));
  CHECK(clock.Now() - start > absl::Milliseconds(1));
  stream->Fill(chain.data(), 0, sizeof(int));
  stream->Record(*event);
  event->Wait();
  CHECK(chain[0] == 0);
}

TEST_CASE("what lies between two events of a simulated stream is virtual time") {
  SimClock clock;
  const auto device = NewSimDevice(Options(), &clock);
  const auto stream = device->NewStream(Device::StreamKind::kCopy);
  const auto began = device->NewTimedEvent();
  const auto ended = device->NewTimedEvent();
  int a = 0, b = 0;
  stream->Record(*began);
  began->Wait();
  const absl::Time start = clock.Now();
  for (int i = 0; i < 10; ++i) stream->Copy(&a, &b, sizeof(a));
  stream->Record(*ended);
  ended->Wait();
  CHECK(ended->Since(*began) == clock.Now() - start);
  CHECK(ended->Since(*began) > absl::ZeroDuration());
}

TEST_CASE("a simulated stream stands still for another's event") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SimClock clock;
    const auto device = NewSimDevice(Options(seed), &clock);
    const auto copy = device->NewStream(Device::StreamKind::kCopy);
    const auto compute = device->NewStream(Device::StreamKind::kCompute);
    const auto copied = device->NewEvent();
    std::vector<int> from(64), to(64, -1), after(64, -1);
    std::iota(from.begin(), from.end(), 0);
    std::vector<Stream::CopyOp> ops;
    for (size_t i = 0; i < from.size(); ++i) ops.push_back({&to[i], &from[i], sizeof(int)});
    copy->CopyBatch(ops.data(), ops.size());
    copy->Record(*copied);
    compute->WaitFor(*copied);
    compute->Copy(after.data(), to.data(), sizeof(int) * to.size());
    const auto done = device->NewEvent();
    compute->Record(*done);
    done->Wait();
    CHECK(after == from);
  }
}

TEST_CASE("the same seed gives the same times, another one others") {
  const auto time_of = [](uint64_t seed) {
    SimClock clock;
    const absl::Time start = clock.Now();
    const auto device = NewSimDevice(Options(seed), &clock);
    const auto stream = device->NewStream(Device::StreamKind::kCopy);
    const auto done = device->NewEvent();
    int a = 0, b = 0;
    for (int i = 0; i < 10; ++i) stream->Copy(&a, &b, sizeof(a));
    stream->Record(*done);
    done->Wait();
    return clock.Now() - start;
  };
  CHECK(time_of(7) == time_of(7));
  CHECK(time_of(7) != time_of(8));
}

TEST_CASE("faults come where they are asked for: stalls, a refused allocation, broken promises") {
  SimClock clock;
  SimDeviceOptions options = Options();
  options.stall_share = 1;
  options.stall = absl::Seconds(3);
  options.refused_allocation = 1;
  {
    const auto device = NewSimDevice(options, &clock);
    CHECK(device->Allocate(MemoryKind::kDevice, 100, "one").ok());
    const auto refused = device->Allocate(MemoryKind::kDevice, 100, "two");
    CHECK(absl::IsResourceExhausted(refused.status()));
    CHECK(std::string(refused.status().message()).find("two") != std::string::npos);
    CHECK(device->Allocate(MemoryKind::kDevice, 100, "three").ok());
    const auto stream = device->NewStream(Device::StreamKind::kCopy);
    const auto done = device->NewEvent();
    const absl::Time start = clock.Now();
    int a = 0, b = 1;
    stream->Copy(&a, &b, sizeof(a));
    stream->Record(*done);
    done->Wait();
    CHECK(clock.Now() - start >= absl::Seconds(3));
    CHECK(device->stalls() == 1);
  }
  options = Options();
  options.early_events = 1;
  options.lost_copies = 1;
  const auto device = NewSimDevice(options, &clock);
  const auto done = device->NewEvent();
  int a = 0, b = 1;
  // This is last: what the stream has not done yet, it does when it ends.
  const auto stream = device->NewStream(Device::StreamKind::kCopy);
  stream->Fill(&b, 0, sizeof(b));
  stream->Copy(&a, &b, sizeof(a));
  stream->Record(*done);
  CHECK(done->Ready());
}

TEST_CASE("operators run on simulated streams") {
  SimClock clock;
  const auto device = NewSimDevice(Options(), &clock);
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  const auto done = device->NewEvent();
  const std::vector<float> gate_up = {0, 1, 2, 3};
  std::vector<float> out(2, -1);
  kernels::SiluMulParams params{};
  params.gate_up = gate_up.data();
  params.out = out.data();
  params.rows = 1;
  params.dim = 2;
  params.out_type = DType::kFloat32;
  device->kernels().SiluMul(*stream, params);
  stream->Record(*done);
  done->Wait();
  CHECK(out[0] == 0);
  CHECK(out[1] == Approx(3 / (1 + std::exp(-1.0))));
}

}  // namespace
}  // namespace sluice
