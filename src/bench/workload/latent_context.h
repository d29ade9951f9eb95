// Contexts for models with latent caches, without a full prefill. A prefill of 128K tokens through
// 61 layers of DeepSeek-V3.2's size takes minutes on one GPU, and a measurement needs only the
// index keys of its result.
//
// With the weights of latent_drift.h an index key follows from its token's embedding: no layer
// writes to the dimensions that the key is made of. So a *twin* of the model computes the caches:
// it has the same hidden size, embedding, norms, kv_a and wk in every layer, and next to nothing of
// everything else (one head, a narrow dense FFN, no attention at all). Its index keys equal those
// of the model except for rounding (each key is normalised: tests/unit/bench/latent_drift_test.cc).
// Its latent entries have the right form and size, but other values.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/latent_drift.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice::bench {

// Loads the twin of the model that `model` describes. Returns the errors of Model::Load.
absl::StatusOr<std::unique_ptr<Model>> LoadTwin(const Model::Options& model,
                                                const LatentDrift& drift, Device* device);

// Returns a maker that computes the caches of contexts of up to `max_context` tokens with a model
// whose attention is left out. REQUIRES: `twin` outlives the result.
absl::StatusOr<std::unique_ptr<ContextMaker>> NewTwinContextMaker(int max_context, Device* device,
                                                                  Model* twin);

}  // namespace sluice::bench
