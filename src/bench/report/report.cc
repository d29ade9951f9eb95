#include "src/bench/report/report.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr char kSchema[] = "sluice-bench/1";

json FigureJson(const Figure& f) {
  json more = json::object();
  for (const auto& [name, value] : f.more) more[name] = value;
  return {{"name", f.name},
          {"unit", f.unit},
          {"better", f.lower_is_better ? "lower" : "higher"},
          {"median", f.median},
          {"p10", f.low},
          {"p90", f.high},
          {"samples", f.samples},
          {"more", std::move(more)}};
}

Figure ParseFigure(const json& j) {
  Figure f;
  f.name = j.at("name").get<std::string>();
  f.unit = j.at("unit").get<std::string>();
  f.lower_is_better = j.at("better").get<std::string>() == "lower";
  f.median = j.at("median").get<double>();
  f.low = j.at("p10").get<double>();
  f.high = j.at("p90").get<double>();
  f.samples = j.at("samples").get<int64_t>();
  for (const auto& [name, value] : j.at("more").items()) {
    f.more.emplace_back(name, value.get<double>());
  }
  return f;
}

}  // namespace

Figure SecondsFigure(std::string name, const Timing& timing) {
  Figure f;
  f.name = std::move(name);
  f.unit = "s";
  f.lower_is_better = true;
  f.median = timing.median;
  f.low = timing.low;
  f.high = timing.high;
  f.samples = timing.samples;
  return f;
}

std::string Preamble(const Report& report) {
  std::string out = absl::StrCat("command   ", report.command, "\n");
  absl::StrAppend(
      &out, "machine   ", report.machine.cpu, ", ", report.machine.cores, " cores, ",
      absl::StrFormat("%.0f GiB", static_cast<double>(report.machine.memory_bytes) / (1 << 30)),
      "; revision ", report.machine.revision, "\n");
  std::string line = "shape    ";
  for (const auto& [name, value] : report.shape) {
    if (line.size() + name.size() + value.size() > 100) {
      absl::StrAppend(&out, line, "\n");
      line = "         ";
    }
    absl::StrAppend(&line, " ", name, "=", value);
  }
  absl::StrAppend(&out, line, "\n");
  return out;
}

std::string ToJson(const Report& report) {
  json shape = json::object();
  for (const auto& [name, value] : report.shape) shape[name] = value;
  json figures = json::array();
  for (const Figure& f : report.figures) figures.push_back(FigureJson(f));
  const json root = {{"schema", kSchema},
                     {"subcommand", report.subcommand},
                     {"command", report.command},
                     {"revision", report.machine.revision},
                     {"machine",
                      {{"cpu", report.machine.cpu},
                       {"cores", report.machine.cores},
                       {"memory_bytes", report.machine.memory_bytes}}},
                     {"shape", std::move(shape)},
                     {"figures", std::move(figures)},
                     {"details", report.details}};
  return root.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

absl::StatusOr<Report> ParseReport(const std::string& text) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  if (!root.is_object() || !root.contains("schema") || root["schema"] != kSchema) {
    return absl::InvalidArgumentError(
        absl::StrCat("is not a report of sluice-bench: \"schema\" must be \"", kSchema, "\""));
  }
  // The library reports missing fields and wrong types by exceptions, which do not leave this
  // function.
  try {
    Report report;
    report.subcommand = root.at("subcommand").get<std::string>();
    report.command = root.at("command").get<std::string>();
    const json& machine = root.at("machine");
    report.machine = {machine.at("cpu").get<std::string>(), machine.at("cores").get<int>(),
                      machine.at("memory_bytes").get<int64_t>(),
                      root.at("revision").get<std::string>()};
    for (const auto& [name, value] : root.at("shape").items()) {
      report.shape.emplace_back(name, value.get<std::string>());
    }
    for (const json& figure : root.at("figures")) report.figures.push_back(ParseFigure(figure));
    report.details = root.at("details");
    return report;
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("does not match the schema: ", e.what()));
  }
}

absl::Status WriteReport(const Report& report, const std::string& path) {
  return WriteJsonText(ToJson(report), path);
}

absl::Status WriteJsonText(const std::string& text, const std::string& path) {
  if (path == "-") {
    std::fputs(text.c_str(), stdout);
    return std::fflush(stdout) == 0 ? absl::OkStatus() : absl::InternalError("standard output");
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text << std::flush;
  if (file) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--json ", path, ": ", std::strerror(errno)));
}

absl::StatusOr<Report> ReadReport(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::ostringstream text;
  text << file.rdbuf();
  absl::StatusOr<Report> report = ParseReport(text.str());
  if (!report.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " ", report.status().message()));
  }
  return report;
}

}  // namespace sluice::bench
