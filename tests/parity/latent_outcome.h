// How close a path comes to the golden results on the tiny models with latent caches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"

namespace sluice::testing {

std::vector<fixtures::GoldenCase> Golden(const std::string& name);
// Returns prompt and golden tokens as one sequence.
std::vector<int32_t> Joined(const fixtures::GoldenCase& golden);
// Returns the relative L2 difference.
double Difference(const std::vector<float>& got, const float* want);
// Returns the share of `want` that `got` has. Both are ascending.
double Recall(const std::vector<int32_t>& got, const std::vector<int32_t>& want);

struct Outcome {
  std::vector<double> steps;  // Differences of the logits, by step.
  double worst = 0;
  double median = 0;
  double recall = 0;  // Mean over all steps and layers.
  // Steps whose best token differs from the golden one, with a margin above kNearTie.
  int other_tokens = 0;
  // If lists differ from the reference's, the largest distance between the reference's scores
  // of what was left out and of what came instead, as a part of the range of scores.
  double gap = 0;
  static constexpr float kNearTie = 0.05f;
};

// Sorts the steps.
void Summarise(Outcome* out);
std::string Text(const Outcome& out);

// Bounds on how far a path may be from transformers, and from the float64 reference over the same
// packed caches and weights. Paths with float32 activations have rounded the weights of the fp8
// model to bf16, once, and so has the reference there. Measured against transformers: 0.012 (what
// bf16 caches cost) on the bf16 model, 0.027 on the fp8 one; against the reference 1e-4 on both.
// The other paths round every activation, and on a GPU the probabilities. In a random model that
// flips a router's choice now and then, which shows in a single step: measured medians 0.022, worst
// 0.108.
struct LatentBounds {
  double golden, golden_median;  // With bf16 caches and golden selections.
  double packed, packed_median;
  double overlap;  // Mean overlap of selections.
  double gap;      // For selections that differ over packed caches.
};
// Returns whether activations are float32.
bool IsWide(const std::string& path);
LatentBounds BoundsOf(const std::string& path, const std::string& model);

}  // namespace sluice::testing
