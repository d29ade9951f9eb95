// One operator at one shape, which can be checked against the float64 reference and then timed.
// Weights and caches cycle through an arena larger than any CPU cache, so that they come from
// memory, as in a step of a whole model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernel_cases.h"
#include "kernels/kernel_table.h"
#include "kernels/latent_cases.h"
#include "src/base/timing.h"

namespace sluice::bench {

class TimedOperator {
 public:
  virtual ~TimedOperator() = default;
  virtual std::string name() const = 0;
  // Returns the bytes of weights or caches that one call must read once.
  virtual double bytes() const = 0;
  // Returns the multiplications and additions; 0 if they do not matter for this operator.
  virtual double flops() const = 0;
  // Calls the operator once with the whole crew, on the next operands of the arena.
  virtual void Run(Crew& crew) = 0;
  // Returns the relative L2 error of one call against the reference; the result is right if it is
  // at most allowed_error().
  virtual double Error(Crew& crew) = 0;
  virtual double allowed_error() const = 0;
};

// The arena holds bf16 values of both signs and magnitude about 1.
class OperandArena {
 public:
  explicit OperandArena(size_t bytes);
  const HugeBuffer& buffer() const { return buffer_; }
  // Returns the next `bytes` bytes, and starts again from the front if they do not fit. REQUIRES:
  // bytes <= the arena's.
  uint16_t* Next(size_t bytes);

 private:
  HugeBuffer buffer_;
  size_t at_ = 0;
};

// Fills `out` with values uniform in [-scale, scale).
void FillFloat(std::span<float> out, float scale);
// Returns ||got - want|| / ||want||.
double RelativeError(std::span<const float> got, std::span<const float> want);

// REQUIRES: the arguments outlive the result; `path` is not the reference.
std::unique_ptr<TimedOperator> NewLinear(const kernels::LinearCase& shape,
                                         const kernels::KernelTable& path, OperandArena* arena);
std::unique_ptr<TimedOperator> NewAttention(const kernels::AttentionCase& shape,
                                            const kernels::KernelTable& path, OperandArena* arena);
// REQUIRES: the path has the operator.
std::unique_ptr<TimedOperator> NewSparseAttention(const kernels::TimedSparseCase& shape,
                                                  const kernels::KernelTable& path,
                                                  OperandArena* arena);
std::unique_ptr<TimedOperator> NewLevelScores(const kernels::TimedLevelsCase& shape,
                                              const kernels::KernelTable& path);
std::unique_ptr<TimedOperator> NewSample(const kernels::SampleCase& shape,
                                         const kernels::KernelTable& path, int workers);
// Returns makers of the operators of latent attention and of experts. Each operator is made when
// its turn comes, because it takes much memory. REQUIRES: the path has them.
std::vector<std::function<std::unique_ptr<TimedOperator>()>> LatentOperators(
    const kernels::KernelTable& path, OperandArena* arena);
// Returns one layer of SmolLM2 over a prompt of `tokens` tokens: its products and causal attention,
// which are nearly all the arithmetic of a prefill. The layer is not checked as a whole; its parts
// are checked.
std::unique_ptr<TimedOperator> NewPrefillLayer(int32_t tokens, bool attention,
                                               const kernels::KernelTable& path,
                                               OperandArena* arena);

}  // namespace sluice::bench
