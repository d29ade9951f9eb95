#include "src/bench/policies/policy_quality.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/query_watch.h"
#include "src/bench/policies/query_feed.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/dictation.h"

namespace sluice::bench {
namespace {

constexpr char kFull[] = "full";
constexpr char kOracle[] = "oracle";
constexpr int kFewestBlocks = 4;
// How often a step is computed so that what it selects is resident in the last of them: the first
// selects, the second fetches, and the others let averages and the choice of later layers settle.
constexpr int kSettlingSteps = 4;

// The queries of `full` at every step of an answer, each [layers][heads * head_dim].
using FullQueries = std::vector<std::vector<float>>;

// A policy with a budget for one context, and a sequence of that context.
struct Sequence {
  std::unique_ptr<AttentionPolicy> policy;
  std::unique_ptr<QueryFeed> feed;  // Null: the policy sees the predicted queries.
  std::unique_ptr<QueryWatch> watch;
  std::unique_ptr<Dictation> dictation;
};

// How a case is run.
struct Variation {
  const FullQueries* feed = nullptr;  // Queries in place of the predicted ones.
  int repeats = 1;                    // How often each step is computed.
  FullQueries* watch = nullptr;       // Receives the queries; for `full` alone.
};

class QualityRun {
 public:
  QualityRun(const PolicyWorld& world, const QualityOptions& options, ContextMaker* contexts,
             const QualityProgress& progress, int cases, QualityResult* out)
      : world_(world),
        options_(options),
        contexts_(contexts),
        progress_(progress),
        cases_(cases),
        out_(out) {}

  absl::Status Text(const QualityTexts::Text& text) {
    const auto prompt = static_cast<size_t>(options_.context);
    const size_t steps = std::min(static_cast<size_t>(options_.steps), text.ids.size() - prompt);
    Tell("prompts", text.name);
    SLUICE_ASSIGN_OR_RETURN(
        const Context context,
        contexts_->Compute({text.ids.begin(), text.ids.begin() + static_cast<ptrdiff_t>(prompt)}));
    const absl::Span<const int32_t> next = absl::MakeConstSpan(text.ids).subspan(prompt, steps);
    Tell(kFull, text.name);
    SLUICE_ASSIGN_OR_RETURN(const std::vector<StepLogits> full, Dictate(kFull, 1, context, next));
    for (PolicyQuality& quality : out_->policies) {
      Tell(quality.policy, text.name);
      SLUICE_ASSIGN_OR_RETURN(const std::vector<StepLogits> found,
                              quality.policy == kFull
                                  ? full
                                  : Dictate(quality.policy, quality.budget_share, context, next));
      PolicyQuality::Text& measured = quality.texts.emplace_back();
      measured.name = text.name;
      measured.kind = text.kind;
      for (size_t i = 0; i < steps; ++i) measured.distance.Add(full[i], found[i], next[i]);
    }
    ++done_;
    return absl::OkStatus();
  }

  absl::Status Passkey(const QualityTexts::Passkey& passkey) {
    Tell("prompts", passkey.name);
    PasskeyCase& made = out_->passkeys.emplace_back();
    made.name = passkey.name;
    made.kind = passkey.kind;
    made.variant = passkey.variant;
    made.tokens = static_cast<int>(passkey.ids.size());
    made.depth = passkey.depth;
    const auto answer_tokens = static_cast<int>(passkey.answer.size());
    SLUICE_ASSIGN_OR_RETURN(const Context context, contexts_->Compute(passkey.ids));
    Tell(kFull, passkey.name);
    FullQueries queries;
    SLUICE_ASSIGN_OR_RETURN(const int right,
                            Right(kFull, 1, context, passkey.answer,
                                  {nullptr, 1, options_.blame ? &queries : nullptr}));
    made.full = right == answer_tokens;
    made.full_right = right;
    for (size_t i = 0; i < out_->policies.size() && made.full; ++i) {
      const PolicyQuality& quality = out_->policies[i];
      PasskeyOutcome& outcome = made.outcomes.emplace_back();
      outcome.policy = i;
      outcome.right = right;
      if (quality.policy != kFull) {
        outcome.budget_tokens = QualityBudget(made.tokens, quality.budget_share, BlockTokens());
        Tell(quality.policy, passkey.name);
        SLUICE_ASSIGN_OR_RETURN(outcome.right, Right(quality.policy, quality.budget_share, context,
                                                     passkey.answer, {}));
      }
      outcome.found = outcome.right == answer_tokens;
    }
    for (PasskeyOutcome& outcome : made.outcomes) {
      if (outcome.found || !options_.blame) continue;
      Tell("blame", passkey.name);
      SLUICE_ASSIGN_OR_RETURN(outcome.blame, Why(outcome, context, passkey.answer, queries));
    }
    ++done_;
    return absl::OkStatus();
  }

 private:
  void Tell(const std::string& phase, const std::string& detail) const {
    progress_(phase, detail, static_cast<double>(done_) / std::max(cases_, 1), *out_);
  }
  int BlockTokens() const { return world_.model->cache_layout().kinds[0].block_tokens; }

  // Returns the world of one sequence of `context` that grows by `more` tokens.
  PolicyWorld WorldOf(double share, const Context& context, size_t more) const {
    const auto tokens = static_cast<int>(context.tokens.size());
    PolicyWorld world = world_;
    world.max_context = tokens + static_cast<int>(more) + 1;
    const int block = BlockTokens();
    world.options.budget_tokens = QualityBudget(tokens, share, block);
    // HGCA's window and CPU set share the budget.
    world.options.hgca.window_tokens =
        std::max(2 * block, world.options.budget_tokens / 2 / block * block);
    return world;
  }

  absl::StatusOr<std::unique_ptr<Sequence>> Begin(const std::string& policy, double share,
                                                  const Context& context, size_t more,
                                                  const Variation& variation) {
    PolicyWorld world = WorldOf(share, context, more);
    // Scout would leave up to its share limit to the CPU, however often a step is computed.
    if (variation.repeats > 1) {
      world.options.scout.intervals.assign(static_cast<size_t>(world.model->config().layers), 1);
    }
    auto sequence = std::make_unique<Sequence>();
    SLUICE_ASSIGN_OR_RETURN(sequence->policy, SetUpPolicy(world, policy));
    AttentionPolicy* outer = sequence->policy.get();
    const ModelConfig& config = world.model->config();
    if (variation.feed != nullptr) {
      SLUICE_ASSIGN_OR_RETURN(sequence->feed, QueryFeed::Create(outer, config.layers, config.heads,
                                                                config.head_dim, world.device));
      outer = sequence->feed.get();
      sequence->feed->Set(variation.feed->front());  // Rehearsals come before the first step.
    }
    if (variation.watch != nullptr) {
      SLUICE_ASSIGN_OR_RETURN(
          sequence->watch,
          QueryWatch::Create(outer, config.layers, config.heads, config.head_dim, world.device));
      outer = sequence->watch.get();
    }
    SLUICE_ASSIGN_OR_RETURN(
        sequence->dictation,
        Dictation::Create({world.device, world.model, outer, world.dram, world.max_context}));
    SLUICE_RETURN_IF_ERROR(sequence->dictation->Begin(context, world.max_context));
    return sequence;
  }

  absl::StatusOr<std::vector<StepLogits>> Dictate(const std::string& policy, double share,
                                                  const Context& context,
                                                  absl::Span<const int32_t> next) {
    SLUICE_ASSIGN_OR_RETURN(const auto sequence, Begin(policy, share, context, next.size(), {}));
    std::vector<StepLogits> out;
    for (const int32_t token : next) {
      SLUICE_ASSIGN_OR_RETURN(const auto logits, sequence->dictation->Step());
      out.push_back(NormalizeLogits(logits));
      sequence->dictation->Append(token);
    }
    return out;
  }

  // Returns how many tokens of the answer a greedy decode gives before the first wrong one.
  absl::StatusOr<int> Right(const std::string& policy, double share, const Context& context,
                            const std::vector<int32_t>& answer, const Variation& variation) {
    SLUICE_ASSIGN_OR_RETURN(const auto sequence,
                            Begin(policy, share, context, answer.size(), variation));
    int right = 0;
    for (const int32_t token : answer) {
      if (variation.feed != nullptr) {
        sequence->feed->Set((*variation.feed)[static_cast<size_t>(right)]);
      }
      absl::Span<const float> logits;
      for (int i = 0; i < variation.repeats; ++i) {
        SLUICE_ASSIGN_OR_RETURN(logits, sequence->dictation->Step());
      }
      if (variation.watch != nullptr) {
        std::vector<float>& queries = variation.watch->emplace_back();
        for (int layer = 0; layer < world_.model->config().layers; ++layer) {
          const absl::Span<const float> real = sequence->watch->real(layer);
          queries.insert(queries.end(), real.begin(), real.end());
        }
      }
      // Until the first wrong token the dictated tokens are the chosen ones.
      if (std::max_element(logits.begin(), logits.end()) - logits.begin() != token) break;
      sequence->dictation->Append(token);
      ++right;
    }
    return right;
  }

  // Returns why the newest case's key was lost. REQUIRES: the case has its outcomes.
  absl::StatusOr<Blame> Why(const PasskeyOutcome& lost, const Context& context,
                            const std::vector<int32_t>& answer, const FullQueries& queries) {
    const PolicyQuality& quality = out_->policies[lost.policy];
    const auto finds = [&](const std::string& policy,
                           const Variation& variation) -> absl::StatusOr<bool> {
      SLUICE_ASSIGN_OR_RETURN(const int right,
                              Right(policy, quality.budget_share, context, answer, variation));
      return right == static_cast<int>(answer.size());
    };
    BlameEvidence evidence;
    bool ahead = false;
    {
      SLUICE_ASSIGN_OR_RETURN(
          const auto policy,
          SetUpPolicy(WorldOf(quality.budget_share, context, answer.size()), quality.policy));
      const WorkerStatistics workers = policy->Workers();
      evidence.workers = workers.workers > 0 && workers.duty == WorkerDuty::kAttend;
      for (int layer = 0; layer < world_.model->config().layers; ++layer) {
        ahead |= policy->kv_attention()->LooksAhead(layer);
      }
    }
    if (ahead) {
      SLUICE_ASSIGN_OR_RETURN(evidence.real, finds(quality.policy, {&queries, 1}));
    }
    SLUICE_ASSIGN_OR_RETURN(evidence.settled, finds(quality.policy, {nullptr, kSettlingSteps}));
    if (ahead && !evidence.real && !evidence.settled) {
      SLUICE_ASSIGN_OR_RETURN(evidence.both, finds(quality.policy, {&queries, kSettlingSteps}));
    }
    if (evidence.real || evidence.settled || evidence.both) return BlameOf(evidence);
    for (const PasskeyOutcome& outcome : out_->passkeys.back().outcomes) {
      const PolicyQuality& other = out_->policies[outcome.policy];
      if (other.policy != kOracle || other.budget_share != quality.budget_share) continue;
      evidence.oracle = outcome.found;
      return BlameOf(evidence);
    }
    SLUICE_ASSIGN_OR_RETURN(evidence.oracle, finds(kOracle, {}));
    return BlameOf(evidence);
  }

  const PolicyWorld world_;
  const QualityOptions options_;
  ContextMaker* const contexts_;
  const QualityProgress& progress_;
  const int cases_;
  QualityResult* const out_;
  int done_ = 0;
};

// Returns the rows of the tables: each policy at each budget.
std::vector<PolicyQuality> Rows(const std::vector<std::string>& policies,
                                const std::vector<double>& shares) {
  std::vector<PolicyQuality> out;
  for (const std::string& policy : policies) {
    if (policy == kFull) {
      out.push_back({policy, 1, {}});
      continue;
    }
    for (const double share : shares) {
      out.push_back({policy, share, {}});
      if (absl::StrContains(policy, ":budget=")) break;
    }
  }
  return out;
}

}  // namespace

const char* BlameName(Blame blame) {
  static constexpr const char* kNames[kBlames] = {"none", "score", "age", "query", "cpu", "budget"};
  return kNames[static_cast<size_t>(blame)];
}

Blame BlameOf(const BlameEvidence& evidence) {
  if (evidence.real && evidence.settled) return evidence.workers ? Blame::kCpu : Blame::kAge;
  if (evidence.real || evidence.both) return Blame::kQuery;
  if (evidence.settled) return Blame::kAge;
  return evidence.oracle ? Blame::kScore : Blame::kBudget;
}

Distance PolicyQuality::All() const {
  Distance all;
  for (const Text& text : texts) all.Add(text.distance);
  return all;
}

int QualityBudget(int context, double share, int block_tokens) {
  const auto blocks = static_cast<int>(share * context / block_tokens);
  return std::max(blocks, kFewestBlocks) * block_tokens;
}

absl::StatusOr<QualityResult> MeasureQuality(PolicyWorld world,
                                             const std::vector<std::string>& policies,
                                             const QualityTexts& texts,
                                             const QualityOptions& options,
                                             const QualityProgress& progress) {
  std::vector<QualityTexts::Text> used_texts;
  for (const auto& text : texts.texts) {
    if (used_texts.size() == static_cast<size_t>(options.texts)) break;
    if (text.ids.size() > static_cast<size_t>(options.context)) used_texts.push_back(text);
  }
  if (used_texts.empty() && options.texts > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no text is longer than the context of ", options.context,
        " tokens: make longer ones (tools/sluice texts --tokens), or take shorter --contexts"));
  }
  const size_t passkeys = std::min(texts.passkeys.size(), static_cast<size_t>(options.passkeys));
  int longest = used_texts.empty() ? 0 : options.context + options.steps;
  for (size_t i = 0; i < passkeys; ++i) {
    const auto& passkey = texts.passkeys[i];
    longest = std::max(longest, static_cast<int>(passkey.ids.size() + passkey.answer.size()));
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
  QualityResult out;
  out.context = options.context;
  out.policies = Rows(policies, options.budget_shares);
  QualityRun run(world, options, contexts.get(), progress,
                 static_cast<int>(used_texts.size() + passkeys), &out);
  for (size_t i = 0; i < passkeys; ++i) {
    SLUICE_RETURN_IF_ERROR(run.Passkey(texts.passkeys[i]));
  }
  for (const auto& text : used_texts) SLUICE_RETURN_IF_ERROR(run.Text(text));
  return out;
}

}  // namespace sluice::bench
