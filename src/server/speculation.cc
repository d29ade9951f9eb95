#include "src/server/speculation.h"

#include "absl/strings/str_cat.h"
#include "src/engine/ngram_drafter.h"

namespace sluice {
namespace {

constexpr char kNgram[] = "ngram";

}  // namespace

int DraftTokensOf(const Config& config) {
  return config.speculation() == kNgram ? static_cast<int>(config.speculation_tokens()) : 0;
}

std::unique_ptr<Drafter> NewDrafter(const Config& config) {
  return DraftTokensOf(config) > 0 ? NewNgramDrafter() : nullptr;
}

absl::Status CheckSpeculation(const Config& config) {
  for (const char* verifies : {"full", "ess", "auto"}) {
    if (DraftTokensOf(config) == 0 || config.policy() == verifies) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("speculation: expected none with policy ", config.policy(),
                   ", which computes one row of a sequence in a step: set it to none, or take "
                   "policy full or ess"));
}

StepRows StepRowsOf(const Config& config) {
  StepRows step;
  step.logits = static_cast<int>(config.max_sequences()) * (1 + DraftTokensOf(config));
  step.rows = step.logits + static_cast<int>(config.chunk_tokens());
  return step;
}

}  // namespace sluice
