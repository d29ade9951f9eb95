// Tests of a layer's stage rates: lines through measured times.
#include "src/profile/stage_timer.h"

#include <catch2/catch.hpp>

#include "src/base/rng.h"
#include "tests/support/device.h"

namespace sluice {
namespace {

TEST_CASE("A line is found again from its points") {
  SplitMix64 random(5);
  for (int round = 0; round < 100; ++round) {
    const double fixed = static_cast<double>(random.Below(100));
    const double each = 0.01 * static_cast<double>(1 + random.Below(100));
    std::vector<double> x, y;
    for (int i = 0; i < 20; ++i) {
      x.push_back(static_cast<double>(i * i + static_cast<int>(random.Below(3))));
      y.push_back(fixed + each * x.back());
    }
    const LinearTime line = FitLine(x, y);
    REQUIRE(line.fixed_us == Approx(fixed).margin(1e-6));
    REQUIRE(line.each_us == Approx(each));
  }
}

TEST_CASE("A line never goes below zero") {
  LinearTime line = FitLine({10, 20}, {5, 20});  // The least-squares line itself begins at -10.
  CHECK(line.fixed_us == 0);
  CHECK(line.each_us == Approx((50 + 400) / 500.0));
  line = FitLine({10, 20}, {7, 5});
  CHECK(line.fixed_us == 6);
  CHECK(line.each_us == 0);
}

TEST_CASE("A line through counts that are alike goes through the origin") {
  LinearTime line = FitLine({100, 101, 99}, {50, 50, 50});
  CHECK(line.fixed_us == 0);
  CHECK(line.At(100) == Approx(50).epsilon(1e-3));
  line = FitLine({0, 0}, {3, 5});  // There is no work to count.
  CHECK(line.fixed_us == 4);
  CHECK(line.each_us == 0);
}

TEST_CASE("A step's stages are timed by layer, whole steps of the expected size alone") {
  using Stage = EssProbe::Stage;
  for (const char* kernels : {"portable", "cuda"}) {
    auto device = testing::TestDevice(kernels);
    if (!device.ok()) continue;
    constexpr int kLayers = 2;
    StageTimer timer(device->get(), kLayers);
    const std::unique_ptr<Stream> stream = (*device)->NewStream(Device::StreamKind::kCompute);
    Buffer memory = *(*device)->Allocate(MemoryKind::kDevice, size_t{64} << 20, "to be filled");
    const auto step = [&](int32_t rows) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int s = 0; s < EssProbe::kStages; ++s) {
          // Attn0 of layer 1 takes long.
          if (layer == 1 && s == EssProbe::kStages - 1) {
            for (int i = 0; i < 4; ++i) stream->Fill(memory.data(), 1, memory.bytes());
          }
          timer.OnStage(*stream, layer, rows, static_cast<Stage>(s));
        }
      }
    };
    timer.Expect(3);
    CHECK(timer.Take().empty());
    step(2);
    CHECK(timer.Take().empty());
    for (int i = 0; i < 7; ++i) step(3);
    const std::vector<StageTimer::LayerTimes> times = timer.Take();
    REQUIRE(times.size() == kLayers);
    for (int s = 0; s < StageTimer::kTimes; ++s) {
      CHECK(times[0][static_cast<size_t>(s)] >= 0);
      CHECK(times[1].back() >= times[0][static_cast<size_t>(s)]);
    }
    CHECK(times[1].back() > 10);
    CHECK(timer.Take().empty());
    const absl::StatusOr<double> branch = MeasureBranch(**device);
    REQUIRE(branch.ok());
    CHECK(*branch >= 0);
    CHECK(*branch < 1000);
  }
}

}  // namespace
}  // namespace sluice
