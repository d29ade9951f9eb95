// Runs a policy and records its queries: the real ones of every layer, and those that were
// predicted for it, as the policy has them predicted. Every policy's selection works from these.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/forwarding_policy.h"
#include "src/device/device.h"

namespace sluice::bench {

class QueryWatch : public ForwardingPolicy {
 public:
  // REQUIRES: `policy` outlives this. The queries of a step's first row are kept.
  static absl::StatusOr<std::unique_ptr<QueryWatch>> Create(AttentionPolicy* policy, int layers,
                                                            int heads, int head_dim,
                                                            Device* device);
  // [heads * head_dim], after RoPE. REQUIRES: the step is done.
  absl::Span<const float> real(int layer) const { return Row(real_, layer); }
  absl::Span<const float> predicted(int layer) const { return Row(predicted_, layer); }
  // Returns the cosine of the two, mean over query heads; that of a query of length 0 is 0.
  double MeanCosine(int layer) const;

  bool LooksAhead(int /*layer*/) const override { return true; }
  void Ahead(Stream& stream, int layer, const Queries& predicted) override;
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override;

 private:
  QueryWatch(AttentionPolicy* policy, int heads, int head_dim, Buffer real, Buffer predicted)
      : ForwardingPolicy(policy),
        head_dim_(head_dim),
        size_(heads * head_dim),
        real_(std::move(real)),
        predicted_(std::move(predicted)) {}
  float* At(const Buffer& buffer, int layer) const { return buffer.as<float>() + layer * size_; }
  absl::Span<const float> Row(const Buffer& buffer, int layer) const {
    return {At(buffer, layer), static_cast<size_t>(size_)};
  }

  const int head_dim_, size_;      // size_ is heads * head_dim
  const Buffer real_, predicted_;  // pinned, [layers][size_]
};

}  // namespace sluice::bench
