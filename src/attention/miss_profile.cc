#include "src/attention/miss_profile.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr size_t kMaxPoints = 4096;
constexpr size_t kMaxLayers = 4096;
constexpr int64_t kMaxContext = int64_t{1} << 30;
constexpr int64_t kMaxBatch = 1 << 16;
constexpr double kMaxMicroseconds = 1e9;
// Weight in Nearest of the logarithm of two batches' quotient.
constexpr double kBatchWeight = 0.25;

struct Stage {
  const char* name;
  LinearTime StageRates::*time;
};
constexpr Stage kStages[] = {{"transfer", &StageRates::transfer},
                             {"prepare", &StageRates::prepare},
                             {"attend", &StageRates::attend},
                             {"index", &StageRates::index},
                             {"admit", &StageRates::update_residency}};

absl::Status ReadPoint(const std::string& where, const json& object, MissProfile::Point* point) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": expected an object, found ", ShownJson(object)));
  }
  const ConfigReader reader(where, object);
  SLUICE_ASSIGN_OR_RETURN(point->context, reader.Int("context", 1, kMaxContext));
  SLUICE_ASSIGN_OR_RETURN(point->ratio, reader.Number("ratio", 0, 1));
  if (point->ratio == 0) return reader.Wrong("ratio", "a number above 0 and at most 1");
  SLUICE_ASSIGN_OR_RETURN(point->batch, reader.Int("batch", 1, kMaxBatch));
  const std::string expected = absl::StrCat("a list of 1 to ", kMaxLayers, " numbers from 0 up");
  if (!reader.Has("by_layer")) return reader.Wrong("by_layer", expected);
  const json& layers = reader.At("by_layer");
  const auto is_count = [](const json& v) {
    return v.is_number() && v.get<double>() >= 0 && v.get<double>() <= double{kMaxContext};
  };
  if (!layers.is_array() || layers.empty() || layers.size() > kMaxLayers ||
      !std::all_of(layers.begin(), layers.end(), is_count)) {
    return reader.Wrong("by_layer", expected);
  }
  point->by_layer = layers.get<std::vector<double>>();
  return absl::OkStatus();
}

absl::Status ReadRates(const ConfigReader& stages, StageRates* rates) {
  SLUICE_ASSIGN_OR_RETURN(rates->device, stages.StringOr("device", ""));
  if (rates->device.empty()) return stages.Wrong("device", "the device that was measured");
  for (const Stage& stage : kStages) {
    if (!stages.Has(stage.name)) {
      return stages.Wrong(stage.name, "an object with fixed_us and each_us");
    }
    SLUICE_ASSIGN_OR_RETURN(const ConfigReader time, stages.Object(stage.name));
    LinearTime& of = rates->*stage.time;
    SLUICE_ASSIGN_OR_RETURN(of.fixed_us, time.Number("fixed_us", 0, kMaxMicroseconds));
    SLUICE_ASSIGN_OR_RETURN(of.each_us, time.Number("each_us", 0, kMaxMicroseconds));
  }
  SLUICE_ASSIGN_OR_RETURN(rates->branch_us, stages.Number("branch_us", 0, kMaxMicroseconds));
  return absl::OkStatus();
}

// |ln(a / b)|.
double Apart(double a, double b) { return std::abs(std::log(a / b)); }

}  // namespace

const MissProfile::Point* MissProfile::Nearest(int64_t context, double ratio, int64_t batch) const {
  const Point* nearest = nullptr;
  double least = 0;
  for (const Point& point : points) {
    const double apart =
        Apart(static_cast<double>(point.context), static_cast<double>(context)) +
        Apart(point.ratio, ratio) +
        kBatchWeight * Apart(static_cast<double>(point.batch), static_cast<double>(batch));
    if (nearest != nullptr && apart >= least) continue;
    nearest = &point;
    least = apart;
  }
  return nearest;
}

void WriteMissProfile(const MissProfile& profile, json* root) {
  for (const MissProfile::Point& point : profile.points) {
    (*root)["misses"].push_back({{"context", point.context},
                                 {"ratio", point.ratio},
                                 {"batch", point.batch},
                                 {"by_layer", point.by_layer}});
  }
  if (profile.rates.device.empty()) return;
  json& stages = (*root)["stages"];
  stages["device"] = profile.rates.device;
  for (const Stage& stage : kStages) {
    const LinearTime& time = profile.rates.*stage.time;
    stages[stage.name] = {{"fixed_us", time.fixed_us}, {"each_us", time.each_us}};
  }
  stages["branch_us"] = profile.rates.branch_us;
}

absl::Status ReadMissProfile(const ConfigReader& root, const std::string& path,
                             MissProfile* profile) {
  if (root.Has("misses")) {
    const json& points = root.At("misses");
    if (!points.is_array() || points.empty() || points.size() > kMaxPoints) {
      return root.Wrong("misses", absl::StrCat("a list of 1 to ", kMaxPoints, " points"));
    }
    for (size_t i = 0; i < points.size(); ++i) {
      SLUICE_RETURN_IF_ERROR(ReadPoint(absl::StrCat(path, ": misses[", i, "]"), points[i],
                                       &profile->points.emplace_back()));
    }
  }
  if (!root.Has("stages")) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader stages, root.Object("stages"));
  return ReadRates(stages, &profile->rates);
}

}  // namespace sluice
