// The command `sluice-profile fluxion figures`.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"
#include "src/profile/fluxion/command_parts.h"
#include "src/profile/fluxion/document_source.h"
#include "src/profile/fluxion/figures.h"
#include "src/profile/fluxion/tau_quality.h"
#include "src/profile/progress.h"

namespace sluice::fluxion {

namespace {

absl::Status MeasureQuality(const LoadedDocuments& loaded, int64_t steps, FluxionFigures* figures) {
  Progress bar("tau");
  std::vector<SourceQuality> quality;
  SLUICE_RETURN_IF_ERROR(MeasureSourceQuality(
      figures->sources(), steps, &loaded.held->device(), loaded.model.get(), loaded.documents,
      loaded.threads, [&bar](int64_t done, int64_t all) { bar.Show(done, all); }, &quality));
  figures->SetQuality(std::move(quality));
  return absl::OkStatus();
}

}  // namespace

int Figures(absl::Span<const std::string> args) {
  DocumentSource source;
  std::string json_file;
  int64_t steps = 0;
  bench::Flags flags(
      "sluice-profile fluxion figures",
      "Computes documents with full attention and measures on them what Fluxion's paper plots:\n"
      "  3a   how far attention is off that keeps a share of a head's scores: the fewest tokens\n"
      "       that hold it, of all tokens or beside the default set; the softmax is that of the\n"
      "       tokens kept, and the error is a share of the head's own output\n"
      "  3b,c lengths of values of the sink and of other tokens; the sink's share of the scores\n"
      "  4    budgets for 10 % of a head's own output, beside what that output amounts to\n"
      "  10b  what an oracle reads at each tau, and the error of a layer's output then; with "
      "--steps\n"
      "       what becomes of the model's next token, too, if all heads of all layers keep to tau\n"
      "  11   how normal q k is over the tokens outside HBM\n"
      "--tau is that of figure 4's other budgets (equation 2); figure 10b goes from 0.02 to 0.2.",
      "  sluice-profile fluxion figures --model models/m --texts texts.json --documents 2 \\\n"
      "      --anchor-stride 2400 --rows 2 --steps 32 --json figures.json\n"
      "  tools/sluice plot-fluxion --figures figures.json");
  source.AddFlags(flags);
  flags.Integer(
      "steps",
      "last tokens of each document that are computed once with full attention, once with "
      "a fixed budget and once for each tau; 0: none",
      0, kMostTauSteps, &steps);
  flags.File("json",
             "write the figures as JSON, which tools/sluice plot-fluxion draws; without FILE, to "
             "standard output in place of the text",
             &json_file);
  if (const auto end = Parse(flags, "figures", args)) return *end;
  FluxionFigures figures;
  const absl::StatusOr<LoadedDocuments> loaded =
      source.Load([](const std::string&) { return absl::OkStatus(); });
  if (!loaded.ok()) return Fail("figures", loaded.status());
  absl::Status measured = source.Measure(*loaded, [&](const LayerRow& row) { figures.Add(row); });
  if (measured.ok() && steps > 0) measured = MeasureQuality(*loaded, steps, &figures);
  if (!measured.ok()) return Fail("figures", measured);
  if (json_file != "-") std::fputs(figures.Text().c_str(), stdout);
  if (json_file.empty()) return 0;
  const absl::Status written =
      WriteJson(figures.Json(loaded->model->fingerprint(), source.rows.tau), json_file);
  return written.ok() ? 0 : Fail("figures", written);
}

}  // namespace sluice::fluxion
