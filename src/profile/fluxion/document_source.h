// The documents of a command of `sluice-profile fluxion`, and the model that computes them, as
// flags name them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/report/flags.h"
#include "src/model/model.h"
#include "src/profile/fluxion/document_rows.h"
#include "src/profile/traffic.h"

namespace sluice::fluxion {

// A model on its device, and the documents that it computes.
struct LoadedDocuments {
  std::unique_ptr<bench::BenchDevice> held;
  std::unique_ptr<Model> model;
  std::vector<Prompt> documents;
  int threads = 1;
};

struct DocumentSource {
  std::string model, traffic, texts, device = "cpu", kernels = "auto";
  int64_t threads = 0, first = 1, most = 1'000'000;
  DocumentRowsOptions rows;

  void AddFlags(bench::Flags& flags);
  // Adds --all-levels, for commands that can measure digests of the published form.
  void AddLevels(bench::Flags& flags);

  // Loads the model and the documents; `check` gets the model's fingerprint before the documents
  // are read. INVALID_ARGUMENT: a flag, the file of documents or the model does not do; the message
  // says what to change.
  absl::StatusOr<LoadedDocuments> Load(
      const std::function<absl::Status(const std::string&)>& check) const;
  // Measures the documents' rows with a progress bar. `visit` is that of MeasureDocuments.
  absl::Status Measure(const LoadedDocuments& loaded,
                       const std::function<void(const LayerRow&)>& visit) const;
  // Does both and returns the model's fingerprint.
  absl::StatusOr<std::string> Measure(const std::function<absl::Status(const std::string&)>& check,
                                      const std::function<void(const LayerRow&)>& visit) const;

 private:
  absl::StatusOr<std::vector<Prompt>> Documents(int64_t vocab) const;
};

}  // namespace sluice::fluxion
