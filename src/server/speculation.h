// The settings `speculation` and `speculation_tokens`: what a decode node makes of them.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "src/config/setting.h"
#include "src/engine/drafter.h"

namespace sluice {

// Returns the maximum drafts of a sequence in a step; 0: the node does not speculate.
int DraftTokensOf(const Config& config);

// Returns what drafts; null: the node does not speculate.
std::unique_ptr<Drafter> NewDrafter(const Config& config);

// Returns INVALID_ARGUMENT, naming both settings, if the node is to speculate under a policy that
// verifies no drafts. Policy auto passes: what it takes is known only when it has taken it, and
// then the engine refuses it.
absl::Status CheckSpeculation(const Config& config);

// The rows of a decode node's steps: one for every sequence with its drafts and, beside them, a
// chunk of pending prompts.
struct StepRows {
  int rows = 0;
  int logits = 0;
};
StepRows StepRowsOf(const Config& config);

}  // namespace sluice
