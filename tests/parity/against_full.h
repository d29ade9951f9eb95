// A policy on the tiny models, beside policy `full` on the same tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/parity/teacher.h"

namespace sluice::testing {

// A tiny model's golden case with the longest prompt.
fixtures::GoldenCase LongestCase(const std::string& name);

// Dictates the golden tokens to both, and calls visit(logits of full, logits of the other) of every
// step.
void Dictate(
    const fixtures::GoldenCase& golden, Teacher& full, Teacher& other,
    const std::function<void(const std::vector<float>&, const std::vector<float>&)>& visit);

// A policy that has to give what full gives on every tiny model: its options for a prompt of that
// length, and what else holds after every step and, at the end, of every layer.
struct SameAsFull {
  std::function<void(PolicyOptions& options, int prompt)> options;
  std::function<void(Teacher& teacher)> step = [](Teacher&) {};
  std::function<void(const PolicyStatistics::Layer& layer)> layer;
};
// Logits within `tolerance` (relative error), and the same tokens but where the golden margin is no
// more than `margin`; prints the worst. The policy's CPU workers compute on the same path, beside a
// GPU on this machine's best.
void CheckSameAsFull(const std::string& kernels, DType kv_dtype, double tolerance,
                     const SameAsFull& check, double margin = 0.05);
// The reference with float32 caches within 1e-5, every path of this machine with bf16 ones within
// 1e-3, or 2e-2 where activations are rounded: they round anew whatever differs in a last bit.
void CheckSameAsFullOnEveryPath(const SameAsFull& check);
// On a GPU, where the weights of V are rounded too; skipped where there is none.
void CheckSameAsFullOnGpu(const SameAsFull& check);

double Cosine(const std::vector<float>& a, const std::vector<float>& b);
double RelativeError(const std::vector<float>& got, const std::vector<float>& want);
int32_t Best(const std::vector<float>& logits);

}  // namespace sluice::testing
