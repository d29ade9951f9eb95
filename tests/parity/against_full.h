// Runs a policy on the tiny models beside policy `full`, on the same tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/parity/teacher.h"

namespace sluice::testing {

// Returns a tiny model's golden case with the longest prompt.
fixtures::GoldenCase LongestCase(const std::string& name);

// Dictates the golden tokens to both teachers, and calls visit(logits of full, logits of the other)
// after every step.
void Dictate(
    const fixtures::GoldenCase& golden, Teacher& full, Teacher& other,
    const std::function<void(const std::vector<float>&, const std::vector<float>&)>& visit);

// A policy that must give what full gives on every tiny model: its options for a prompt of a given
// length, and further checks after every step and, at the end, of every layer.
struct SameAsFull {
  std::function<void(PolicyOptions& options, int prompt)> options;
  std::function<void(Teacher& teacher)> step = [](Teacher&) {};
  std::function<void(const PolicyStatistics::Layer& layer)> layer;
};
// Checks that logits are within `tolerance` (relative error) of full's, and that tokens are the
// same unless the golden margin is at most `margin`; prints the worst. The policy's CPU workers
// compute on the same path; with a GPU they compute on this machine's best path.
void CheckSameAsFull(const std::string& kernels, DType kv_dtype, double tolerance,
                     const SameAsFull& check, double margin = 0.05);
// Checks the reference with float32 caches to 1e-5, and every path of this machine with bf16 caches
// to 1e-3, or to 2e-2 where activations are rounded: such paths round anew whatever differs in a
// last bit.
void CheckSameAsFullOnEveryPath(const SameAsFull& check);
// Checks on a GPU, where the weights of V are rounded too; skipped if there is none.
void CheckSameAsFullOnGpu(const SameAsFull& check);

double Cosine(const std::vector<float>& a, const std::vector<float>& b);
double RelativeError(const std::vector<float>& got, const std::vector<float>& want);
int32_t Best(const std::vector<float>& logits);

}  // namespace sluice::testing
