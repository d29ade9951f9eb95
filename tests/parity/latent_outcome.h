// How near a path comes on the tiny models with latent caches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"

namespace sluice::testing {

std::vector<fixtures::GoldenCase> Golden(const std::string& name);
// Prompt and golden tokens.
std::vector<int32_t> Joined(const fixtures::GoldenCase& golden);
// Relative L2.
double Difference(const std::vector<float>& got, const float* want);
// The share of `want` that `got` has; both ascending.
double Recall(const std::vector<int32_t>& got, const std::vector<int32_t>& want);

struct Outcome {
  std::vector<double> steps;  // the logits' differences
  double worst = 0;
  double median = 0;
  double recall = 0;     // of all steps and layers
  int other_tokens = 0;  // steps whose best token is another, with a margin above kNearTie
  // Where another list was selected than by the reference: between the reference's scores of what
  // was left out and of what came instead, in parts of the range of scores, at most.
  double gap = 0;
  static constexpr float kNearTie = 0.05f;
};

// Sorts the steps.
void Summarise(Outcome* out);
std::string Text(const Outcome& out);

// How far a path may be from transformers, and from the float64 reference over the same packed
// caches and weights. Paths with float32 activations have rounded the weights of the fp8 model to
// bf16, once, and so has the reference there; measured against transformers 0.012 (what bf16 caches
// cost) on the bf16 model, 0.027 on the fp8 one; against the reference 1e-4 on both. The others
// round every activation, and on a GPU the probabilities; in a random model that turns over a
// router's choice now and then, which shows in a single step: measured medians 0.022, worst 0.108.
struct LatentBounds {
  double golden, golden_median;  // bf16 caches, golden selections
  double packed, packed_median;
  double overlap;  // of selections, mean
  double gap;      // of selections that differ over packed caches
};
// Whether activations are float32.
bool IsWide(const std::string& path);
LatentBounds BoundsOf(const std::string& path, const std::string& model);

}  // namespace sluice::testing
