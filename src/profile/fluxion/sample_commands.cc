// The commands of `sluice-profile fluxion` that look at samples: features and summary.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/profile/fluxion/command_parts.h"
#include "src/profile/fluxion/feature_use.h"
#include "src/profile/fluxion/sample_summary.h"

namespace sluice::fluxion {
namespace {

using bench::Flags;

// Writes and prints a summary, and returns the exit status.
int Report(const SampleSummary& summary, const std::string& json_file) {
  if (json_file != "-") std::fputs(SummaryText(summary).c_str(), stdout);
  if (json_file.empty()) return 0;
  const absl::Status written = WriteJson(SummaryJson(summary), json_file);
  return written.ok() ? 0 : Fail("summary", written);
}

}  // namespace

int Features(absl::Span<const std::string> args) {
  std::vector<std::string> paths, samples_paths;
  int64_t most = 20'000;
  Flags flags(
      "sluice-profile fluxion features",
      "Tells what a predictor makes of each feature: how its answers change if the feature\n"
      "is that of another sample. Take samples that it was not trained by.",
      "  sluice-profile fluxion features m.predictor --samples other.samples");
  flags.Rest("FILE", "the predictor", &paths);
  flags.Repeated("samples", "FILE", "file of samples", [&](const std::string& path) {
    samples_paths.push_back(path);
    return absl::OkStatus();
  });
  flags.Integer("most", "samples that are looked at, evenly spread", 2, INT64_MAX, &most);
  if (const auto end = Parse(flags, "features", args)) return *end;
  if (paths.size() != 1 || samples_paths.empty()) {
    return Fail("features",
                absl::InvalidArgumentError("name one predictor, and --samples (see --help)"), 2);
  }
  const absl::StatusOr<FluxionPredictor> predictor = ReadFluxionPredictor(paths[0]);
  if (!predictor.ok()) return Fail("features", predictor.status());
  const absl::StatusOr<FluxionSamples> read = ReadAllSamples(samples_paths);
  if (!read.ok()) return Fail("features", read.status());
  const absl::Status same = CheckFluxionPredictor(*predictor, read->model_fingerprint);
  if (!same.ok()) return Fail("features", same);
  std::vector<FluxionSample> samples;
  const size_t step = std::max<size_t>(read->samples.size() / static_cast<size_t>(most), 1);
  for (size_t i = 0; i < read->samples.size(); i += step) samples.push_back(read->samples[i]);
  const FeatureUses uses = MeasureFeatureUses(*predictor, samples, /*seed=*/1);
  std::printf(
      "%zu samples, streaming told rightly for %.1f %%. With the feature of another sample:\n"
      "%-34s %8s %9s %8s\n",
      samples.size(), 100 * uses.whole.streaming_right, "", "right", "streaming", "budget");
  for (size_t f = 0; f < uses.exchanged.size(); ++f) {
    const FeatureUse& use = uses.exchanged[f];
    std::printf("%2zu %-31s %7.1f%% %8.2f%% %8.4f\n", f, kFluxionFeatureNames[f],
                100 * use.streaming_right, 100 * use.streaming_changed, use.budget_changed);
  }
  std::printf(
      "right: heads of which it is told rightly whether they stream. streaming: heads for which "
      "that\n"
      "changes. budget: mean change of the budget at blocks of 16 tokens.\n");
  return 0;
}

int Summary(absl::Span<const std::string> args) {
  std::vector<std::string> paths;
  std::string predictor_path, json_file;
  Flags flags(
      "sluice-profile fluxion summary",
      "Tells what samples say of a model: the budget at each size of block, of the heads that\n"
      "do not stream; how well the line of equation 1 follows it (R2 is 1 for budgets on a\n"
      "line); and the share of samples that stream. --json has the same by layer and query\n"
      "head, which tools/sluice plot-fluxion draws. With --predictor it has what a predictor\n"
      "says of streaming, too: take samples that it was not trained by.",
      "  sluice-profile fluxion summary m.samples\n"
      "  sluice-profile fluxion summary other.samples --predictor m.predictor --json summary.json\n"
      "  tools/sluice plot-fluxion --summary summary.json");
  flags.Rest("FILE", "files of samples", &paths);
  flags.Text("predictor", "FILE", "predictor that is asked which of the heads stream",
             &predictor_path);
  flags.File("json",
             "write the summary as JSON; without FILE, to standard output in place of the text",
             &json_file);
  if (const auto end = Parse(flags, "summary", args)) return *end;
  if (paths.empty()) {
    return Fail("summary", absl::InvalidArgumentError("name a file of samples (see --help)"), 2);
  }
  FluxionPredictor predictor;
  if (!predictor_path.empty()) {
    absl::StatusOr<FluxionPredictor> read = ReadFluxionPredictor(predictor_path);
    if (!read.ok()) return Fail("summary", read.status());
    predictor = *std::move(read);
  }
  const absl::StatusOr<FluxionSamples> samples = ReadAllSamples(paths);
  if (!samples.ok()) return Fail("summary", samples.status());
  const absl::StatusOr<SampleSummary> summary =
      SummarizeSamples(*samples, predictor_path.empty() ? nullptr : &predictor);
  if (!summary.ok()) return Fail("summary", summary.status());
  return Report(*summary, json_file);
}

}  // namespace sluice::fluxion
