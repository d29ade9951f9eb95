#include "src/profile/fluxion/command.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/bench/report/flags.h"
#include "src/profile/fluxion/command_parts.h"
#include "src/profile/fluxion/document_source.h"
#include "src/profile/fluxion/predictor_check.h"
#include "src/profile/fluxion/predictor_training.h"
#include "src/profile/fluxion/sample_file.h"
#include "src/profile/progress.h"

namespace sluice {
namespace {

using bench::Flags;
using fluxion::Fail;
using fluxion::Missing;
using fluxion::Parse;
using fluxion::ReadAllSamples;

constexpr char kUsage[] =
    "usage: sluice-profile fluxion collect|train|check|features|summary|figures [flags]\n"
    "\n"
    "Makes the predictor of policy fluxion, which tells how much of the cache outside HBM each\n"
    "query head needs.\n"
    "\n"
    "  collect  computes documents with full attention and writes samples: features of a head,\n"
    "           and the least budgets with which its attention keeps to --tau\n"
    "  train    trains a predictor by samples\n"
    "  check    compares predictors with simpler rules, on documents that were not collected\n"
    "  features tells what a predictor makes of each feature\n"
    "  summary  tells what samples say of a model: budgets by size of block, and which heads "
    "stream\n"
    "  figures  measures figures 3, 4, 10b and 11 of the paper: what a share of the scores is\n"
    "           worth, values of the sink, the normality of q k, and the effect of tau\n"
    "\n"
    "Each has a --help of its own.\n";

int Collect(absl::Span<const std::string> args) {
  fluxion::DocumentSource source;
  std::string out;
  Flags flags(
      "sluice-profile fluxion collect",
      "Computes documents with full attention. At every --anchor-stride tokens a prompt is\n"
      "taken to end, and --rows rows behind it are measured in every layer: the features\n"
      "of each query head, and the least budgets with which its attention keeps to --tau.",
      "  tools/sluice texts --tokenizer models/m --out texts.json\n"
      "  sluice-profile fluxion collect --model models/m --texts texts.json --out m.samples");
  source.AddFlags(flags);
  source.AddLevels(flags);
  flags.Text("out", "FILE", "file that the samples are written to", &out);
  if (const auto end = Parse(flags, "collect", args)) return *end;
  if (out.empty()) return Fail("collect", Missing("out", "name the file to write (see --help)"), 2);
  FluxionSamples samples;
  std::mutex mutex;
  const absl::StatusOr<std::string> fingerprint = source.Measure(
      [](const std::string&) { return absl::OkStatus(); },
      [&](const LayerRow& row) {
        const std::lock_guard lock(mutex);
        samples.samples.insert(samples.samples.end(), row.heads.begin(), row.heads.end());
      });
  if (!fingerprint.ok()) return Fail("collect", fingerprint.status());
  samples.model_fingerprint = *fingerprint;
  samples.tau = source.rows.tau;
  if (const absl::Status status = WriteFluxionSamples(samples, out); !status.ok()) {
    return Fail("collect", status);
  }
  int64_t streaming = 0;
  for (const FluxionSample& sample : samples.samples) streaming += sample.streaming ? 1 : 0;
  std::printf("%zu samples, of which %.1f %% stream\nwritten: %s\n", samples.samples.size(),
              100.0 * static_cast<double>(streaming) / static_cast<double>(samples.samples.size()),
              out.c_str());
  return 0;
}

int Train(absl::Span<const std::string> args) {
  std::vector<std::string> paths;
  std::string out, form = "four";
  PredictorTrainingOptions options;
  int64_t epochs = options.epochs, seed = static_cast<int64_t>(options.seed);
  Flags flags(
      "sluice-profile fluxion train",
      "Trains a predictor by samples of four of five documents, and keeps the weights that\n"
      "do best for the fifth.",
      "  sluice-profile fluxion train m.samples --out m.predictor\n"
      "  sluice-profile fluxion train a.samples b.samples --form line --out m.line");
  flags.Rest("FILE", "files of samples", &paths);
  flags.Text("out", "FILE", "file that the predictor is written to", &out);
  flags.Choice("form", {"line", "four"},
               "line: a budget for each block size lies on a line (the paper); four: each is "
               "predicted by itself",
               &form);
  flags.Number("quantile", "share of heads whose budget is to suffice", 0, 1, &options.quantile);
  flags.Number("false-streaming", "largest share of the heads that need a budget that may get none",
               0, 1, &options.false_streaming);
  flags.Integer("epochs", "times that the samples are seen", 1, 10'000, &epochs);
  flags.Integer("seed", "seed of the weights and of the order of samples", 0, INT64_MAX, &seed);
  if (const auto end = Parse(flags, "train", args)) return *end;
  if (out.empty()) return Fail("train", Missing("out", "name the file to write (see --help)"), 2);
  if (paths.empty()) {
    return Fail("train", absl::InvalidArgumentError("name a file of samples (see --help)"), 2);
  }
  const absl::StatusOr<FluxionSamples> samples = ReadAllSamples(paths);
  if (!samples.ok()) return Fail("train", samples.status());
  options.form = form == "line" ? FluxionPredictor::Form::kLine : FluxionPredictor::Form::kFour;
  options.epochs = static_cast<int>(epochs);
  options.seed = static_cast<uint64_t>(seed);
  options.tau = samples->tau;
  absl::StatusOr<PredictorTraining> trained;
  {
    Progress bar("epochs");
    trained = TrainFluxionPredictor(samples->samples, options,
                                    [&bar](int64_t done, int64_t all) { bar.Show(done, all); });
  }
  if (!trained.ok()) return Fail("train", trained.status());
  trained->predictor.model_fingerprint = samples->model_fingerprint;
  if (const absl::Status status = WriteFluxionPredictor(trained->predictor, out); !status.ok()) {
    return Fail("train", status);
  }
  std::printf(
      "%zu samples, %lld parameters; losses %.4f (training), %.4f (validation, epoch %d)\n"
      "streaming heads: %.1f %% told rightly; %.1f %% of the others would stream\nwritten: %s\n",
      samples->samples.size(), static_cast<long long>(trained->predictor.parameters()),
      trained->training_loss, trained->validation_loss, trained->best_epoch,
      100 * trained->streaming_accuracy, 100 * trained->false_streaming, out.c_str());
  return 0;
}

void PrintCheck(const PredictorCheck& check) {
  const SourceSums& fixed = check.sums()[0];
  const auto share = [](int64_t part, int64_t all) {
    return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
  };
  std::printf("%-22s %8s %8s %8s %9s %11s %10s %8s  %s\n", "", "bytes", "volume", "tasks",
              "digests", "violations", "streaming", "right", "blocks of 16, 32, 64, 128");
  for (size_t i = 0; i < check.sources().size(); ++i) {
    const SourceSums& of = check.sums()[i];
    std::printf("%-22s %7.3fx %7.3fx %7.1f%% %8.1f%% %10.2f%% %9.1f%% %7.1f%% ",
                check.sources()[i].name.c_str(), share(of.bytes(), fixed.bytes()),
                share(of.volume, fixed.volume), 100 * share(of.tasks, of.groups),
                100 * share(of.digests, of.bytes()), 100 * share(of.violations, of.heads),
                100 * share(of.streaming_told, of.heads),
                100 * share(of.streaming_right, of.heads));
    for (const int64_t tasks : of.levels) std::printf(" %4.0f%%", 100 * share(tasks, of.tasks));
    std::printf("\n");
  }
  std::printf(
      "\nbytes, volume: as shares of the first line's, which reads %.1f %% of what lies outside "
      "HBM.\nviolations: heads whose output is further off than tau. right: heads of which it is "
      "told\nrightly whether they stream; %.1f %% do.\n",
      100 * share(fixed.bytes(), check.cpu_tokens()),
      100 * share(fixed.streaming_needed, fixed.heads));
}

int Check(absl::Span<const std::string> args) {
  fluxion::DocumentSource source;
  std::vector<std::string> paths, samples_paths;
  std::string json_file;
  double fixed = 0.05, quantile = PredictorTrainingOptions().quantile;
  Flags flags("sluice-profile fluxion check",
              "Selects by predictors and by simpler rules on the same rows, and tells what each\n"
              "reads and how often a head's output is further off than --tau: a fixed block and\n"
              "budget; what the row needs (oracle) and what the anchor needed; what heads need at\n"
              "large, by samples; an error of 10 % of a head's own output; 95 % of its attention.\n"
              "Take documents that no sample was collected from. Groups read blocks of 16; with\n"
              "--all-levels each chooses its size of block by equation 3, as published.",
              "  sluice-profile fluxion check m.predictor --model models/m --texts other.json \\\n"
              "      --samples m.samples --json check.json");
  flags.Rest("FILE", "predictors", &paths);
  source.AddFlags(flags);
  source.AddLevels(flags);
  flags.Repeated("samples", "FILE", "file of samples, for the table of heads",
                 [&](const std::string& path) {
                   samples_paths.push_back(path);
                   return absl::OkStatus();
                 });
  flags.Number("fixed-share", "share of the cache outside HBM that the fixed budget takes", 0, 1,
               &fixed);
  flags.Number("quantile", "share of a head's samples whose budget its entry in the table suffices",
               0, 1, &quantile);
  flags.File("json",
             "write the comparison as JSON, which tools/sluice plot-fluxion draws; without FILE, "
             "to standard output in place of the table",
             &json_file);
  if (const auto end = Parse(flags, "check", args)) return *end;
  std::vector<FluxionPredictor> predictors;
  for (const std::string& path : paths) {
    absl::StatusOr<FluxionPredictor> read = ReadFluxionPredictor(path);
    if (!read.ok()) return Fail("check", read.status());
    predictors.push_back(*std::move(read));
  }
  const absl::StatusOr<FluxionSamples> samples = ReadAllSamples(samples_paths);
  if (!samples.ok()) return Fail("check", samples.status());
  const HeadTable table(samples->samples, quantile);
  std::vector<BudgetSource> sources = {FixedSource(0, fixed), OracleSource(), AnchorSource(),
                                       OwnOutputSource(0.1), ScoreSource(0.95)};
  if (!samples->samples.empty()) sources.push_back(TableSource(&table));
  for (size_t i = 0; i < predictors.size(); ++i) {
    sources.push_back(PredictorSource(paths[i].substr(paths[i].rfind('/') + 1), &predictors[i]));
  }
  for (BudgetSource& of : sources) {
    if (!source.rows.all_levels) of.level = 0;
  }
  PredictorCheck check(std::move(sources));
  const absl::StatusOr<std::string> measured = source.Measure(

      [&](const std::string& fingerprint) -> absl::Status {
        for (const FluxionPredictor& predictor : predictors) {
          SLUICE_RETURN_IF_ERROR(CheckFluxionPredictor(predictor, fingerprint));
        }
        if (samples->samples.empty() || samples->model_fingerprint == fingerprint) {
          return absl::OkStatus();
        }
        return absl::FailedPreconditionError(
            "--samples: the samples are of another model: collect some of this one");
      },
      [&](const LayerRow& row) { check.Add(row); });
  if (!measured.ok()) return Fail("check", measured.status());
  if (json_file != "-") PrintCheck(check);
  if (json_file.empty()) return 0;
  const absl::Status written =
      fluxion::WriteJson(CheckJson(check, *measured, source.rows.tau), json_file);
  return written.ok() ? 0 : Fail("check", written);
}

}  // namespace

int RunFluxionCommand(const std::vector<std::string>& args) {
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  const std::string command = args.empty() ? "" : args[0];
  const auto rest = absl::MakeConstSpan(args).subspan(args.empty() ? 0 : 1);
  if (command == "collect") return Collect(rest);
  if (command == "train") return Train(rest);
  if (command == "check") return Check(rest);
  if (command == "features") return fluxion::Features(rest);
  if (command == "summary") return fluxion::Summary(rest);
  if (command == "figures") return fluxion::Figures(rest);
  if (command == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  std::fprintf(stderr, "sluice-profile fluxion: %s (see --help)\n",
               command.empty()
                   ? "takes collect, train, check, features, summary or figures"
                   : absl::StrCat("there is no '", command,
                                  "': it takes collect, train, check, features, summary or figures")
                         .c_str());
  return 2;
}

}  // namespace sluice
