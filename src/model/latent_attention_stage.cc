#include "src/model/latent_attention_stage.h"

#include <cmath>
#include <memory>
#include <vector>

#include "src/base/status_macros.h"
#include "src/model/parallel.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

// The epsilon of the norms inside the stage, whatever the config's rms_norm_eps is. Published code
// does the same.
constexpr float kInnerEpsilon = 1e-6f;

}  // namespace

LatentAttentionStage::LatentAttentionStage(const ModelConfig& config, DType kv_dtype,
                                           const LayerOperators& ops)
    : config_(config), latent_(*config.latent), kv_dtype_(kv_dtype), ops_(ops) {}

absl::StatusOr<LatentAttentionWeights> LatentAttentionStage::Load(WeightLoader& loader, int layer,
                                                                  bool indexer) const {
  const LatentConfig& l = latent_;
  const int hidden = config_.hidden_size;
  const auto name = [layer](const char* suffix) {
    return LayerTensor(layer, absl::StrCat("self_attn.", suffix).c_str());
  };
  LatentAttentionWeights w;
  std::vector<WeightLoader::Tensor> input = {{name("q_a_proj.weight"), l.q_rank},
                                             {name("kv_a_proj_with_mqa.weight"), l.entry_dim()}};
  if (indexer && l.indexer.has_value()) {
    const WeightLoader::Tensor weights{name("indexer.weights_proj.weight"), l.indexer->heads};
    input.push_back({name("indexer.wk.weight"), kernels::kIndexDim});
    if (l.fp8_weights) {
      SLUICE_ASSIGN_OR_RETURN(w.index_weights, loader.Matrix({weights}, hidden));
    } else {
      input.push_back(weights);
    }
    SLUICE_ASSIGN_OR_RETURN(w.index_norm,
                            loader.Vectors({{name("indexer.k_norm.weight"), kernels::kIndexDim}}));
    SLUICE_ASSIGN_OR_RETURN(w.index_norm_bias,
                            loader.Vectors({{name("indexer.k_norm.bias"), kernels::kIndexDim}}));
    SLUICE_ASSIGN_OR_RETURN(
        w.index_q,
        loader.Matrix({{name("indexer.wq_b.weight"), l.indexer->heads * kernels::kIndexDim}},
                      l.q_rank));
  }
  SLUICE_ASSIGN_OR_RETURN(w.input, loader.Matrix(input, hidden));
  SLUICE_ASSIGN_OR_RETURN(w.q_norm, loader.Vectors({{name("q_a_layernorm.weight"), l.q_rank}}));
  SLUICE_ASSIGN_OR_RETURN(w.kv_norm, loader.Vectors({{name("kv_a_layernorm.weight"), l.rank}}));
  SLUICE_ASSIGN_OR_RETURN(
      w.q_b, loader.Matrix({{name("q_b_proj.weight"), config_.heads * l.qk_dim()}}, l.q_rank));
  SLUICE_RETURN_IF_ERROR(LoadAbsorbed(loader, name("kv_b_proj.weight"), &w));
  SLUICE_ASSIGN_OR_RETURN(
      w.o, loader.Matrix({{name("o_proj.weight"), hidden}}, config_.heads * l.v_dim));
  return w;
}

// kv_b_proj is [heads][nope + v][rank]: for each head the rows that make its keys from a latent
// entry, then those that make its values. Values are rounded once, if the kernels compute in bf16.
absl::Status LatentAttentionStage::LoadAbsorbed(WeightLoader& loader, const std::string& kv_b,
                                                LatentAttentionWeights* out) const {
  const int64_t heads = config_.heads, rank = latent_.rank, nope = latent_.nope_dim;
  const int64_t v = latent_.v_dim;
  SLUICE_ASSIGN_OR_RETURN(MatrixView all,
                          loader.Host(kv_b, static_cast<int>(heads * (nope + v)), latent_.rank));
  const auto key_count = static_cast<size_t>(heads * rank * nope);
  const auto value_count = static_cast<size_t>(heads * v * rank);
  const auto keys = std::make_unique_for_overwrite<float[]>(key_count);
  const auto values = std::make_unique_for_overwrite<float[]>(value_count);
  if (loader.has_values()) {
    ParallelFor(heads, [&](int64_t head) {
      std::vector<float> row(static_cast<size_t>(rank));
      float* to = keys.get() + head * rank * nope;
      for (int64_t d = 0; d < nope; ++d) {
        all.FloatRow(head * (nope + v) + d, row.data());
        for (int64_t i = 0; i < rank; ++i) to[i * nope + d] = row[static_cast<size_t>(i)];
      }
      for (int64_t d = 0; d < v; ++d) {
        all.FloatRow(head * (nope + v) + nope + d, values.get() + (head * v + d) * rank);
      }
    });
  }
  loader.Release(std::move(all));
  const bool bf16 = !latent_.fp8_weights || ops_.activation_type() == DType::kBFloat16;
  SLUICE_ASSIGN_OR_RETURN(out->absorb_k,
                          loader.Made({keys.get(), key_count}, latent_.nope_dim, bf16));
  SLUICE_ASSIGN_OR_RETURN(out->absorb_v,
                          loader.Made({values.get(), value_count}, latent_.rank, bf16));
  return absl::OkStatus();
}

absl::Status LatentAttentionStage::Allocate(Workspace& workspace, int max_rows) {
  const LatentConfig& l = latent_;
  const int64_t act = ops_.activation_bytes(), heads = config_.heads;
  const int64_t index_heads = l.indexer.has_value() ? l.indexer->heads : 0;
  const int64_t projected = l.q_rank + l.entry_dim() + (index_heads > 0 ? kernels::kIndexDim : 0) +
                            (l.fp8_weights ? 0 : index_heads);
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&projected_, max_rows, projected * 4, "latent products"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&q_latent_, max_rows, l.q_rank * act, "latent queries"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&q_heads_, max_rows, heads * l.qk_dim() * 4, "queries"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&q_nope_, max_rows, heads * l.nope_dim * act, "queries without RoPE"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&q_, max_rows, heads * l.entry_dim() * act, "absorbed queries"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&attended_, max_rows, heads * l.rank * act, "latent attention results"));
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&values_, max_rows, heads * l.v_dim * act, "attention results"));
  if (index_heads == 0) return absl::OkStatus();
  const int64_t index_dims = index_heads * kernels::kIndexDim;
  const int64_t index_q = index_dims * (kv_dtype_ == DType::kFloat8E4M3 ? 1 : 4);
  SLUICE_RETURN_IF_ERROR(
      workspace.Allocate(&index_heads_, max_rows, index_dims * 4, "index queries"));
  SLUICE_RETURN_IF_ERROR(workspace.Allocate(&index_q_, max_rows, index_q, "index queries"));
  if (l.fp8_weights) {
    SLUICE_RETURN_IF_ERROR(
        workspace.Allocate(&index_weights_, max_rows, index_heads * 4, "index weights"));
  }
  return workspace.Allocate(&head_weights_, max_rows, index_heads * 4, "index weights");
}

void LatentAttentionStage::Run(Stream& stream, int layer, const LatentAttentionWeights& weights,
                               const StepInputs& in, RowRange rows, const void* normed,
                               const float* cos_sin, float* residual, LatentAttention& attention) {
  const LatentConfig& l = latent_;
  const int64_t first = rows.begin, act = ops_.activation_bytes(), hidden = config_.hidden_size;
  const auto* const x = static_cast<const uint8_t*>(normed) + first * hidden * act;
  float* const projected = projected_.as<float>() + first * projected_size(weights);
  void* const q_latent = ops_.Activation(q_latent_, first, l.q_rank);
  // This is little work, and each part of it is too short to fill a device. It runs beside the two
  // large products that lead to the indexer's queries.
  Stream& aside = stream.Branch(AttentionPolicy::kAheadBranch);
  aside.After(stream);
  if (weights.index_weights.matrix.n > 0) {
    ops_.Product(aside, x, weights.index_weights, {},
                 index_weights_.as<float>() + first * l.indexer->heads, rows.count, rows.decode,
                 /*accumulate=*/false);
  }
  ops_.Product(stream, x, weights.input, {}, projected, rows.count, rows.decode,
               /*accumulate=*/false);
  aside.After(stream);
  Append(aside, layer, weights, in, rows, cos_sin, attention);
  ops_.Norm(stream, projected, projected_size(weights), l.q_rank, kInnerEpsilon, weights.q_norm,
            q_latent, rows.count);
  if (Indexed(weights)) {
    ops_.Product(stream, q_latent, weights.index_q, {},
                 index_heads_.as<float>() + first * l.indexer->heads * kernels::kIndexDim,
                 rows.count, rows.decode, /*accumulate=*/false);
  }
  stream.After(aside);

  const auto make_queries = [&](Stream& on) { Queries(on, weights, rows, cos_sin); };
  LatentAttention::Params params{.make_queries = make_queries};
  if (Indexed(weights)) {
    IndexQueries(stream, weights, rows, cos_sin);
    params.index_q = index_q_.data();
    params.index_weights = head_weights_.as<float>();
    params.index_heads = l.indexer->heads;
    params.top_k = l.indexer->top_k;
  }
  params.q = q_.data();
  params.slots = in.slots;
  params.positions = in.positions;
  params.rows = rows.count;
  params.decode_rows = rows.decode;
  params.first_row = rows.begin;
  params.step_rows = in.rows;
  params.heads = config_.heads;
  params.scale = l.softmax_scale;
  params.out = attended_.data();
  params.out_type = ops_.activation_type();
  attention.AttendLatent(stream, layer, params);

  kernels::HeadLinearParams head{};
  const int64_t heads = config_.heads;
  head.x = ops_.Activation(attended_, first, heads * l.rank);
  head.x_head_stride = l.rank;
  head.x_stride = int64_t{config_.heads} * l.rank;
  head.w = weights.absorb_v.matrix;
  head.y = ops_.Activation(values_, first, heads * l.v_dim);
  head.y_head_stride = l.v_dim;
  head.y_stride = int64_t{config_.heads} * l.v_dim;
  head.x_type = head.y_type = ops_.activation_type();
  head.rows = rows.count;
  head.heads = config_.heads;
  head.n = l.v_dim;
  head.decode_rows = rows.decode;
  ops_.kernels().HeadLinear(stream, head);
  ops_.Product(stream, head.y, weights.o, {}, residual + first * hidden, rows.count, rows.decode,
               /*accumulate=*/true);
}

void LatentAttentionStage::Append(Stream& stream, int layer, const LatentAttentionWeights& weights,
                                  const StepInputs& in, RowRange rows, const float* cos_sin,
                                  LatentAttention& attention) {
  const int64_t first = rows.begin;
  const float* const projected = projected_.as<float>() + first * projected_size(weights);
  const float* const angles = cos_sin + first * latent_.rope_dim;
  kernels::LatentAppendParams entry{};
  entry.kv = projected + kv_at();
  entry.kv_stride = projected_size(weights);
  entry.norm = weights.kv_norm.data();
  entry.cos_sin = angles;
  entry.slots = in.slots + first;
  entry.positions = in.positions + first;
  entry.cache.rank = latent_.rank;
  entry.cache.rope = latent_.rope_dim;
  entry.cache.type = kv_dtype_;
  entry.rows = rows.count;
  entry.epsilon = kInnerEpsilon;
  entry.decode_rows = rows.decode;
  attention.AppendLatent(stream, layer, entry, rows.begin);
  if (!Indexed(weights)) return;

  kernels::IndexAppendParams key{};
  key.k = projected + index_key_at();
  key.k_stride = projected_size(weights);
  key.norm_weight = weights.index_norm.data();
  key.norm_bias = weights.index_norm_bias.data();
  key.cos_sin = angles;
  key.slots = in.slots + first;
  key.positions = in.positions + first;
  key.cache.type = kv_dtype_;
  key.rows = rows.count;
  key.rope_dim = latent_.rope_dim;
  key.epsilon = kInnerEpsilon;
  key.decode_rows = rows.decode;
  attention.AppendIndex(stream, layer, key);
}

void LatentAttentionStage::IndexQueries(Stream& stream, const LatentAttentionWeights& weights,
                                        RowRange rows, const float* cos_sin) {
  const IndexerConfig& indexer = *latent_.indexer;
  const int64_t first = rows.begin, dims = int64_t{indexer.heads} * kernels::kIndexDim;
  kernels::IndexQueryParams query{};
  query.q = index_heads_.as<float>() + first * dims;
  query.weights = projected_.as<float>() + first * projected_size(weights) + index_weights_at();
  query.weights_stride = projected_size(weights);
  if (weights.index_weights.matrix.n > 0) {
    query.weights = index_weights_.as<float>() + first * indexer.heads;
    query.weights_stride = indexer.heads;
  }
  query.cos_sin = cos_sin + first * latent_.rope_dim;
  query.out = index_q_.as<uint8_t>() + first * dims * (kv_dtype_ == DType::kFloat8E4M3 ? 1 : 4);
  query.out_weights = head_weights_.as<float>() + first * indexer.heads;
  query.type = kv_dtype_;
  query.rows = rows.count;
  query.heads = indexer.heads;
  query.rope_dim = latent_.rope_dim;
  query.weight_scale =
      static_cast<float>(1.0 / std::sqrt(double{kernels::kIndexDim} * indexer.heads));
  ops_.kernels().IndexQuery(stream, query);
}

void LatentAttentionStage::Queries(Stream& stream, const LatentAttentionWeights& weights,
                                   RowRange rows, const float* cos_sin) {
  const LatentConfig& l = latent_;
  const int64_t first = rows.begin, heads = config_.heads;
  float* const q_heads = q_heads_.as<float>() + first * heads * l.qk_dim();
  ops_.Product(stream, ops_.Activation(q_latent_, first, l.q_rank), weights.q_b, {}, q_heads,
               rows.count, rows.decode, /*accumulate=*/false);
  kernels::MlaQueryParams query{};
  query.q = q_heads;
  query.cos_sin = cos_sin + first * l.rope_dim;
  query.nope = ops_.Activation(q_nope_, first, heads * l.nope_dim);
  query.out = ops_.Activation(q_, first, heads * l.entry_dim());
  query.type = ops_.activation_type();
  query.rows = rows.count;
  query.heads = config_.heads;
  query.nope_dim = l.nope_dim;
  query.rope = l.rope_dim;
  query.rank = l.rank;
  ops_.kernels().MlaQuery(stream, query);

  kernels::HeadLinearParams head{};
  head.x = query.nope;
  head.x_head_stride = l.nope_dim;
  head.x_stride = int64_t{config_.heads} * l.nope_dim;
  head.w = weights.absorb_k.matrix;
  head.y = query.out;
  head.y_head_stride = l.entry_dim();
  head.y_stride = int64_t{config_.heads} * l.entry_dim();
  head.x_type = head.y_type = ops_.activation_type();
  head.rows = rows.count;
  head.heads = config_.heads;
  head.n = l.rank;
  head.decode_rows = rows.decode;
  ops_.kernels().HeadLinear(stream, head);
}

}  // namespace sluice
