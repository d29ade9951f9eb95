#include "src/model/expert_stage.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model/tensor_list.h"

namespace sluice {

ExpertStage::ExpertStage(const ModelConfig& config, const Model::Options& options,
                         const LayerOperators& ops)
    : config_(config),
      experts_(config.latent->experts),
      shard_(*ExpertShardOf(config, options.expert_parallel > 1 ? options.rank : 0,
                            options.expert_parallel)),
      ops_(ops) {
  if (shard_.whole()) return;
  const RowExchange::Options exchange{
      config.hidden_size, experts_.per_token, shard_.size, shard_.experts.count,
      options.fp8_dispatch ? DType::kFloat8E4M3 : ops.activation_type()};
  exchange_ = std::make_unique<RowExchange>(exchange, options.ranks, ops);
}

absl::StatusOr<ExpertWeights> ExpertStage::Load(WeightLoader& loader, int layer) const {
  const int hidden = config_.hidden_size, inner = experts_.intermediate;
  const std::string mlp = LayerTensor(layer, "mlp");
  ExpertWeights w;
  SLUICE_ASSIGN_OR_RETURN(w.router,
                          loader.Matrix({{mlp + ".gate.weight", experts_.routed}}, hidden));
  SLUICE_ASSIGN_OR_RETURN(
      w.bias, loader.Vectors({{mlp + ".gate.e_score_correction_bias", experts_.routed}}));
  std::vector<WeightLoader::Tensor> gate_up, down;
  for (int i = 0; i < shard_.experts.count; ++i) {
    const std::string expert = absl::StrCat(mlp, ".experts.", shard_.experts.first + i);
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
  if (exchange_ != nullptr) SLUICE_RETURN_IF_ERROR(exchange_->Allocate(workspace, max_rows));
  // Every rank may send all of its rows here.
  const int64_t most = int64_t{max_rows} * shard_.size;
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&gate_up_, most, k * 2 * inner * 4, "experts' gate and up"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&activated_, most, k * inner * ops_.activation_bytes(),
                                            "experts' activations"));
  return workspace.Allocate(&results_, most, k * config_.hidden_size * 4, "experts' results");
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
  if (exchange_ != nullptr) arrived_ = exchange_->Dispatch(stream, RowsOf(in, normed));
}

void ExpertStage::Run(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
                      const void* normed, float* residual) {
  if (exchange_ == nullptr) {
    Compute(stream, weights,
            {normed, chosen_.as<int32_t>(), weights_.as<float>(), pairs_.as<int32_t>(),
             begins_.as<int32_t>(), residual, in.rows});
    return;
  }
  Compute(stream, weights, arrived_);
  exchange_->Combine(stream, RowsOf(in, normed), residual);
}

RowExchange::Rows ExpertStage::RowsOf(const StepInputs& in, const void* normed) const {
  return {normed, chosen_.as<int32_t>(), weights_.as<float>(), in.rows,
          in.most_rows > 0 ? in.most_rows : in.rows};
}

void ExpertStage::Compute(Stream& stream, const ExpertWeights& weights,
                          const RowExchange::Arrived& rows) {
  const int32_t pairs = rows.rows * experts_.per_token;
  kernels::ExpertLinearParams product{};
  product.x = rows.x;
  product.pairs_per_row = experts_.per_token;
  product.w = weights.gate_up.matrix;
  product.y = gate_up_.as<float>();
  product.pairs = rows.pairs;
  product.begins = rows.begins;
  product.max_pairs = pairs;
  product.experts = shard_.experts.count;
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
  combine.chosen = rows.chosen;
  combine.weights = rows.weights;
  combine.out = rows.sums;
  combine.rows = rows.rows;
  combine.k = experts_.per_token;
  combine.dim = config_.hidden_size;
  ops_.kernels().Combine(stream, combine);
}

}  // namespace sluice
