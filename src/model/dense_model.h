// Llama, Qwen2 and Qwen3: dense decoder layers with grouped-query attention.
#pragma once

#include <memory>
#include <string>

#include "src/model/model.h"
#include "src/model/weight_source.h"

namespace sluice {

// Returns the cache layout of such a model: one kind, "kv".
CacheLayout DenseCacheLayout(const ModelConfig& config, DType kv_dtype, int block_tokens);

// Makes the model. Takes the weights out of `source` into the form of the device's kernels.
absl::StatusOr<std::unique_ptr<Model>> NewDenseModel(const Model::Options& options,
                                                     const ModelConfig& config,
                                                     std::string fingerprint,
                                                     std::unique_ptr<WeightSource> source,
                                                     Device* device);

}  // namespace sluice
