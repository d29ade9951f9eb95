#include "src/model/model.h"

#include "src/base/status_macros.h"
#include "src/model/dense_model.h"
#include "src/model/fingerprint.h"
#include "src/model/latent_caches.h"
#include "src/model/latent_model.h"
#include "src/model/shard.h"
#include "src/model/tensor_list.h"
#include "src/model/weight_source.h"

namespace sluice {

absl::StatusOr<CacheLayout> CacheLayoutOf(const ModelConfig& config, DType kv_dtype,
                                          int block_tokens) {
  if (config.latent.has_value()) return LatentCacheLayout(config, kv_dtype, block_tokens);
  if (kv_dtype == DType::kFloat8E4M3) {
    return absl::InvalidArgumentError(absl::StrCat("kv_dtype: fp8 is a form of latent caches, and ",
                                                   config.name, " (", config.architecture,
                                                   ") has keys and values: use bf16"));
  }
  return DenseCacheLayout(config, kv_dtype, block_tokens);
}

absl::Status CheckKeysAndValues(const ModelConfig& config, const std::string& program) {
  if (!config.latent.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model: ", program, " is for models with keys and values of heads, and ",
                   config.name, " (", config.architecture, ") has latent caches"));
}

namespace {

// Returns whether the draft layer is to be loaded.
absl::StatusOr<bool> LoadsDraftLayer(Model::Options::DraftLayer wanted, const ModelConfig& config,
                                     const WeightSource& source) {
  using DraftLayer = Model::Options::DraftLayer;
  if (wanted == DraftLayer::kNone) return false;
  absl::Status status;
  if (!HasDraftLayer(config)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "speculation: mtp needs a model with a next-token layer (num_nextn_predict_layers of "
        "config.json), and ",
        config.name, " (", config.architecture, ") has none: set it to ngram or none"));
  } else if (status = source.CheckTensors(DraftTensors(config)); !status.ok()) {
    status = absl::InvalidArgumentError(
        absl::StrCat("speculation: mtp needs the tensors of the next-token layer, ",
                     LayerTensor(config.layers, "*"), ": ", status.message(),
                     "; add them to the checkpoint, or set speculation to ngram or none"));
  }
  if (status.ok()) return true;
  if (wanted == DraftLayer::kIfThere) return false;
  return status;
}

}  // namespace

void Model::Draft(Stream&, const DraftInputs&, LatentAttention&) {
  SLUICE_CHECK(drafts(), "the model has no draft layer");
}

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const Options& options, Device* device) {
  SLUICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.directory));
  if (options.max_context > config.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_context: the model's max_position_embeddings is ",
                     config.max_position_embeddings, ", found ", options.max_context));
  }
  SLUICE_RETURN_IF_ERROR(CacheLayoutOf(config, options.kv_dtype, options.block_tokens).status());
  if (options.expert_parallel > 1 || options.expert_redundancy > 0) {
    SLUICE_CHECK(options.tensor_parallel == 1, "a model is divided in one way");
    SLUICE_RETURN_IF_ERROR(
        ExpertShardOf(config, options.rank, options.expert_parallel, options.expert_redundancy)
            .status());
  } else {
    SLUICE_RETURN_IF_ERROR(ShardOf(config, options.rank, options.tensor_parallel).status());
  }
  std::unique_ptr<WeightSource> source;
  if (options.weights != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(source, options.weights(config));
  } else if (options.load_format == "dummy") {
    source = DummyWeights(config);
  } else {
    SLUICE_ASSIGN_OR_RETURN(source, OpenCheckpoint(options.directory, config));
  }
  SLUICE_RETURN_IF_ERROR(source->CheckNoLeftovers());
  SLUICE_ASSIGN_OR_RETURN(std::string fingerprint, Fingerprint(config, *source));
  SLUICE_ASSIGN_OR_RETURN(const bool drafts, LoadsDraftLayer(options.draft_layer, config, *source));
  Options resolved = options;
  resolved.draft_layer = drafts ? Options::DraftLayer::kRequired : Options::DraftLayer::kNone;
  return (config.latent.has_value() ? NewLatentModel : NewDenseModel)(
      resolved, config, std::move(fingerprint), std::move(source), device);
}

}  // namespace sluice
