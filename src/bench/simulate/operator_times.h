// Measured times of a decode step's operators, read from the file that `sluice-bench kernels --only
// step --json FILE` writes. A time between two measured points is on the straight line through
// them; below the first point it is that of the first point. Above the last point nothing is known:
// that is an error, unless the caller asks for the line through the last two points.
//
// The file is a report whose details have "operator_times", or an object that has it by itself:
//   machine      text: where the times were measured
//   geometry     {name: number}: the dimensions that the products were measured with
//   constants    {name: {value, source}}
//   operators    {name: {axis, source, points: [[count, microseconds], ...]}}, counts rising
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/model/model_config.h"

namespace sluice::bench {

// Times of one operator by a count of work.
struct OperatorCurve {
  std::string axis;                               // What is counted, for messages.
  std::string source;                             // Where the points come from.
  std::vector<std::pair<double, double>> points;  // (count, microseconds), counts rising.
};

class OperatorTimes {
 public:
  // INVALID_ARGUMENT names the key and what is wrong with it.
  static absl::StatusOr<OperatorTimes> Parse(const nlohmann::json& root, const std::string& path);
  // NOT_FOUND: there is no such file.
  static absl::StatusOr<OperatorTimes> Read(const std::string& path);

  // INVALID_ARGUMENT: the model has other dimensions than the times were measured with, except for
  // its number of layers and of experts; the message names the first that differs.
  absl::Status CheckGeometry(const ModelConfig& config) const;

  // Make what Json writes, point by point.
  static OperatorTimes Of(const std::string& machine, const ModelConfig& config);
  void AddPoint(const std::string& name, const std::string& axis, const std::string& source,
                double count, double us);
  void AddConstant(const std::string& name, double value, const std::string& source);
  // Returns the object under "operator_times". Points are in the order of their counts.
  nlohmann::json Json() const;

  const std::string& machine() const { return machine_; }
  const std::map<std::string, OperatorCurve>& curves() const { return curves_; }

  // Multiplies the times of every operator whose name begins with `prefix`: another machine's, by
  // the quotient of a rate. REQUIRES: factor > 0.
  void Scale(const std::string& prefix, double factor);
  void SetConstant(const std::string& name, double value) { constants_[name] = value; }

 private:
  friend class TimeLookup;
  std::string path_, machine_;
  std::map<std::string, double> geometry_, constants_;
  std::map<std::string, std::string> constant_sources_;
  std::map<std::string, OperatorCurve> curves_;
};

// Looks times up, and keeps the first error and the names of what lies outside the measured range,
// so that a sum of many operators reads as a sum.
class TimeLookup {
 public:
  // REQUIRES: `times` outlives this.
  TimeLookup(const OperatorTimes* times, bool extrapolate)
      : times_(*times), extrapolate_(extrapolate) {}

  // Returns microseconds; 0 after an error.
  double Us(const std::string& name, double count);
  double Constant(const std::string& name);

  // NOT_FOUND: the file lacks an operator or a constant. OUT_OF_RANGE: a count is above the largest
  // measured one. The message names the operator, the count and the range.
  const absl::Status& status() const { return status_; }
  // Returns the operators whose time lies on the line behind their last point.
  const std::set<std::string>& extrapolated() const { return extrapolated_; }

 private:
  const OperatorTimes& times_;
  const bool extrapolate_;
  absl::Status status_;
  std::set<std::string> extrapolated_;
};

}  // namespace sluice::bench
