#include "src/model/latent_model.h"

#include <vector>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/model/decoder_model.h"
#include "src/model/expert_stage.h"
#include "src/model/latent_attention_stage.h"
#include "src/model/latent_caches.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

struct Layer {
  DeviceVector input_norm, post_attention_norm;
  LatentAttentionWeights attention;
  DenseFfn ffn;           // the layer's own, or the shared experts'
  ExpertWeights experts;  // unused in dense layers
};

class LatentModel : public DecoderModel {
 public:
  LatentModel(const Options& options, const ModelConfig& config, CacheLayout layout,
              std::string fingerprint, std::unique_ptr<WeightSource> source, Device* device)
      : DecoderModel(options, config, std::move(layout), config.latent->rope_dim,
                     std::move(fingerprint), std::move(source), device),
        latent_(*config_.latent),
        attention_(config_, options.kv_dtype, ops_),
        experts_(config_, ops_) {}

  void Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) override {
    LatentAttention* const attention = policy.latent_attention();
    SLUICE_CHECK(attention != nullptr, policy.name(), " attends to latent caches");
    Begin(stream, in);
    const RowRange all{0, in.rows, in.decode_rows};
    for (int layer = 0; layer < config_.layers; ++layer) {
      const Layer& w = layers_[static_cast<size_t>(layer)];
      kernels_.RmsNorm(stream, NormOf(Residual(all), w.input_norm, normed_.data(), in.rows));
      attention_.Run(stream, layer, w.attention, in, normed_.data(), CosSin(0), Residual(all),
                     *attention);
      kernels_.RmsNorm(stream,
                       NormOf(Residual(all), w.post_attention_norm, normed_.data(), in.rows));
      // The choice of experts is made by short kernels that wait for one another. It runs beside
      // the products of the shared experts, which do not need it.
      Stream& choice = stream.Branch(AttentionPolicy::kAheadBranch);
      if (!IsDense(layer)) {
        choice.After(stream);
        experts_.Choose(choice, w.experts, in, normed_.data());
      }
      if (FfnSize(layer) > 0) RunFfn(stream, w.ffn, normed_.data(), FfnSize(layer), all);
      if (IsDense(layer)) continue;
      stream.After(choice);
      experts_.Run(stream, w.experts, in, normed_.data(), Residual(all));
    }
    Logits(stream, in);
    policy.EndStep(stream);
  }

 private:
  bool IsDense(int layer) const { return layer < latent_.dense_layers; }
  // Returns the width of a layer's dense FFN, or of its shared experts; 0 if there are none.
  int FfnSize(int layer) const {
    return IsDense(layer) ? config_.intermediate_size : latent_.experts.shared_size();
  }

  absl::Status LoadLayers(WeightLoader& loader) override {
    for (int i = 0; i < config_.layers; ++i) {
      const auto norm = [&](const char* suffix) {
        return loader.Vectors({{LayerTensor(i, suffix), config_.hidden_size}});
      };
      Layer layer;
      SLUICE_ASSIGN_OR_RETURN(layer.input_norm, norm("input_layernorm.weight"));
      SLUICE_ASSIGN_OR_RETURN(layer.post_attention_norm, norm("post_attention_layernorm.weight"));
      SLUICE_ASSIGN_OR_RETURN(layer.attention, attention_.Load(loader, i));
      if (FfnSize(i) > 0) {
        const std::string prefix = LayerTensor(i, IsDense(i) ? "mlp" : "mlp.shared_experts");
        SLUICE_ASSIGN_OR_RETURN(layer.ffn, LoadFfn(loader, prefix, FfnSize(i), /*bias=*/false));
      }
      if (!IsDense(i)) {
        SLUICE_ASSIGN_OR_RETURN(layer.experts, experts_.Load(loader, i));
      }
      layers_.push_back(std::move(layer));
    }
    return absl::OkStatus();
  }

  absl::Status AllocateLayers(Workspace& workspace) override {
    SLUICE_RETURN_IF_ERROR(attention_.Allocate(workspace, max_rows_));
    if (latent_.dense_layers == config_.layers) return absl::OkStatus();
    return experts_.Allocate(workspace, max_rows_);
  }

  const LatentConfig& latent_;
  LatentAttentionStage attention_;
  ExpertStage experts_;
  std::vector<Layer> layers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> NewLatentModel(const Model::Options& options,
                                                      const ModelConfig& config,
                                                      std::string fingerprint,
                                                      std::unique_ptr<WeightSource> source,
                                                      Device* device) {
  SLUICE_ASSIGN_OR_RETURN(CacheLayout layout,
                          LatentCacheLayout(config, options.kv_dtype, options.block_tokens));
  // Its attention has no heads of the kind that head_dim limits.
  SLUICE_RETURN_IF_ERROR(device->kernels().Check({.hidden_size = config.hidden_size,
                                                  .vocab_size = config.vocab_size,
                                                  .block_tokens = options.block_tokens}));
  auto model = std::make_unique<LatentModel>(options, config, std::move(layout),
                                             std::move(fingerprint), std::move(source), device);
  SLUICE_RETURN_IF_ERROR(model->Initialise());
  return model;
}

}  // namespace sluice
