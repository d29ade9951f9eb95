#include "src/model/latent_model.h"

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/model/decoder_model.h"
#include "src/model/draft_layer.h"
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
        load_draft_(options.draft_layer != Options::DraftLayer::kNone),
        attention_(config_, options.kv_dtype, ops_),
        experts_(config_, options, ops_) {}

  void Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) override {
    LatentAttention* const attention = policy.latent_attention();
    SLUICE_CHECK(attention != nullptr, policy.name(), " attends to latent caches");
    Begin(stream, in);
    if (in.halves) {
      RunHalves(stream, in, *attention);
    } else {
      for (int layer = 0; layer < config_.layers; ++layer) {
        RunLayer(stream, layers_[static_cast<size_t>(layer)], layer, IsDense(layer), in,
                 *attention);
      }
    }
    Logits(stream, in);
    policy.EndStep(stream);
  }

  bool drafts() const override { return draft_.has_value(); }

  void Draft(Stream& stream, const DraftInputs& in, LatentAttention& attention) override {
    SLUICE_CHECK(draft_.has_value() && in.rows <= max_rows_ && in.logit_count <= max_logits_);
    const DraftWeights& w = draft_->weights;
    HiddenInput(stream, in);
    Embed(stream, in.tokens + 1, in.token_stride, in.token_slots, in.positions, in.rows,
          hidden_.as<float>());
    kernels_.RmsNorm(stream, NormOf(hidden_.as<float>(), w.token_norm, normed_.data(), in.rows));
    ops_.Product(stream, normed_.data(), w.from_token, {}, residual_.as<float>(), in.rows,
                 in.decode_rows, /*accumulate=*/true);
    RopeAngles(stream, in.positions, in.rows);
    StepInputs rows;
    rows.slots = in.slots;
    rows.positions = in.positions;
    rows.rows = in.rows;
    rows.decode_rows = in.decode_rows;
    RunLayer(stream, draft_->layer, /*number=*/0, /*dense=*/false, rows, attention);
    LogitsOf(stream, w.head_norm, w.head, in.logit_rows, in.logit_count, in.logits);
  }

  std::string expert_digest() const override { return experts_.divided() ? experts_.Digest() : ""; }

  absl::StatusOr<ExpertLoad> CountedExpertLoad() const override {
    ExpertLoad load(layers_.size());
    const std::unique_ptr<Stream> stream = device_->NewStream(Device::StreamKind::kCopy);
    const std::unique_ptr<Event> done = device_->NewEvent();
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Buffer& counts = layers_[i].experts.load;
      load[i].resize(counts.bytes() / sizeof(int64_t));
      if (load[i].empty()) continue;
      stream->Copy(load[i].data(), counts.data(), counts.bytes());
    }
    stream->Record(*done);
    done->Wait();
    SLUICE_RETURN_IF_ERROR(device_->Health());
    return load;
  }

 private:
  // The next-token layer, with the weights that it alone has.
  struct DraftLayer {
    DraftWeights weights;
    Layer layer;
  };

  // Enqueues attention of some of a step's rows, and the norm behind it.
  void Attend(Stream& stream, const Layer& w, int number, const StepInputs& in, RowRange rows,
              LatentAttention& attention) {
    void* const normed = Normed(rows);
    kernels_.RmsNorm(stream, NormOf(Residual(rows), w.input_norm, normed, rows.count));
    attention_.Run(stream, number, w.attention, in, rows, normed_.data(), CosSin(0),
                   residual_.as<float>(), attention);
    kernels_.RmsNorm(stream, NormOf(Residual(rows), w.post_attention_norm, normed, rows.count));
  }

  // Enqueues a layer of the rows' residual. Its caches are those of layer `number` of `attention`.
  void RunLayer(Stream& stream, const Layer& w, int number, bool dense, const StepInputs& in,
                LatentAttention& attention) {
    const RowRange all{0, in.rows, in.decode_rows};
    Attend(stream, w, number, in, all, attention);
    // The choice of experts is made by short kernels that wait for one another, and rows travel to
    // other ranks. Both run beside the products of the shared experts, which need neither.
    Stream& choice = stream.Branch(AttentionPolicy::kAheadBranch);
    if (!dense) {
      choice.After(stream);
      experts_.Choose(choice, w.experts, in, all, normed_.data());
      if (experts_.divided()) {
        experts_.Pack(choice, w.experts, 0, in, all, normed_.data(), residual_.as<float>());
        experts_.exchange(0).Dispatch(choice);
      }
    }
    const int inner = FfnSize(dense);
    if (inner > 0) RunFfn(stream, w.ffn, normed_.data(), inner, all);
    if (dense) return;
    stream.After(choice);
    if (!experts_.divided()) {
      return experts_.Run(stream, w.experts, in, normed_.data(), Residual(all));
    }
    experts_.Work(stream, w.experts, 0);
    experts_.exchange(0).Return(stream);
    experts_.exchange(0).Add(stream);
  }

  // Enqueues all layers of a step of decode rows in two halves. What a half sends to other ranks,
  // or gets back, travels on a branch while the other half computes: its attention, or its experts.
  // A rank with one row has nothing in the second half, and takes part in its exchanges.
  void RunHalves(Stream& stream, const StepInputs& in, LatentAttention& attention) {
    SLUICE_CHECK(experts_.divided() && in.rows == in.decode_rows);
    const int32_t first = (in.rows + 1) / 2, second = in.rows - first;
    const std::array<RowRange, 2> halves = {RowRange{0, first, first}, {first, second, second}};
    Stream& link = stream.Branch(AttentionPolicy::kExchangeBranch);
    // An exchange begins behind all that is enqueued by now. What is enqueued later waits for the
    // exchange before it alone.
    const auto exchange = [&](auto enqueue) {
      link.After(stream);
      stream.After(link);
      enqueue();
    };
    for (int i = 0; i < config_.layers; ++i) {
      const Layer& w = layers_[static_cast<size_t>(i)];
      for (const int half : {0, 1}) {
        const RowRange rows = halves[static_cast<size_t>(half)];
        if (i > latent_.dense_layers) experts_.exchange(half).Add(stream);  // of the layer before
        if (rows.count > 0) Attend(stream, w, i, in, rows, attention);
        if (!IsDense(i)) {
          if (rows.count > 0) experts_.Choose(stream, w.experts, in, rows, normed_.data());
          experts_.Pack(stream, w.experts, half, in, rows, normed_.data(), residual_.as<float>());
          exchange([&] { experts_.exchange(half).Dispatch(link); });
        }
        const int inner = FfnSize(IsDense(i));
        if (inner > 0 && rows.count > 0) RunFfn(stream, w.ffn, Normed(rows), inner, rows);
      }
      if (IsDense(i)) continue;
      for (const int half : {0, 1}) {
        experts_.Work(stream, w.experts, half);
        exchange([&] { experts_.exchange(half).Return(link); });
      }
    }
    stream.After(link);
    for (const int half : {0, 1}) experts_.exchange(half).Add(stream);
  }

  // Enqueues residual = from_hidden(hnorm(hidden state)) for all rows of a draft.
  void HiddenInput(Stream& stream, const DraftInputs& in) {
    const DraftWeights& w = draft_->weights;
    kernels::RmsNormParams norm =
        NormOf(residual_.as<float>(), w.hidden_norm, normed_.data(), in.rows);
    if (in.previous == nullptr) {
      kernels::RmsNormParams last =
          NormOf(residual_.as<float>(), final_norm(), hidden_.data(), in.rows);
      last.out_type = DType::kFloat32;
      kernels_.RmsNorm(stream, last);
      norm.x = hidden_.as<float>();
    } else {
      norm.row_index = in.previous;
    }
    kernels_.RmsNorm(stream, norm);
    ops_.Product(stream, normed_.data(), w.from_hidden, {}, residual_.as<float>(), in.rows,
                 in.decode_rows, /*accumulate=*/false);
  }

  void* Normed(RowRange rows) const {
    return ops_.Activation(normed_, rows.begin, config_.hidden_size);
  }
  bool IsDense(int layer) const { return layer < latent_.dense_layers; }
  // Returns the width of a dense layer's FFN, or of the shared experts; 0 if there are none.
  int FfnSize(bool dense) const {
    return dense ? config_.intermediate_size : latent_.experts.shared_size();
  }

  absl::Status LoadLayers(WeightLoader& loader) override {
    for (int i = 0; i < config_.layers; ++i) {
      SLUICE_ASSIGN_OR_RETURN(layers_.emplace_back(), LoadLayer(loader, i, /*indexer=*/true));
    }
    if (!load_draft_) return absl::OkStatus();
    draft_.emplace();
    SLUICE_ASSIGN_OR_RETURN(draft_->weights, LoadDraftWeights(loader, config_));
    SLUICE_ASSIGN_OR_RETURN(draft_->layer, LoadLayer(loader, config_.layers, /*indexer=*/false));
    return absl::OkStatus();
  }

  absl::StatusOr<Layer> LoadLayer(WeightLoader& loader, int i, bool indexer) {
    const auto norm = [&](const char* suffix) {
      return loader.Vectors({{LayerTensor(i, suffix), config_.hidden_size}});
    };
    Layer layer;
    SLUICE_ASSIGN_OR_RETURN(layer.input_norm, norm("input_layernorm.weight"));
    SLUICE_ASSIGN_OR_RETURN(layer.post_attention_norm, norm("post_attention_layernorm.weight"));
    SLUICE_ASSIGN_OR_RETURN(layer.attention, attention_.Load(loader, i, indexer));
    const int inner = FfnSize(IsDense(i));
    if (inner > 0) {
      const std::string prefix = LayerTensor(i, IsDense(i) ? "mlp" : "mlp.shared_experts");
      SLUICE_ASSIGN_OR_RETURN(layer.ffn, LoadFfn(loader, prefix, inner, /*bias=*/false));
    }
    if (!IsDense(i)) {
      SLUICE_ASSIGN_OR_RETURN(layer.experts, experts_.Load(loader, i));
    }
    return layer;
  }

  absl::Status AllocateLayers(Workspace& workspace) override {
    SLUICE_RETURN_IF_ERROR(attention_.Allocate(workspace, max_rows_));
    if (draft_.has_value()) {
      SLUICE_RETURN_IF_ERROR(workspace.Allocate(
          &hidden_, max_rows_, int64_t{config_.hidden_size} * 4, "hidden states to draft from"));
    } else if (latent_.dense_layers == config_.layers) {
      return absl::OkStatus();
    }
    return experts_.Allocate(workspace, max_rows_);
  }

  const LatentConfig& latent_;
  const bool load_draft_;
  LatentAttentionStage attention_;
  ExpertStage experts_;
  std::vector<Layer> layers_;
  std::optional<DraftLayer> draft_;  // with load_draft_
  Buffer hidden_;                    // float32 [rows][hidden], to draft from
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
