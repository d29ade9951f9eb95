#include "src/profile/fluxion/document_source.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/policies/quality.h"
#include "src/device/cpu/cpu_device.h"
#include "src/profile/fluxion/command_parts.h"
#include "src/profile/progress.h"

namespace sluice::fluxion {

void DocumentSource::AddFlags(bench::Flags& flags) {
  flags.Text("model", "DIR", "Hugging Face directory", &model);
  flags.Text("traffic", "FILE",
             "documents, one a line: token ids, or JSON with \"prompt_token_ids\"", &traffic);
  flags.Text("texts", "FILE", "documents that tools/sluice texts wrote, in place of --traffic",
             &texts);
  flags.Integer("first-document", "number of the first document of the file to take, from 1", 1,
                1 << 30, &first);
  flags.Integer("documents", "maximum number of documents", 1, 1 << 30, &most);
  flags.Integer("anchor-stride", "tokens between the positions where a prompt is taken to end", 1,
                1 << 20, &rows.anchor_stride);
  flags.Integer("rows", "rows that are measured behind each of them", 1, 4096, &rows.rows);
  flags.Integer("distance", "tokens from there to the farthest row", 1, 1 << 20, &rows.distance);
  flags.Number("tau",
               "error of a head's output, as a share of the layer's largest, that is "
               "allowed",
               0, 1, &rows.tau);
  flags.Choice("device", {"cpu", "cuda"}, "device that computes the documents", &device);
  flags.Text("kernels", "NAME", "CPU kernels, as in sluice-server", &kernels);
  flags.Integer("threads", "threads that compute; 0: as the server chooses", 0, 1024, &threads);
}

void DocumentSource::AddLevels(bench::Flags& flags) {
  flags.Switch("all-levels",
               "digests have four vectors, as in the published form, where all sizes of block "
               "have digests, in place of five",
               &rows.all_levels);
}

absl::StatusOr<std::vector<Prompt>> DocumentSource::Documents(int64_t vocab) const {
  if (traffic.empty() == texts.empty()) {
    return absl::InvalidArgumentError("give documents by --traffic or by --texts (see --help)");
  }
  std::vector<Prompt> all;
  if (!traffic.empty()) {
    SLUICE_ASSIGN_OR_RETURN(all, ReadTraffic(traffic, vocab));
  } else {
    SLUICE_ASSIGN_OR_RETURN(bench::QualityTexts read,
                            bench::ReadQualityTexts(texts, static_cast<int>(vocab)));
    for (auto& text : read.texts) all.push_back(std::move(text.ids));
  }
  if (first > std::ssize(all)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--first-document ", first, ": the file has ", all.size(), " documents"));
  }
  all.erase(all.begin(), all.begin() + first - 1);
  if (most < std::ssize(all)) all.resize(static_cast<size_t>(most));
  return all;
}

absl::StatusOr<LoadedDocuments> DocumentSource::Load(
    const std::function<absl::Status(const std::string&)>& check) const {
  if (model.empty()) return Missing("model", "name the model's directory (see --help)");
  LoadedDocuments out;
  out.threads = threads > 0 ? static_cast<int>(threads) : DefaultThreads();
  SLUICE_ASSIGN_OR_RETURN(out.held, bench::BenchDevice::Create({device, kernels, out.threads}));
  Model::Options load;
  load.directory = model;
  load.max_rows = 512;
  load.max_logits = 1;
  SLUICE_ASSIGN_OR_RETURN(out.model, Model::Load(load, &out.held->device()));
  if (out.model->config().latent.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(out.model->config().architecture,
                     " has latent caches, and policy fluxion is for keys and values of heads"));
  }
  SLUICE_RETURN_IF_ERROR(check(out.model->fingerprint()));
  SLUICE_ASSIGN_OR_RETURN(out.documents, Documents(out.model->config().vocab_size));
  for (const Prompt& document : out.documents) {
    if (std::ssize(document) <= out.model->max_context()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a document has ", document.size(), " tokens, and the model has a context of ",
                     out.model->max_context(), ": take shorter ones"));
  }
  return out;
}

absl::Status DocumentSource::Measure(const LoadedDocuments& loaded,
                                     const std::function<void(const LayerRow&)>& visit) const {
  Progress bar("documents");
  return MeasureDocuments(
      rows, &loaded.held->device(), loaded.model.get(), loaded.documents,
      static_cast<int32_t>(first), loaded.threads,
      [&bar](int64_t done, int64_t all) { bar.Show(done, all); }, visit);
}

absl::StatusOr<std::string> DocumentSource::Measure(
    const std::function<absl::Status(const std::string&)>& check,
    const std::function<void(const LayerRow&)>& visit) const {
  SLUICE_ASSIGN_OR_RETURN(const LoadedDocuments loaded, Load(check));
  SLUICE_RETURN_IF_ERROR(Measure(loaded, visit));
  return loaded.model->fingerprint();
}

}  // namespace sluice::fluxion
