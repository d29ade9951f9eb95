// Loads what multi-token prediction has beside a decoder layer.
#include "src/model/draft_layer.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "src/base/status_macros.h"
#include "src/model/parallel.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

// Returns columns [begin, begin + hidden) of eh_proj, which is [hidden][2 * hidden]: a product with
// one half takes normed activations as they are, where the whole would want two of them side by
// side.
absl::StatusOr<Weight> HalfOf(WeightLoader& loader, const MatrixView& both, int64_t begin) {
  const int64_t hidden = both.rows();
  const auto count = static_cast<size_t>(hidden * hidden);
  const auto half = std::make_unique_for_overwrite<float[]>(count);
  if (loader.has_values()) {
    ParallelFor(hidden, [&](int64_t row) {
      std::vector<float> values(static_cast<size_t>(2 * hidden));
      both.FloatRow(row, values.data());
      std::copy_n(values.begin() + begin, hidden, half.get() + row * hidden);
    });
  }
  return loader.Made({half.get(), count}, static_cast<int>(hidden), /*bf16=*/true);
}

}  // namespace

absl::StatusOr<DraftWeights> LoadDraftWeights(WeightLoader& loader, const ModelConfig& config) {
  const int hidden = config.hidden_size;
  const auto name = [&](const char* suffix) { return LayerTensor(config.layers, suffix); };
  DraftWeights w;
  SLUICE_ASSIGN_OR_RETURN(w.token_norm, loader.Vectors({{name(kDraftTokenNorm), hidden}}));
  SLUICE_ASSIGN_OR_RETURN(w.hidden_norm, loader.Vectors({{name(kDraftHiddenNorm), hidden}}));
  SLUICE_ASSIGN_OR_RETURN(w.head_norm, loader.Vectors({{name(kDraftHeadNorm), hidden}}));
  SLUICE_ASSIGN_OR_RETURN(w.head, loader.Matrix({{name(kDraftHead), config.vocab_size}}, hidden));
  SLUICE_ASSIGN_OR_RETURN(MatrixView both, loader.Host(name(kDraftProjection), hidden, 2 * hidden));
  SLUICE_ASSIGN_OR_RETURN(w.from_token, HalfOf(loader, both, 0));
  SLUICE_ASSIGN_OR_RETURN(w.from_hidden, HalfOf(loader, both, hidden));
  loader.Release(std::move(both));
  return w;
}

}  // namespace sluice
