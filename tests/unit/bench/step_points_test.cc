// Tests of the operands that sluice-bench kernels --only step times operators on: launches of
// UpdateResidency miss what their point says, replay after replay.
#include "src/bench/operators/step_points.h"

#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "src/device/cpu/cpu_device.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

StepPointShape SmallShape() {
  StepPointShape shape;
  shape.config = *LoadModelConfig(SLUICE_SOURCE_DIR "/configs/models/topic-drift-indexer-small");
  shape.rows = {1, 2};
  shape.contexts = {2048, 4096};
  shape.misses = {0, 8, 32, 128};
  shape.sequences = 3;
  shape.cold_bytes = 1;
  return shape;
}

// Launches a point as a timer does, `replays` times, and calls `each` after each launch.
void Replay(Device& device, const StepPoint& point, int replays,
            const std::function<void(int replay, int launch)>& each) {
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCompute);
  const std::unique_ptr<Event> done = device.NewEvent();
  for (int replay = 0; replay < replays; ++replay) {
    if (point.before != nullptr) point.before(*stream);
    for (int launch = 0; launch < point.launches; ++launch) {
      point.launch(*stream, launch);
      stream->Record(*done);
      done->Wait();
      each(replay, launch);
    }
  }
}

TEST_CASE("launches of UpdateResidency miss what their point says") {
  const StepPointShape shape = SmallShape();
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 2});
  std::set<std::string> names;
  const absl::Status status = TimePools(*device, shape, [&](const StepPoint& point) {
    names.insert(point.name);
    if (point.missed == nullptr) return absl::OkStatus();
    INFO(point.name << " " << point.count);
    double missed = 0;
    int launches = 0;
    Replay(*device, point, 3, [&](int replay, int launch) {
      // Pools fill up in the first replay, and lists begin anew with the first launch.
      if (replay == 0 || launch == 0) return;
      for (int s = 0; s < 3; ++s) CHECK(point.missed[s] == point.missed[0]);
      missed += point.missed[0];
      ++launches;
    });
    double want = point.count;
    if (point.name == "update_residency.places") want = 32;
    if (point.name == "update_residency.whole") want = 0;
    CHECK(missed / launches == Approx(want));
    return absl::OkStatus();
  });
  INFO(status.ToString());
  REQUIRE(status.ok());
  CHECK(names == std::set<std::string>{"transfer", "update_residency", "update_residency.places",
                                       "update_residency.whole"});
}

TEST_CASE("far homes are a point of their own, of as many entries as a near one") {
  StepPointShape shape = SmallShape();
  shape.home_bytes = int64_t{3} * 2048 * 656 * 6;  // Six layers, where near ones are four.
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 2});
  std::multimap<double, std::string> found;
  const absl::Status status = TimePools(*device, shape, [&](const StepPoint& point) {
    if (point.name.find("transfer") == 0) found.emplace(point.count, point.name);
    Replay(*device, point, 1, [](int, int) {});
    return absl::OkStatus();
  });
  REQUIRE(status.ok());
  const double far = static_cast<double>(shape.sequences * std::min(kFarMisses, shape.top_k()));
  CHECK(found.count(far) == 2);
  CHECK(std::count_if(found.begin(), found.end(),
                      [](const auto& point) { return point.second == "transfer.far"; }) == 1);
}

TEST_CASE("an error of the timer ends the run") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 1});
  int calls = 0;
  const absl::Status status = TimeProducts(*device, SmallShape(), [&](const StepPoint&) {
    return ++calls == 3 ? absl::InternalError("third") : absl::OkStatus();
  });
  CHECK(status.message() == "third");
  CHECK(calls == 3);
}

}  // namespace
}  // namespace sluice::bench
