// The commands of `sluice-profile fluxion` share these parts: their ends, their files, and the
// commands that have a file of their own.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/bench/report/flags.h"
#include "src/profile/fluxion/sample_file.h"

namespace sluice::fluxion {

// Prints the error as the command's and returns `code`.
int Fail(const std::string& command, const absl::Status& status, int code = 1);

// Returns the exit status if the command ends with its arguments.
std::optional<int> Parse(bench::Flags& flags, const std::string& command,
                         absl::Span<const std::string> args);

// Returns the error that --`flag` is missing, with what to do.
absl::Status Missing(const std::string& flag, const std::string& what);

// Reads files of samples as one, in which all documents have numbers of their own.
// INVALID_ARGUMENT: they are not of one model and one tau. Other errors are those of
// ReadFluxionSamples.
absl::StatusOr<FluxionSamples> ReadAllSamples(const std::vector<std::string>& paths);

// Writes to the file, or to standard output if `path` is "-". INVALID_ARGUMENT: it cannot be
// written.
absl::Status WriteJson(const nlohmann::json& root, const std::string& path);

// Run the command of that name with the arguments behind it, and return the exit status.
int Features(absl::Span<const std::string> args);
int Summary(absl::Span<const std::string> args);
int Figures(absl::Span<const std::string> args);

}  // namespace sluice::fluxion
