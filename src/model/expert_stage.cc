#include "src/model/expert_stage.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model/tensor_list.h"

namespace sluice {

ExpertStage::ExpertStage(const ModelConfig& config, const LayerOperators& ops)
    : config_(config), experts_(config.latent->experts), ops_(ops) {}

absl::StatusOr<ExpertWeights> ExpertStage::Load(WeightLoader& loader, int layer) const {
  const int hidden = config_.hidden_size, inner = experts_.intermediate;
  const std::string mlp = LayerTensor(layer, "mlp");
  ExpertWeights w;
  SLUICE_ASSIGN_OR_RETURN(w.router,
                          loader.Matrix({{mlp + ".gate.weight", experts_.routed}}, hidden));
  SLUICE_ASSIGN_OR_RETURN(
      w.bias, loader.Vectors({{mlp + ".gate.e_score_correction_bias", experts_.routed}}));
  std::vector<WeightLoader::Tensor> gate_up, down;
  for (int e = 0; e < experts_.routed; ++e) {
    const std::string expert = absl::StrCat(mlp, ".experts.", e);
    gate_up.push_back({expert + ".gate_proj.weight", inner});
    gate_up.push_back({expert + ".up_proj.weight", inner});
    down.push_back({expert + ".down_proj.weight", hidden});
  }
  SLUICE_ASSIGN_OR_RETURN(w.gate_up, loader.Matrix(gate_up, hidden));
  SLUICE_ASSIGN_OR_RETURN(w.down, loader.Matrix(down, inner));
  return w;
}

absl::Status ExpertStage::Allocate(Workspace& workspace, int max_rows) {
  const int64_t k = experts_.per_token, inner = experts_.intermediate;
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&logits_, max_rows, int64_t{experts_.routed} * 4, "router's logits"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&chosen_, max_rows, k * 4, "chosen experts"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&weights_, max_rows, k * 4, "experts' weights"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&pairs_, max_rows, k * 4, "rows by experts"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&begins_, int64_t{experts_.routed} + 1, 4, "experts"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&gate_up_, max_rows, k * 2 * inner * 4, "experts' gate and up"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(
      &activated_, max_rows, k * inner * ops_.activation_bytes(), "experts' activations"));
  return workspace.Allocate(&results_, max_rows, k * config_.hidden_size * 4, "experts' results");
}

void ExpertStage::Choose(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
                         const void* normed) {
  ops_.Product(stream, normed, weights.router, {}, logits_.as<float>(), in.rows, in.decode_rows,
               /*accumulate=*/false);
  kernels::RouteParams route{};
  route.logits = logits_.as<float>();
  route.bias = weights.bias.data();
  route.slots = in.slots;
  route.chosen = chosen_.as<int32_t>();
  route.weights = weights_.as<float>();
  route.pairs = pairs_.as<int32_t>();
  route.begins = begins_.as<int32_t>();
  route.rows = in.rows;
  route.experts = experts_.routed;
  route.k = experts_.per_token;
  route.groups = experts_.groups;
  route.top_groups = experts_.top_groups;
  route.normalise = experts_.normalise;
  route.scaling = experts_.scaling;
  ops_.kernels().Route(stream, route);
}

void ExpertStage::Run(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
                      const void* normed, float* residual) {
  const int32_t pairs = in.rows * experts_.per_token;
  kernels::ExpertLinearParams product{};
  product.x = normed;
  product.pairs_per_row = experts_.per_token;
  product.w = weights.gate_up.matrix;
  product.y = gate_up_.as<float>();
  product.pairs = pairs_.as<int32_t>();
  product.begins = begins_.as<int32_t>();
  product.max_pairs = pairs;
  product.experts = experts_.routed;
  product.n = 2 * experts_.intermediate;
  product.x_type = ops_.activation_type();
  ops_.kernels().ExpertLinear(stream, product);
  ops_.SiluMul(stream, gate_up_.as<float>(), activated_.data(), pairs, experts_.intermediate);
  product.x = activated_.data();
  product.pairs_per_row = 1;
  product.w = weights.down.matrix;
  product.y = results_.as<float>();
  product.n = config_.hidden_size;
  ops_.kernels().ExpertLinear(stream, product);

  kernels::CombineParams combine{};
  combine.y = results_.as<float>();
  combine.chosen = chosen_.as<int32_t>();
  combine.weights = weights_.as<float>();
  combine.out = residual;
  combine.rows = in.rows;
  combine.k = experts_.per_token;
  combine.dim = config_.hidden_size;
  ops_.kernels().Combine(stream, combine);
}

}  // namespace sluice
