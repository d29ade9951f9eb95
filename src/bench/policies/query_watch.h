// Runs policy full and records its queries: the real ones of every layer, and those that the layer
// before predicted. Every policy's selection works from these.
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

  bool LooksAhead(int /*layer*/) const override { return true; }
  void Ahead(Stream& stream, int layer, const Queries& predicted) override;
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override;

 private:
  QueryWatch(AttentionPolicy* policy, int size, Buffer real, Buffer predicted)
      : ForwardingPolicy(policy),
        size_(size),
        real_(std::move(real)),
        predicted_(std::move(predicted)) {}
  float* At(const Buffer& buffer, int layer) const { return buffer.as<float>() + layer * size_; }
  absl::Span<const float> Row(const Buffer& buffer, int layer) const {
    return {At(buffer, layer), static_cast<size_t>(size_)};
  }

  const int size_;                 // heads * head_dim
  const Buffer real_, predicted_;  // pinned, [layers][size_]
};

}  // namespace sluice::bench
