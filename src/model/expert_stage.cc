#include "src/model/expert_stage.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/model/tensor_list.h"

namespace sluice {

ExpertStage::ExpertStage(const ModelConfig& config, const Model::Options& options,
                         const LayerOperators& ops)
    : config_(config),
      experts_(config.latent->experts),
      shard_(*ExpertShardOf(config, options.expert_parallel > 1 ? options.rank : 0,
                            options.expert_parallel, options.expert_redundancy)),
      load_(options.expert_load),
      count_load_(options.count_expert_load),
      ops_(ops) {
  if (shard_.whole()) return;
  const RowExchange::Options exchange{
      config.hidden_size, experts_.per_token, shard_.size, shard_.each,
      options.fp8_dispatch ? DType::kFloat8E4M3 : ops.activation_type()};
  for (size_t half = 0; half < (options.halves ? 2 : 1); ++half) {
    exchanges_[half] = std::make_unique<RowExchange>(exchange, options.ranks, ops);
  }
}

ExpertPlacement ExpertStage::PlacementOf(int layer) const {
  const auto i = static_cast<size_t>(layer);
  if (i >= load_.size() || load_[i].empty()) {
    return PlaceExperts(experts_.routed, shard_.size, shard_.redundancy);
  }
  return PlaceExperts(load_[i], shard_.size, shard_.redundancy);
}

std::string ExpertStage::Digest() const {
  Sha256 sha;
  for (int layer = config_.latent->dense_layers; layer < config_.layers; ++layer) {
    const ExpertPlacement placement = PlacementOf(layer);
    sha.Update(placement.experts.data(), placement.experts.size() * sizeof(int32_t));
  }
  return sha.Hex();
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
  const ExpertPlacement placement = PlacementOf(layer);
  for (const int32_t own : placement.OfRank(shard_.rank)) {
    const std::string expert = absl::StrCat(mlp, ".experts.", own);
    gate_up.push_back({expert + ".gate_proj.weight", inner});
    gate_up.push_back({expert + ".up_proj.weight", inner});
    down.push_back({expert + ".down_proj.weight", hidden});
  }
  SLUICE_ASSIGN_OR_RETURN(w.gate_up, loader.Matrix(gate_up, hidden));
  SLUICE_ASSIGN_OR_RETURN(w.down, loader.Matrix(down, inner));
  if (shard_.redundancy > 0 || !load_.empty()) {
    SLUICE_ASSIGN_OR_RETURN(
        w.physical, loader.Numbers(PhysicalExpertsFrom(placement, experts_.routed, shard_.rank),
                                   "where experts are"));
  }
  if (divided() && count_load_) {
    SLUICE_ASSIGN_OR_RETURN(
        w.load, loader.Numbers(std::vector<int32_t>(size_t(experts_.routed) * 2), "experts' load"));
  }
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
  for (const auto& [exchange, rows] :
       {std::pair{exchanges_[0].get(), max_rows}, {exchanges_[1].get(), (max_rows + 1) / 2}}) {
    if (exchange != nullptr) SLUICE_RETURN_IF_ERROR(exchange->Allocate(workspace, rows));
  }
  // Every rank may send all of its rows here.
  const int64_t most = int64_t{max_rows} * shard_.size;
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&gate_up_, most, k * 2 * inner * 4, "experts' gate and up"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&activated_, most, k * inner * ops_.activation_bytes(),
                                            "experts' activations"));
  return workspace.Allocate(&results_, most, k * config_.hidden_size * 4, "experts' results");
}

void ExpertStage::Choose(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
                         RowRange rows, const void* normed) {
  const int64_t first = rows.begin, k = experts_.per_token;
  float* const logits = logits_.as<float>() + first * experts_.routed;
  ops_.Product(stream, RowsOf(normed, first), weights.router, {}, logits, rows.count, rows.decode,
               /*accumulate=*/false);
  kernels::RouteParams route{};
  route.logits = logits;
  route.bias = weights.bias.data();
  route.slots = in.slots + first;
  route.chosen = chosen_.as<int32_t>() + first * k;
  route.weights = weights_.as<float>() + first * k;
  // Where ranks divide the experts, only the pairs of rows that arrive count.
  route.pairs = pairs_.as<int32_t>();
  route.begins = begins_.as<int32_t>();
  route.rows = rows.count;
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
  RowExchange::Arrived rows;
  rows.x = normed;
  rows.chosen = chosen_.as<int32_t>();
  rows.weights = weights_.as<float>();
  rows.pairs = pairs_.as<int32_t>();
  rows.begins = begins_.as<int32_t>();
  rows.sums = residual;
  rows.rows = in.rows;
  Compute(stream, weights, rows);
}

void ExpertStage::Pack(Stream& stream, const ExpertWeights& weights, int half, const StepInputs& in,
                       RowRange rows, const void* normed, float* residual) {
  const int64_t first = rows.begin, k = experts_.per_token;
  const int32_t most = in.most_rows > 0 ? in.most_rows : in.rows;
  RowExchange::Rows packed;
  packed.x = RowsOf(normed, first);
  packed.chosen = chosen_.as<int32_t>() + first * k;
  packed.weights = weights_.as<float>() + first * k;
  packed.physical = weights.physical.as<int32_t>();
  packed.load = weights.load.as<int64_t>();
  packed.out = residual + first * config_.hidden_size;
  packed.rows = rows.count;
  packed.most_rows = in.halves ? (most + 1) / 2 : most;
  exchange(half).Pack(stream, packed);
}

void ExpertStage::Work(Stream& stream, const ExpertWeights& weights, int half) {
  Compute(stream, weights, exchange(half).Unpack(stream));
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
  product.experts = shard_.each;
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
