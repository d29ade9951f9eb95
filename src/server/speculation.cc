#include "src/server/speculation.h"

#include "absl/strings/str_cat.h"
#include "kernels/draft_params.h"
#include "src/base/status_macros.h"
#include "src/engine/mtp_drafter.h"
#include "src/engine/ngram_drafter.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

constexpr char kNone[] = "none";
constexpr char kNgram[] = "ngram";
constexpr char kMtp[] = "mtp";
constexpr char kAuto[] = "auto";

bool VerifiesDrafts(const std::string& policy) {
  return policy == "full" || policy == "ess" || policy == "auto";
}

bool Speculates(const Config& config) {
  return config.speculation() == kNgram || config.speculation() == kMtp ||
         config.speculation() == kAuto;
}

bool UsesDraftLayer(const Config& config) {
  return config.speculation() == kMtp || config.speculation() == kAuto;
}

}  // namespace

absl::Status ResolveSpeculation(Config* config) {
  if (config->speculation() != kAuto) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(config->model()));
  if (!VerifiesDrafts(config->policy()) || !HasDraftLayer(model)) config->set_speculation(kNone);
  return absl::OkStatus();
}

void SettleSpeculation(const Model& model, Config* config) {
  if (config->speculation() != kAuto) return;
  const bool drafts = model.drafts() && VerifiesDrafts(config->policy());
  config->set_speculation(drafts ? kMtp : kNone);
}

int DraftTokensOf(const Config& config) {
  return Speculates(config) ? static_cast<int>(config.speculation_tokens()) : 0;
}

Model::Options::DraftLayer DraftLayerOf(const Config& config) {
  using DraftLayer = Model::Options::DraftLayer;
  return config.speculation() == kMtp    ? DraftLayer::kRequired
         : config.speculation() == kAuto ? DraftLayer::kIfThere
                                         : DraftLayer::kNone;
}

std::unique_ptr<Drafter> NewDrafter(const Config& config) {
  SLUICE_CHECK(config.speculation() != kAuto);
  if (config.speculation() == kNgram) return NewNgramDrafter();
  return config.speculation() == kMtp ? NewMtpDrafter() : nullptr;
}

absl::Status CheckSpeculation(const Config& config) {
  if (UsesDraftLayer(config) && config.speculation_tokens() > kernels::kMaxDeviceDrafts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "speculation_tokens: expected at most ", kernels::kMaxDeviceDrafts, " with speculation ",
        config.speculation(), ", found ", config.speculation_tokens()));
  }
  if (DraftTokensOf(config) == 0 || config.speculation() == kAuto ||
      VerifiesDrafts(config.policy())) {
    return absl::OkStatus();
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
