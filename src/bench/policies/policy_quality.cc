#include "src/bench/policies/policy_quality.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/dictation.h"

namespace sluice::bench {
namespace {

constexpr char kFull[] = "full";
constexpr int kFewestBlocks = 4;

class QualityRun {
 public:
  QualityRun(const PolicyWorld& world, const QualityOptions& options, ContextMaker* contexts,
             const std::function<void(const std::string&)>& progress)
      : world_(world), options_(options), contexts_(contexts), progress_(progress) {}

  absl::Status Text(const QualityTexts::Text& text, std::vector<PolicyQuality>* out) {
    const auto prompt = static_cast<size_t>(options_.context);
    const size_t steps = std::min(static_cast<size_t>(options_.steps), text.ids.size() - prompt);
    SLUICE_ASSIGN_OR_RETURN(
        const Context context,
        contexts_->Compute({text.ids.begin(), text.ids.begin() + static_cast<ptrdiff_t>(prompt)}));
    const absl::Span<const int32_t> next = absl::MakeConstSpan(text.ids).subspan(prompt, steps);
    SLUICE_ASSIGN_OR_RETURN(const std::vector<StepLogits> full, Dictate(kFull, context, next));
    progress_(absl::StrCat(text.name, ", full"));
    for (PolicyQuality& quality : *out) {
      SLUICE_ASSIGN_OR_RETURN(
          const std::vector<StepLogits> found,
          quality.policy == kFull ? full : Dictate(quality.policy, context, next));
      for (size_t i = 0; i < steps; ++i) quality.distance.Add(full[i], found[i], next[i]);
      progress_(absl::StrCat(text.name, ", ", quality.policy));
    }
    return absl::OkStatus();
  }

  absl::Status Passkey(const QualityTexts::Passkey& passkey, std::vector<PolicyQuality>* out) {
    SLUICE_ASSIGN_OR_RETURN(const Context context, contexts_->Compute(passkey.ids));
    SLUICE_ASSIGN_OR_RETURN(const bool full, Finds(kFull, context, passkey.answer));
    for (PolicyQuality& quality : *out) {
      SLUICE_ASSIGN_OR_RETURN(
          const bool found,
          quality.policy == kFull ? full : Finds(quality.policy, context, passkey.answer));
      ++quality.passkeys;
      quality.found += found ? 1 : 0;
      quality.found_full += full ? 1 : 0;
      quality.lost += full && !found ? 1 : 0;
    }
    progress_(absl::StrCat("pass key, ", passkey.name, full ? "" : ": full does not find it"));
    return absl::OkStatus();
  }

 private:
  // A policy with a budget for one context, and a sequence of that context.
  struct Sequence {
    std::unique_ptr<AttentionPolicy> policy;
    std::unique_ptr<Dictation> dictation;
  };
  absl::StatusOr<std::unique_ptr<Sequence>> Begin(const std::string& policy, const Context& context,
                                                  size_t more) {
    const auto tokens = static_cast<int>(context.tokens.size());
    PolicyWorld world = world_;
    const int block = world.model->cache_layout().kinds[0].block_tokens;
    world.options.budget_tokens = QualityBudget(tokens, options_.budget_share, block);
    // HGCA's window and CPU set share the budget.
    world.options.hgca.window_tokens =
        std::max(2 * block, world.options.budget_tokens / 2 / block * block);
    auto sequence = std::make_unique<Sequence>();
    SLUICE_ASSIGN_OR_RETURN(sequence->policy, SetUpPolicy(world, policy));
    SLUICE_ASSIGN_OR_RETURN(sequence->dictation,
                            Dictation::Create({world.device, world.model, sequence->policy.get(),
                                               world.dram, world.max_context}));
    SLUICE_RETURN_IF_ERROR(
        sequence->dictation->Begin(context, tokens + static_cast<int>(more) + 1));
    return sequence;
  }

  absl::StatusOr<std::vector<StepLogits>> Dictate(const std::string& policy, const Context& context,
                                                  absl::Span<const int32_t> next) {
    SLUICE_ASSIGN_OR_RETURN(const auto sequence, Begin(policy, context, next.size()));
    std::vector<StepLogits> out;
    for (const int32_t token : next) {
      SLUICE_ASSIGN_OR_RETURN(const auto logits, sequence->dictation->Step());
      out.push_back(NormalizeLogits(logits));
      sequence->dictation->Append(token);
    }
    return out;
  }

  // Returns whether a greedy decode gives the answer.
  absl::StatusOr<bool> Finds(const std::string& policy, const Context& context,
                             const std::vector<int32_t>& answer) {
    SLUICE_ASSIGN_OR_RETURN(const auto sequence, Begin(policy, context, answer.size()));
    for (const int32_t token : answer) {
      SLUICE_ASSIGN_OR_RETURN(const auto logits, sequence->dictation->Step());
      // The first wrong token decides; until then the dictated tokens are the chosen ones.
      if (std::max_element(logits.begin(), logits.end()) - logits.begin() != token) return false;
      sequence->dictation->Append(token);
    }
    return true;
  }

  const PolicyWorld world_;
  const QualityOptions options_;
  ContextMaker* const contexts_;
  const std::function<void(const std::string&)>& progress_;
};

}  // namespace

int QualityBudget(int context, double share, int block_tokens) {
  const auto blocks = static_cast<int>(share * context / block_tokens);
  return std::max(blocks, kFewestBlocks) * block_tokens;
}

absl::StatusOr<std::vector<PolicyQuality>> MeasureQuality(
    PolicyWorld world, const std::vector<std::string>& policies, const QualityTexts& texts,
    const QualityOptions& options, const std::function<void(const std::string&)>& progress) {
  std::vector<QualityTexts::Text> used_texts;
  std::vector<QualityTexts::Passkey> used_passkeys;
  for (const auto& text : texts.texts) {
    if (used_texts.size() == static_cast<size_t>(options.texts)) break;
    if (text.ids.size() > static_cast<size_t>(options.context)) used_texts.push_back(text);
  }
  int longest = options.context + options.steps;
  for (const auto& passkey : texts.passkeys) {
    if (used_passkeys.size() == static_cast<size_t>(options.passkeys)) break;
    used_passkeys.push_back(passkey);
    longest = std::max(longest, static_cast<int>(passkey.ids.size() + passkey.answer.size()));
  }
  if (used_texts.empty() && options.texts > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no text is longer than the context of ", options.context,
        " tokens: make longer ones (tools/sluice texts --tokens), or take a shorter --context"));
  }
  world.max_context = longest + 1;
  world.slots = 1;
  if (world.max_context > world.model->max_context()) {
    return absl::InvalidArgumentError(absl::StrCat("the model's context is ",
                                                   world.model->max_context(), " tokens, but ",
                                                   world.max_context, " are needed"));
  }
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<ContextMaker> contexts,
                          ContextMaker::Create(longest, world.device, world.model));
  std::vector<PolicyQuality> out;
  for (const std::string& policy : policies) out.push_back({policy, {}, 0, 0, 0, 0});
  QualityRun run(world, options, contexts.get(), progress);
  for (const auto& text : used_texts) SLUICE_RETURN_IF_ERROR(run.Text(text, &out));
  for (const auto& passkey : used_passkeys) SLUICE_RETURN_IF_ERROR(run.Passkey(passkey, &out));
  return out;
}

}  // namespace sluice::bench
