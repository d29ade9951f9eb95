// The settings `speculation` and `speculation_tokens`: what a decode node makes of them.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "src/config/setting.h"
#include "src/engine/drafter.h"
#include "src/model/model.h"

namespace sluice {

// Replaces `auto` by `none` where the policy verifies no drafts or config.json has no next-token
// layer. Otherwise it stays until the weights are there: see SettleSpeculation. Returns the errors
// of LoadModelConfig.
absl::Status ResolveSpeculation(Config* config);

// Replaces `auto` by `mtp` or `none`, by what the loaded model has and what the policy is, which is
// no longer auto.
void SettleSpeculation(const Model& model, Config* config);

// Returns the maximum drafts of a sequence in a step; 0: the node does not speculate.
int DraftTokensOf(const Config& config);

// Returns whether the model's draft layer is to be loaded.
Model::Options::DraftLayer DraftLayerOf(const Config& config);

// Returns what drafts; null: the node does not speculate. REQUIRES: `speculation` is not auto.
std::unique_ptr<Drafter> NewDrafter(const Config& config);

// Returns INVALID_ARGUMENT, naming the settings, if the node is to speculate under a policy that
// verifies no drafts, or with more drafts than a draft layer makes. Policy auto passes: what it
// takes is known only when it has taken it, and then the engine refuses it.
absl::Status CheckSpeculation(const Config& config);

// The rows of a decode node's steps: one for every sequence with its drafts and, beside them, a
// chunk of pending prompts.
struct StepRows {
  int rows = 0;
  int logits = 0;
};
StepRows StepRowsOf(const Config& config);

}  // namespace sluice
