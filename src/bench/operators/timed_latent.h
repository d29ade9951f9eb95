// Helpers of the timed operators of latent attention and of experts.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "src/bench/operators/timed_operator.h"

namespace sluice::bench {

// Calls an operator once with the whole crew.
template <typename Params>
void RunAll(Crew& crew, void (*kernel)(const Params&, kernels::Worker), const Params& p) {
  const std::function<void(int)> job = [&](int i) { kernel(p, {i, crew.count()}); };
  crew.Run(job);
}

// Random values, readable in both types of activations.
class LatentActivations {
 public:
  LatentActivations(size_t count, kernels::DType type)
      : floats_(count), halves_(count), type_(type) {
    FillFloat(floats_, 1.0f);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &floats_[i], 4);
      halves_[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  const void* data() const {
    return type_ == kernels::DType::kFloat32 ? static_cast<const void*>(floats_.data())
                                             : halves_.data();
  }

 private:
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
  const kernels::DType type_;
};

// Returns the operators of timed_experts.cc: products of heads and of experts.
std::vector<std::function<std::unique_ptr<TimedOperator>()>> ProductOperators(
    const kernels::KernelTable& path, OperandArena* arena);

}  // namespace sluice::bench
