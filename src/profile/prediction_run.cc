#include "src/profile/prediction_run.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>

#include "src/attention/forwarding_policy.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/dictation.h"
#include "src/device/allocation.h"
#include "src/model/model.h"

namespace sluice {
namespace {

// Copies the queries of the one decode row of a step to the host, predicted and real ones.
class PredictionWatch : public ForwardingPolicy {
 public:
  PredictionWatch(AttentionPolicy* policy, const ModelConfig& model, Buffer predicted, Buffer real)
      : ForwardingPolicy(policy),
        heads_(model.heads),
        head_dim_(model.head_dim),
        predicted_(std::move(predicted)),
        real_(std::move(real)),
        looked_(static_cast<size_t>(model.layers)) {}

  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    looked_[static_cast<size_t>(layer)] = true;
    stream.Copy(Row(predicted_, layer), predicted.q, row_bytes());
    ForwardingPolicy::Ahead(stream, layer, predicted);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    if (params.decode_rows == 1) stream.Copy(Row(real_, layer), params.q, row_bytes());
    ForwardingPolicy::Attend(stream, layer, params);
  }

  // Adds the cosines of the step that is done.
  void AddTo(std::vector<PredictionSums>* sums) const {
    for (size_t layer = 0; layer < looked_.size(); ++layer) {
      if (!looked_[layer]) continue;
      const float* a = Row(predicted_, static_cast<int>(layer));
      const float* b = Row(real_, static_cast<int>(layer));
      for (int head = 0; head < heads_; ++head, a += head_dim_, b += head_dim_) {
        const double ab = std::inner_product(a, a + head_dim_, b, 0.0);
        const double aa = std::inner_product(a, a + head_dim_, a, 0.0);
        const double bb = std::inner_product(b, b + head_dim_, b, 0.0);
        (*sums)[layer].cosine += aa * bb > 0 ? ab / std::sqrt(aa * bb) : 0;
        ++(*sums)[layer].count;
      }
    }
  }

 private:
  size_t row_bytes() const { return static_cast<size_t>(heads_ * head_dim_) * sizeof(float); }
  float* Row(const Buffer& rows, int layer) const {
    return rows.as<float>() + int64_t{layer} * heads_ * head_dim_;
  }

  const int heads_, head_dim_;
  const Buffer predicted_, real_;  // float [layers][heads][head_dim], pinned
  std::vector<bool> looked_;       // whether a layer is looked ahead
};

}  // namespace

absl::Status MeasurePredictions(const bench::PolicyWorld& world, const bench::Context& context,
                                int steps, std::vector<PredictionSums>* sums) {
  const ModelConfig& model = world.model->config();
  sums->resize(static_cast<size_t>(model.layers));
  bench::PolicyWorld one = world;
  one.slots = 1;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy,
                          bench::SetUpPolicy(one, "clo"));
  Buffer predicted, real;
  const BufferAllocator queries(world.device, "queries of a step");
  for (Buffer* rows : {&predicted, &real}) {
    SLUICE_RETURN_IF_ERROR(queries.Words(
        MemoryKind::kPinned, int64_t{model.layers} * model.heads * model.head_dim, rows));
  }
  PredictionWatch watch(policy.get(), model, std::move(predicted), std::move(real));
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<bench::Dictation> dictation,
      bench::Dictation::Create({world.device, world.model, &watch, world.dram, world.max_context}));
  SLUICE_RETURN_IF_ERROR(
      dictation->Begin(context, static_cast<int>(context.tokens.size()) + steps + 1));
  for (int step = 0; step < steps; ++step) {
    SLUICE_ASSIGN_OR_RETURN(const auto logits, dictation->Step());
    // The first step's prediction does not know its sequence's drift yet.
    if (step > 0) watch.AddTo(sums);
    dictation->Append(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  dictation->End();
  return absl::OkStatus();
}

}  // namespace sluice
