// The weights of a layer that drafts: what multi-token prediction has beside a decoder layer
// (DeepSeek-V3, arXiv 2412.19437, section 2.2). Internal to src/model.
#pragma once

#include "absl/status/statusor.h"
#include "src/model/model_config.h"
#include "src/model/weight_loader.h"

namespace sluice {

// The layer's input is eh_proj(concat(enorm(embedding of the next token), hnorm(hidden state))),
// and its drafts are the argmax of head(norm(its output)).
struct DraftWeights {
  DeviceVector token_norm, hidden_norm;  // enorm, hnorm
  // The halves of eh_proj, each [hidden][hidden].
  Weight from_token, from_hidden;
  DeviceVector head_norm;
  Weight head;  // [vocabulary][hidden]
};

// Loads the weights of layer `config.layers`, apart from its decoder layer's.
absl::StatusOr<DraftWeights> LoadDraftWeights(WeightLoader& loader, const ModelConfig& config);

}  // namespace sluice
