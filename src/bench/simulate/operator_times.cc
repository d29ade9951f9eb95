#include "src/bench/simulate/operator_times.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/config_reader.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr double kMostCount = 1e12, kMostUs = 1e9;

absl::StatusOr<OperatorCurve> ParseCurve(const ConfigReader& reader) {
  OperatorCurve curve;
  SLUICE_ASSIGN_OR_RETURN(curve.axis, reader.StringOr("axis", "count"));
  SLUICE_ASSIGN_OR_RETURN(curve.source, reader.StringOr("source", ""));
  const std::string expected = "a list of [count, microseconds], counts rising";
  if (!reader.Has("points") || !reader.At("points").is_array() || reader.At("points").empty()) {
    return reader.Wrong("points", expected);
  }
  for (const json& point : reader.At("points")) {
    if (!point.is_array() || point.size() != 2 || !point[0].is_number() || !point[1].is_number()) {
      return reader.Wrong("points", expected);
    }
    const double count = point[0].get<double>(), us = point[1].get<double>();
    const bool rises = curve.points.empty() || count > curve.points.back().first;
    if (!rises || count < 0 || count > kMostCount || us < 0 || us > kMostUs) {
      return reader.Wrong("points", expected);
    }
    curve.points.emplace_back(count, us);
  }
  return curve;
}

// Calls `each` with the name and a reader of every object in the object under `key`.
template <typename Each>
absl::Status ForEachObject(const ConfigReader& root, const std::string& path, const char* key,
                           Each each) {
  if (!root.Has(key)) return root.Wrong(key, "an object");
  SLUICE_RETURN_IF_ERROR(root.Object(key).status());
  for (const auto& [name, value] : root.At(key).items()) {
    if (!value.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": ", key, ".", name, ": expected an object, found ", ShownJson(value)));
    }
    SLUICE_RETURN_IF_ERROR(
        each(name, ConfigReader(absl::StrCat(path, ": ", key, ".", name), value)));
  }
  return absl::OkStatus();
}

// Returns the dimensions of a model that its operators' times depend on.
std::map<std::string, double> GeometryOf(const ModelConfig& c) {
  const LatentConfig& l = *c.latent;
  return {{"hidden_size", c.hidden_size},
          {"intermediate_size", c.intermediate_size},
          {"moe_intermediate_size", l.experts.intermediate},
          {"heads", c.heads},
          {"q_rank", l.q_rank},
          {"rank", l.rank},
          {"rope_dim", l.rope_dim},
          {"nope_dim", l.nope_dim},
          {"v_dim", l.v_dim},
          {"index_heads", l.indexer->heads},
          {"top_k", l.indexer->top_k},
          {"vocab_size", c.vocab_size}};
}

}  // namespace

absl::StatusOr<OperatorTimes> OperatorTimes::Parse(const json& root, const std::string& path) {
  const json* at = &root;
  if (at->contains("details") && (*at)["details"].is_object()) at = &(*at)["details"];
  if (!at->contains("operator_times") || !(*at)["operator_times"].is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path,
        ": expected operator_times, an object: a report of sluice-bench kernels --only step"));
  }
  const ConfigReader reader(path, (*at)["operator_times"]);
  OperatorTimes times;
  times.path_ = path;
  SLUICE_ASSIGN_OR_RETURN(times.machine_, reader.StringOr("machine", "an unnamed machine"));
  if (!reader.Has("geometry")) return reader.Wrong("geometry", "an object of dimensions");
  SLUICE_RETURN_IF_ERROR(reader.Object("geometry").status());
  for (const auto& [name, value] : reader.At("geometry").items()) {
    if (!value.is_number()) return reader.Wrong("geometry", "an object of numbers");
    times.geometry_[name] = value.get<double>();
  }
  SLUICE_RETURN_IF_ERROR(ForEachObject(
      reader, path, "constants", [&](const std::string& name, const ConfigReader& one) {
        const absl::StatusOr<double> value = one.Number("value", 0, kMostUs);
        if (value.ok()) times.constants_[name] = *value;
        return value.status();
      }));
  SLUICE_RETURN_IF_ERROR(ForEachObject(reader, path, "operators",
                                       [&](const std::string& name, const ConfigReader& one) {
                                         absl::StatusOr<OperatorCurve> curve = ParseCurve(one);
                                         if (curve.ok()) times.curves_[name] = *std::move(curve);
                                         return curve.status();
                                       }));
  return times;
}

absl::StatusOr<OperatorTimes> OperatorTimes::Read(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const json root, ReadJsonFile(path, kMaxIndexBytes));
  return Parse(root, path);
}

absl::Status OperatorTimes::CheckGeometry(const ModelConfig& config) const {
  if (!config.latent.has_value() || !config.latent->indexer.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step is simulated of models with latent caches and an indexer, found ",
                     config.architecture));
  }
  for (const auto& [name, value] : GeometryOf(config)) {
    const auto at = geometry_.find(name);
    if (at != geometry_.end() && at->second == value) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": geometry: ", name, " is ",
                     at == geometry_.end() ? std::string("not given") : absl::StrCat(at->second),
                     ", but the model has ", value,
                     "; measure its operators with sluice-bench kernels --only ", "step --model"));
  }
  return absl::OkStatus();
}

OperatorTimes OperatorTimes::Of(const std::string& machine, const ModelConfig& config) {
  OperatorTimes times;
  times.path_ = machine;
  times.machine_ = machine;
  times.geometry_ = GeometryOf(config);
  return times;
}

void OperatorTimes::AddPoint(const std::string& name, const std::string& axis,
                             const std::string& source, double count, double us) {
  OperatorCurve& curve = curves_[name];
  curve.axis = axis;
  curve.source = source;
  curve.points.emplace_back(count, us);
  std::sort(curve.points.begin(), curve.points.end());
}

void OperatorTimes::AddConstant(const std::string& name, double value, const std::string& source) {
  constants_[name] = value;
  constant_sources_[name] = source;
}

json OperatorTimes::Json() const {
  json root = {{"machine", machine_}, {"geometry", geometry_}};
  for (const auto& [name, value] : constants_) {
    const auto source = constant_sources_.find(name);
    root["constants"][name] = {{"value", value},
                               {"source", source == constant_sources_.end() ? "" : source->second}};
  }
  for (const auto& [name, curve] : curves_) {
    root["operators"][name] = {
        {"axis", curve.axis}, {"source", curve.source}, {"points", curve.points}};
  }
  return root;
}

void OperatorTimes::Scale(const std::string& prefix, double factor) {
  for (auto& [name, curve] : curves_) {
    if (!absl::StartsWith(name, prefix)) continue;
    for (auto& [count, us] : curve.points) us *= factor;
  }
}

double TimeLookup::Us(const std::string& name, double count) {
  const auto found = times_.curves_.find(name);
  if (found == times_.curves_.end()) {
    if (status_.ok()) {
      status_ = absl::NotFoundError(absl::StrCat(times_.path_, ": there is no operator ", name));
    }
    return 0;
  }
  const auto& points = found->second.points;
  if (count <= points.front().first) return points.front().second;
  if (count > points.back().first) {
    if (!extrapolate_ || points.size() < 2) {
      if (status_.ok()) {
        status_ = absl::OutOfRangeError(
            absl::StrCat(times_.path_, ": ", name, " is wanted at ", count, " (",
                         found->second.axis, "), but was measured from ", points.front().first,
                         " to ", points.back().first, "; measure it there, or give --extrapolate"));
      }
      return 0;
    }
    extrapolated_.insert(name);
  }
  auto right = std::lower_bound(points.begin() + 1, points.end() - 1, count,
                                [](const auto& point, double c) { return point.first < c; });
  const auto left = right - 1;
  const double along = (count - left->first) / (right->first - left->first);
  return left->second + along * (right->second - left->second);
}

double TimeLookup::Constant(const std::string& name) {
  const auto found = times_.constants_.find(name);
  if (found != times_.constants_.end()) return found->second;
  if (status_.ok()) {
    status_ = absl::NotFoundError(absl::StrCat(times_.path_, ": there is no constant ", name));
  }
  return 0;
}

}  // namespace sluice::bench
