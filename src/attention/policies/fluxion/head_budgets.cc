#include "src/attention/policies/fluxion/head_budgets.h"

#include <vector>

#include "src/attention/offload/decode_attention.h"
#include "src/attention/policies/fluxion/block_digests.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

using kernels::kFluxionLevels;

// Returns the values of the network as FluxionNetwork has them.
std::vector<float> ValuesOf(const FluxionPredictor& predictor) {
  std::vector<float> values = predictor.mean;
  values.insert(values.end(), predictor.deviation.begin(), predictor.deviation.end());
  for (const FluxionPredictor::Layer& layer : predictor.layers) {
    const auto in = static_cast<size_t>(layer.in), out = static_cast<size_t>(layer.out);
    for (size_t i = 0; i < in; ++i) {
      for (size_t o = 0; o < out; ++o) values.push_back(layer.weights[o * in + i]);
    }
    values.insert(values.end(), layer.bias.begin(), layer.bias.end());
  }
  return values;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HeadBudgets>> HeadBudgets::Create(const PolicyOptions& options,
                                                                 const FluxionShape& shape,
                                                                 const OffloadTier* tier) {
  auto made = std::unique_ptr<HeadBudgets>(new HeadBudgets(options, shape, tier));
  if (!made->predicts()) {
    SLUICE_RETURN_IF_ERROR(made->UploadConstants());
    return made;
  }
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  SLUICE_RETURN_IF_ERROR(made->MakeAnchors());
  SLUICE_RETURN_IF_ERROR(made->UploadNetwork());
  return made;
}

absl::Status HeadBudgets::UploadConstants() {
  std::vector<float> budgets;
  for (int64_t head = 0; head < int64_t{shape_.rows} * shape_.heads; ++head) {
    for (int level = 0; level < kFluxionLevels; ++level) {
      const bool is_level = kernels::LevelTokens(level) == options_.fluxion.fixed_block;
      budgets.push_back(is_level ? static_cast<float>(options_.fluxion.fixed_share) : 1.0f);
    }
  }
  SLUICE_ASSIGN_OR_RETURN(budgets_, Uploaded(options_.device, budgets, "fluxion's budgets"));
  const std::vector<int32_t> streaming(budgets.size() / kFluxionLevels, 0);
  SLUICE_ASSIGN_OR_RETURN(streaming_, Uploaded(options_.device, streaming, "fluxion's budgets"));
  return absl::OkStatus();
}

absl::Status HeadBudgets::UploadNetwork() {
  const FluxionPredictor& predictor = *options_.fluxion.predictor;
  if (std::ssize(predictor.layers) > kernels::kFluxionMostLayers) {
    return absl::InvalidArgumentError("fluxion_predictor: the network has too many layers");
  }
  SLUICE_ASSIGN_OR_RETURN(network_values_,
                          Uploaded(options_.device, ValuesOf(predictor), "fluxion's predictor"));
  network_.values = network_values_.as<float>();
  network_.layers = static_cast<int32_t>(predictor.layers.size());
  network_.widths[0] = kernels::kFluxionFeatures;
  for (size_t i = 0; i < predictor.layers.size(); ++i) {
    network_.widths[i + 1] = predictor.layers[i].out;
  }
  network_.form = predictor.form == FluxionPredictor::Form::kLine ? kernels::FluxionForm::kLine
                                                                  : kernels::FluxionForm::kFour;
  network_.threshold = predictor.streaming_threshold;
  return absl::OkStatus();
}

absl::Status HeadBudgets::Allocate() {
  const BufferAllocator allocator(options_.device, "fluxion's budgets");
  const int64_t values = int64_t{shape_.rows} * shape_.heads;
  const auto on_device = [&](int64_t words, Buffer* buffer) {
    return allocator.Words(MemoryKind::kDevice, words, buffer);
  };
  SLUICE_RETURN_IF_ERROR(on_device(values * kFluxionLevels, &budgets_));
  SLUICE_RETURN_IF_ERROR(on_device(values, &streaming_));
  SLUICE_RETURN_IF_ERROR(on_device(2 * values * shape_.head_dim, &o_));
  SLUICE_RETURN_IF_ERROR(on_device(2 * values, &lse_));
  return absl::OkStatus();
}

absl::Status HeadBudgets::MakeAnchors() {
  Device* const device = options_.device;
  const double tau = options_.fluxion.predictor->tau;
  SLUICE_ASSIGN_OR_RETURN(first_queries_, FirstQueries::Create(options_));
  SLUICE_ASSIGN_OR_RETURN(anchors_, AnchorTable::Create(device, shape_));
  SLUICE_ASSIGN_OR_RETURN(meter_,
                          AnchorMeter::Create(device, shape_, &tier_, options_.max_context, tau));
  SLUICE_ASSIGN_OR_RETURN(growing_,
                          GrowingAnchors::Create({device, shape_, &tier_, options_.max_context, tau,
                                                  first_queries_.get(), &*anchors_}));
  return absl::OkStatus();
}

void HeadBudgets::Joined(int slot) {
  if (predicts()) first_queries_->prompts().Joined(slot);
}

void HeadBudgets::EndPrompt(int slot, int64_t tokens, const SelectionHints& hints) {
  if (!predicts()) return;
  first_queries_->EndPrompt(slot, tokens, hints);
  growing_->EndPrompt(slot, tokens, first_queries_->Has(slot));
}

void HeadBudgets::Left(int slot) {
  if (predicts()) growing_->Left(slot);
}

void HeadBudgets::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                            absl::Span<const int32_t> positions) {
  if (!predicts()) return;
  first_queries_->prompts().BeginStep(slots, positions);
  growing_->BeginStep(stream, slots, positions);
}

void HeadBudgets::Keep(Stream& stream, int layer, const Queries& queries) {
  if (predicts()) growing_->Keep(stream, layer, queries);
}

void HeadBudgets::MakeAnchor(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row) {
  if (!predicts()) return;
  if (!first_queries_->Has(slot)) {
    anchors_->Forget(stream, layer, slot);
    return;
  }
  first_queries_->Put(stream, layer, slot, nullptr);
  meter_->Measure(stream, layer, first_queries_->OfSlot(layer, slot), row.slots, row.positions,
                  *anchors_);
}

void HeadBudgets::Predict(Stream& stream, int layer, const Queries& queries,
                          const SegmentUnits& segments) {
  if (!predicts()) return;
  KernelSet& kernels = options_.device->kernels();
  const int64_t values = int64_t{shape_.rows} * shape_.heads;
  float *const sink_o = o_.as<float>(), *const local_o = sink_o + values * shape_.head_dim;
  float *const sink_lse = lse_.as<float>(), *const local_lse = sink_lse + values;
  const kernels::PagedCache places = tier_.Places(layer);
  kernels.SparseAttention(stream,
                          SparseAttentionOf(queries, places, segments.sink, segments.sink_places,
                                            shape_.unit_tokens, sink_o, sink_lse));
  kernels.SparseAttention(stream,
                          SparseAttentionOf(queries, places, segments.local, segments.local_places,
                                            shape_.unit_tokens, local_o, local_lse));
  kernels::PredictBudgetsParams params{};
  params.q = queries.q;
  params.q_stride = queries.stride;
  params.slots = queries.slots;
  params.positions = queries.positions;
  params.sink_o = sink_o;
  params.sink_lse = sink_lse;
  params.local_o = local_o;
  params.local_lse = local_lse;
  params.anchors = anchors_->Of(layer);
  params.network = network_;
  params.budgets = budgets_.as<float>();
  params.streaming = streaming_.as<int32_t>();
  params.rows = queries.rows;
  params.heads = queries.heads;
  params.kv_heads = shape_.kv_heads;
  params.head_dim = shape_.head_dim;
  params.layer = layer;
  kernels.PredictBudgets(stream, params);
}

}  // namespace sluice
