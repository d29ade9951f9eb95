// Contexts of models with latent caches, without computing them: a prefill of 128K tokens by 61
// layers of DeepSeek-V3.2's size takes minutes on one GPU, and of what it leaves behind a
// measurement needs the index keys alone.
//
// With the weights of latent_drift.h an index key follows from its token's embedding: no layer
// writes to the dimensions that it is made of. So a *twin* of the model computes the caches: the
// same hidden size, embedding, norms, kv_a and wk, layer by layer, and next to nothing of
// everything else (one head, a narrow dense FFN, no attention at all). Its index keys are those of
// the model but for rounding (each is normalised: tests/unit/bench/latent_drift_test.cc); its
// entries have the right form and size, and other values.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/latent_drift.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice::bench {

// The twin of the model that `model` loads from its directory. Errors: of Model::Load.
absl::StatusOr<std::unique_ptr<Model>> LoadTwin(const Model::Options& model,
                                                const LatentDrift& drift, Device* device);

// Computes the caches of contexts of up to `max_context` tokens with a model whose attention is
// left out. `twin` outlives the result.
absl::StatusOr<std::unique_ptr<ContextMaker>> NewTwinContextMaker(int max_context, Device* device,
                                                                  Model* twin);

}  // namespace sluice::bench
