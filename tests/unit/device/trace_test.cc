// The promises of src/device/trace.h, on every device.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "src/device/device.h"
#include "src/device/trace.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/device/devices.h"

namespace sluice {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

void Finish(Device& device, Stream& stream) {
  const auto done = device.NewEvent();
  stream.Record(*done);
  done->Wait();
}

std::vector<TraceSlice> StopInOrder(DeviceTrace& trace) {
  auto slices = trace.Stop();
  INFO(std::string(slices.status().ToString()));
  REQUIRE(slices.ok());
  std::sort(slices->begin(), slices->end(),
            [](const TraceSlice& a, const TraceSlice& b) { return a.begin < b.begin; });
  return *std::move(slices);
}

// Enqueues copies and fills on a stream, and then those of a program that runs twice.
void TraceHasWhatRan(Device& device) {
  const auto stream = device.NewStream(Device::StreamKind::kCompute);
  auto from = device.Allocate(MemoryKind::kPinned, kBytes, "a test");
  auto to = device.Allocate(MemoryKind::kDevice, kBytes, "a test");
  REQUIRE((from.ok() && to.ok()));
  const auto work = [&](Stream& s) {
    s.Copy(to->data(), from->data(), kBytes);
    s.Fill(to->data(), 7, kBytes);
  };
  work(*stream);  // before the trace: not in it
  Finish(device, *stream);

  auto trace = device.StartTrace();
  if (!trace.ok()) return SkipTest(std::string(trace.status().message()));
  CHECK_FALSE(device.StartTrace().ok());  // one at a time
  auto program = device.Record(*stream, work);
  REQUIRE(program.ok());
  const absl::Time begin = absl::Now();
  work(*stream);
  (*program)->Run(*stream);
  (*program)->Run(*stream);
  Finish(device, *stream);
  const absl::Time end = absl::Now();
  const std::vector<TraceSlice> slices = StopInOrder(**trace);

  REQUIRE(slices.size() == 6);
  // A GPU's clock is set against the host's once in a while, not at every record.
  constexpr absl::Duration kClocksApart = absl::Milliseconds(1);
  for (size_t i = 0; i < slices.size(); ++i) {
    INFO("slice " << i << ": " << slices[i].name);
    CHECK(slices[i].kind == (i % 2 == 0 ? TraceSlice::Kind::kCopy : TraceSlice::Kind::kFill));
    CHECK(slices[i].bytes == static_cast<int64_t>(kBytes));
    CHECK(slices[i].stream == slices[0].stream);
    CHECK(slices[i].end > slices[i].begin);
    CHECK(slices[i].begin > begin - kClocksApart);
    CHECK(slices[i].end < end + kClocksApart);
    if (i > 0) CHECK(slices[i].begin >= slices[i - 1].end);
  }
  // The work of one run of a program shares a launch of its own; work that was enqueued alone has
  // none.
  CHECK(slices[0].launch == 0);
  CHECK(slices[2].launch == slices[3].launch);
  CHECK((slices[3].launch == 0 || slices[3].launch != slices[4].launch));

  work(*stream);  // after the trace: not in the next one
  Finish(device, *stream);
  trace->reset();
  auto again = device.StartTrace();
  REQUIRE(again.ok());
  CHECK(StopInOrder(**again).empty());
}

}  // namespace

SLUICE_TEST_ON_EVERY_DEVICE("a trace has what ran while it was on, and when", TraceHasWhatRan)

TEST_CASE("a kernel's short name leaves out what all of ours have, and its arguments") {
  CHECK(ShortKernelName("void sluice::kernels::cuda::(anonymous namespace)::RmsNorm<8, (bool)1>"
                        "(sluice::kernels::RmsNormParams)") == "RmsNorm<8, (bool)1>");
  CHECK(ShortKernelName("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") ==
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT");
}

}  // namespace sluice
