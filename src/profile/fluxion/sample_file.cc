#include "src/profile/fluxion/sample_file.h"

#include <cstring>
#include <iterator>

#include "src/base/checked_file.h"
#include "src/base/config_reader.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Versions 1 to 3 had budgets by other digests.
constexpr CheckedFormat kFormat = {
    "sluice-fluxion-samples",    4,
    "a file of samples",         "sluice-profile fluxion collect wrote",
    "collect the samples again", int64_t{16} << 30};

// A sample in the file: features, budgets, whether it streams, and its document, as float32.
constexpr size_t kNumbers = kernels::kFluxionFeatures + 5 + 2;

}  // namespace

absl::Status WriteFluxionSamples(const FluxionSamples& samples, const std::string& path) {
  std::vector<float> numbers;
  numbers.reserve(samples.samples.size() * kNumbers);
  for (const FluxionSample& sample : samples.samples) {
    numbers.insert(numbers.end(), sample.features.begin(), sample.features.end());
    numbers.insert(numbers.end(), sample.budgets.begin(), sample.budgets.end());
    numbers.push_back(sample.streaming ? 1 : 0);
    numbers.push_back(static_cast<float>(sample.document));
  }
  const std::string payload(reinterpret_cast<const char*>(numbers.data()),
                            numbers.size() * sizeof(float));
  return WriteCheckedFile(kFormat,
                          {{"model_fingerprint", samples.model_fingerprint},
                           {"tau", samples.tau},
                           {"samples", samples.samples.size()}},
                          payload, path);
}

absl::StatusOr<FluxionSamples> ReadFluxionSamples(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const CheckedFile file, ReadCheckedFile(kFormat, path));
  const ConfigReader reader(path, file.header);
  FluxionSamples out;
  SLUICE_ASSIGN_OR_RETURN(out.model_fingerprint, reader.StringOr("model_fingerprint", ""));
  SLUICE_ASSIGN_OR_RETURN(out.tau, reader.Number("tau", 0, 1));
  SLUICE_ASSIGN_OR_RETURN(const int64_t count, reader.Int("samples", 0, int64_t{1} << 40));
  SLUICE_RETURN_IF_ERROR(CheckWhole(
      kFormat, file, count * static_cast<int64_t>(kNumbers * sizeof(float)), "samples", "samples"));
  out.samples.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < out.samples.size(); ++i) {
    float numbers[kNumbers];
    std::memcpy(numbers, file.payload.data() + i * sizeof(numbers), sizeof(numbers));
    FluxionSample& sample = out.samples[i];
    std::copy_n(numbers, sample.features.size(), sample.features.begin());
    std::copy_n(numbers + sample.features.size(), sample.budgets.size(), sample.budgets.begin());
    sample.streaming = numbers[kNumbers - 2] != 0;
    sample.document = static_cast<int32_t>(numbers[kNumbers - 1]);
  }
  return out;
}

}  // namespace sluice
