#include "src/profile/fluxion/command_parts.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/report/report.h"

namespace sluice::fluxion {

int Fail(const std::string& command, const absl::Status& status, int code) {
  std::fprintf(stderr, "sluice-profile fluxion %s: %s\n", command.c_str(),
               std::string(status.message()).c_str());
  return code;
}

std::optional<int> Parse(bench::Flags& flags, const std::string& command,
                         absl::Span<const std::string> args) {
  const absl::StatusOr<bool> parsed = flags.Parse(args);
  if (!parsed.ok()) {
    return Fail(
        command,
        absl::InvalidArgumentError(absl::StrCat(parsed.status().message(), " (see --help)")), 2);
  }
  if (*parsed) return std::nullopt;
  std::fputs(flags.Help().c_str(), stdout);
  return 0;
}

absl::Status Missing(const std::string& flag, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is missing: ", what));
}

absl::StatusOr<FluxionSamples> ReadAllSamples(const std::vector<std::string>& paths) {
  FluxionSamples all;
  for (const std::string& path : paths) {
    SLUICE_ASSIGN_OR_RETURN(const FluxionSamples read, ReadFluxionSamples(path));
    if (!all.model_fingerprint.empty() &&
        (read.model_fingerprint != all.model_fingerprint || read.tau != all.tau)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": is of another model or tau than ", paths[0],
                       ": collect the samples with the same model and --tau"));
    }
    // Documents of different files are different documents.
    int32_t before = 0;
    for (const FluxionSample& sample : all.samples) before = std::max(before, sample.document);
    for (FluxionSample sample : read.samples) {
      sample.document += before;
      all.samples.push_back(sample);
    }
    all.model_fingerprint = read.model_fingerprint;
    all.tau = read.tau;
  }
  return all;
}

absl::Status WriteJson(const nlohmann::json& root, const std::string& path) {
  const auto replace = nlohmann::json::error_handler_t::replace;
  return bench::WriteJsonText(absl::StrCat(root.dump(2, ' ', false, replace), "\n"), path);
}

}  // namespace sluice::fluxion
