// Holds the simulator to reality: steps that were measured on an H200 against forecasts from the
// times of single operators on such a machine. Both are data files with the page that each figure
// comes from.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "src/base/json_file.h"
#include "src/bench/simulate/misses.h"
#include "src/bench/simulate/operator_times.h"
#include "src/bench/simulate/step_model.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr char kData[] = SLUICE_SOURCE_DIR "/tests/bench/simulate/";
constexpr double kAllowed = 0.10;

std::string Text(const json& step, const char* key) {
  return step.contains(key) ? step[key].get<std::string>() : "";
}

StepShape ShapeOf(const json& step) {
  StepShape shape;
  shape.sequences = step["sequences"].get<int>();
  shape.context = step["context"].get<int64_t>();
  shape.ess = step["policy"] == "ess";
  shape.whole = step.value("whole", false);
  shape.skip_transfers = step.value("skip", false);
  shape.places = step.value("places", 0);
  if (step.contains("misses")) {
    const auto m = step["misses"].get<std::vector<double>>();
    shape.misses = SpreadMisses(m.at(0), m.at(1), m.at(2), 8);
  }
  const std::map<std::string, Overlap> schedules = {
      {"none", Overlap::kNone}, {"da", Overlap::kDa}, {"dba", Overlap::kDba}};
  if (step.contains("schedule")) shape.schedule = schedules.at(Text(step, "schedule"));
  return shape;
}

TEST_CASE("forecasts of steps are within a tenth of steps that were measured on an H200") {
  const auto times = OperatorTimes::Read(std::string(kData) + "h200_operators.json");
  INFO(times.status().ToString());
  REQUIRE(times.ok());
  const auto steps = ReadJsonFile(std::string(kData) + "h200_steps.json", kMaxConfigBytes);
  REQUIRE(steps.ok());
  std::map<std::string, ModelConfig> models;
  for (const char* name : {"ep32", "ep16"}) {
    models[name] =
        *LoadModelConfig(std::string(SLUICE_SOURCE_DIR "/configs/models/deepseek-v3.2-") + name);
    REQUIRE(times->CheckGeometry(models[name]).ok());
  }
  std::vector<double> errors;
  int within = 0;
  for (const json& step : (*steps)["steps"]) {
    const auto forecast =
        SimulateStep(models.at(Text(step, "model")), *times, /*extrapolate=*/true, ShapeOf(step));
    INFO(step.dump());
    INFO(forecast.status().ToString());
    REQUIRE(forecast.ok());
    // Only the time of giving places was not measured up to the misses of some shapes.
    for (const std::string& name : forecast->extrapolated) REQUIRE(name == "update_residency");
    const double error = forecast->us / 1e3 / step["ms"].get<double>() - 1;
    UNSCOPED_INFO("forecast " << forecast->us / 1e3 << " ms, " << 100 * error << " %");
    if (std::getenv("SLUICE_SHOW_STEPS") != nullptr) {
      std::printf("%+6.1f %%  %6.2f  %s\n", 100 * error, forecast->us / 1e3, step.dump().c_str());
    }
    if (step.contains("use")) continue;  // The overhead of a layer was fitted on it.
    errors.push_back(std::abs(error));
    if (step.contains("outside")) {
      CHECK(std::abs(error) > kAllowed);  // The list of what is outside has nothing else in it.
    } else {
      CHECK(std::abs(error) <= kAllowed);
      ++within;
    }
  }
  CHECK(within >= 50);
  std::sort(errors.begin(), errors.end());
  CHECK(errors[errors.size() / 2] < 0.05);
  CHECK(errors.back() < 0.25);
}

}  // namespace
}  // namespace sluice::bench
