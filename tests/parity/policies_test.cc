// Every policy where it must be exact: with a budget that covers the context it gives what policy
// full gives, on every path, from prompts computed here and from caches handed over.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/parity/teacher.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::CheckTeacherForced;
using testing::CheckTogether;
using testing::Generated;
using testing::GreedyRequest;
using testing::HasPath;
using testing::kCuda;
using testing::kExact;
using testing::Node;
using testing::NodeOptions;
using testing::Teacher;
using testing::TogetherOptions;
using testing::ToleranceOf;

struct Case {
  std::string name;      // Name in the test's output.
  PolicyOptions policy;  // Name and settings.

  // Returns a function for a Teacher, which has filled in the rest of the options.
  std::function<void(PolicyOptions&)> choose() const {
    return [settings = policy](PolicyOptions& options) {
      const PolicyOptions rest = options;
      options = settings;
      options.device = rest.device;
      options.hbm = rest.hbm;
      options.dram = rest.dram;
      options.slots = rest.slots;
      options.max_context = rest.max_context;
      options.heads = rest.heads;
    };
  }
};

PolicyOptions Covering(const std::string& name) {
  PolicyOptions policy;
  policy.name = name;
  policy.budget_tokens = 1024;
  return policy;
}

// Returns each policy as it is by default, with a budget that every sequence fits: whatever a
// score, a margin or a prediction says, a row attends to everything.
std::vector<Case> FittingCases() {
  std::vector<Case> cases;
  for (const char* name : {"scout", "recall", "hgca", "clo"}) {
    Case c{std::string(name) + " as it is, fitting", Covering(name)};
    c.policy.dense_layers = 0;
    c.policy.workers = 2;
    c.policy.worker_deadline = absl::Seconds(60);
    c.policy.hgca.window_tokens = 1024;
    cases.push_back(c);
  }
  return cases;
}

// Returns the cases whose selection covers everything.
std::vector<Case> ExactCases() {
  std::vector<Case> cases = FittingCases();
  for (const int dense_layers : {0, 1}) {
    Case c{"oracle, dense layers " + std::to_string(dense_layers), Covering("oracle")};
    c.policy.dense_layers = dense_layers;
    cases.push_back(c);
    c.name += ", by digests";
    c.policy.oracle.selector = PolicyOptions::Oracle::Selector::kDigest;
    cases.push_back(c);
    // Half of a long prompt is in HBM; the CPU attends to the other half and gets the real queries.
    Case scout{"scout, dense layers " + std::to_string(dense_layers), Covering("scout")};
    scout.policy.dense_layers = dense_layers;
    scout.policy.workers = 2;
    scout.policy.worker_deadline = absl::Seconds(60);
    scout.policy.scout.layer_ahead = false;
    scout.policy.scout.resident_tokens = 64;
    cases.push_back(scout);
  }
  return cases;
}

// Returns those and the other policies: a small window with all else on the CPU; everything
// fetched.
std::vector<Case> EveryExactCase() {
  std::vector<Case> cases = ExactCases();
  Case hgca{"hgca, beta 0", Covering("hgca")};
  hgca.policy.dense_layers = 0;
  hgca.policy.workers = 2;
  hgca.policy.worker_deadline = absl::Seconds(60);
  hgca.policy.hgca.window_tokens = 64;
  hgca.policy.hgca.beta = 0;
  cases.push_back(hgca);
  for (const bool fetch_all : {false, true}) {
    Case recall{fetch_all ? "recall, fetching all" : "recall", Covering("recall")};
    recall.policy.dense_layers = 0;
    recall.policy.recall.margin = std::numeric_limits<float>::infinity();
    recall.policy.recall.fetch_all = fetch_all;
    cases.push_back(recall);
  }
  return cases;
}

NodeOptions OptionsOf(const std::string& model, const std::string& path, DType kv_dtype,
                      const PolicyOptions& policy) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(model);
  options.kernels = path;
  options.kv_dtype = kv_dtype;
  options.max_context = 1024;
  options.policy = policy;
  return options;
}

// A node's answer for a golden case.
struct Answer {
  const fixtures::GoldenCase* golden;
  Generated got;
};

// Runs prompts that are computed here, and caches that are handed over whole and in part, with and
// without first tokens.
std::vector<Answer> Run(const NodeOptions& options,
                        const std::vector<fixtures::GoldenCase>& golden) {
  Node node(options);
  std::vector<Answer> out;
  for (const fixtures::GoldenCase& g : golden) {
    const auto steps = static_cast<uint32_t>(g.tokens.size());
    const auto prompt = static_cast<uint32_t>(g.prompt.size());
    out.push_back({&g, node.Generate(GreedyRequest(g.prompt, steps))});
    for (const uint32_t context : {prompt, prompt / 2}) {
      for (const size_t first : {0, 3}) {
        if (context == 0 || first + 1 > g.tokens.size() || (first > 0 && context != prompt))
          continue;
        std::vector<OutputToken> tokens(first);
        for (size_t i = 0; i < first; ++i) tokens[i].id = g.tokens[i];
        Request pushed = GreedyRequest({}, steps);
        pushed.handoff.transfer_id = node.Push(g.prompt, context, steps, g.k, g.v, tokens);
        out.push_back({&g, node.Generate(std::move(pushed))});
      }
    }
    CHECK(node.Quiescent());
  }
  return out;
}

// Checks that tokens are the same, up to one whose golden margin is at most `margin`: after a flip
// the texts differ.
void CheckSameTokens(const Answer& got, const Answer& full, double margin) {
  CHECK(got.got.finish.status.ok());
  const fixtures::GoldenCase& golden = *full.golden;
  for (size_t i = 0; i < golden.tokens.size(); ++i) {
    REQUIRE(i < std::min(got.got.ids.size(), full.got.ids.size()));
    const int32_t token = golden.tokens[i];
    if ((got.got.ids[i] != token || full.got.ids[i] != token) &&
        double{golden.margin[i]} <= margin) {
      return;
    }
    INFO("token " << i << ", margin " << golden.margin[i]);
    REQUIRE(got.got.ids[i] == full.got.ids[i]);
  }
}

constexpr double kNoMargin = -1;

void CheckTokens(const std::string& model, const std::string& path, DType kv_dtype,
                 const std::vector<Case>& cases, double margin = kNoMargin) {
  const auto golden = fixtures::LoadGolden(model);
  REQUIRE(golden.ok());
  const std::vector<Answer> full = Run(OptionsOf(model, path, kv_dtype, {}), *golden);
  for (const Case& c : cases) {
    const std::vector<Answer> got = Run(OptionsOf(model, path, kv_dtype, c.policy), *golden);
    REQUIRE(got.size() == full.size());
    for (size_t i = 0; i < full.size(); ++i) {
      INFO(path << ", " << model << ", " << c.name << ", run " << i);
      CheckSameTokens(got[i], full[i], margin);
    }
  }
}

TEST_CASE("a budget of the whole context gives full's tokens on every model") {
  for (const std::string& model : fixtures::TinyModels()) {
    CheckTokens(model, "portable", DType::kBFloat16,
                model == "tiny-qwen3" ? EveryExactCase() : ExactCases());
  }
}

TEST_CASE("a budget of the whole context gives full's tokens on every model (cuda)", "[cuda]") {
  if (!HasPath("cuda")) return;
  for (const std::string& model : fixtures::TinyModels()) {
    CheckTokens(model, "cuda", DType::kBFloat16, EveryExactCase(), kCuda.margin);
  }
}

TEST_CASE("a budget of the whole context gives full's tokens on every path") {
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    CheckTokens("tiny-qwen3", table->name, DType::kBFloat16,
                {FittingCases()[0], ExactCases().back()});
  }
}

TEST_CASE("a budget of the whole context gives full's tokens from float32 caches") {
  CheckTokens("tiny-qwen3", "portable", DType::kFloat32, {FittingCases()[1], ExactCases().back()});
}

TEST_CASE("a budget of the whole context gives transformers' logits") {
  for (const std::string& model : fixtures::TinyModels()) {
    const auto golden = fixtures::LoadGolden(model);
    REQUIRE(golden.ok());
    for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
      const bool exact = std::string(table->name) == "reference";
      const Case c = ExactCases()[exact ? 3 : 4];
      INFO(table->name << ", " << model << ", " << c.name);
      Teacher teacher(fixtures::ModelDir(model), table->name,
                      exact ? DType::kFloat32 : DType::kBFloat16, c.choose());
      CheckTeacherForced(teacher, golden->front(), exact ? kExact : ToleranceOf(table->name),
                         /*from_cache=*/!exact);
    }
  }
}

TEST_CASE("a budget of the whole context gives transformers' logits (cuda)", "[cuda]") {
  if (!HasPath("cuda")) return;
  for (const std::string& model : fixtures::TinyModels()) {
    const auto golden = fixtures::LoadGolden(model);
    REQUIRE(golden.ok());
    for (const Case& c : EveryExactCase()) {
      INFO(model << ", " << c.name);
      Teacher teacher(fixtures::ModelDir(model), "cuda", DType::kBFloat16, c.choose());
      CheckTeacherForced(teacher, golden->front(), kCuda, /*from_cache=*/true);
    }
  }
}

void CheckEveryPolicyTogether(const std::string& path) {
  std::vector<Case> cases;
  for (const int selector : {0, 1, 2, 3}) {
    Case c{"oracle, selector " + std::to_string(selector), Covering("oracle")};
    c.policy.oracle.selector = static_cast<PolicyOptions::Oracle::Selector>(selector);
    c.policy.budget_tokens = 96;
    c.policy.dense_layers = 1;
    cases.push_back(c);
  }
  for (const int dense_layers : {0, 1}) {
    Case c{"scout, dense layers " + std::to_string(dense_layers), Covering("scout")};
    c.policy.budget_tokens = 96;
    c.policy.dense_layers = dense_layers;
    c.policy.workers = 1 + dense_layers;
    c.policy.worker_deadline = absl::Seconds(60);  // A busy machine is no fault.
    cases.push_back(c);
  }
  Case hgca{"hgca", Covering("hgca")};
  hgca.policy.dense_layers = 1;
  hgca.policy.workers = 2;
  hgca.policy.worker_deadline = absl::Seconds(60);
  hgca.policy.hgca.window_tokens = 64;
  cases.push_back(hgca);
  Case recall{"recall", Covering("recall")};
  recall.policy.dense_layers = 1;
  recall.policy.budget_tokens = 96;
  cases.push_back(recall);
  for (const Case& c : cases) {
    INFO(c.name);
    NodeOptions options = TogetherOptions(path);
    options.policy = c.policy;
    CheckTogether(options);
  }
}

TEST_CASE("under every policy sixteen sequences together give exactly what each gives alone") {
  CheckEveryPolicyTogether("auto");
}

TEST_CASE("under every policy sixteen sequences together give exactly what each gives alone (cuda)",
          "[cuda]") {
  if (HasPath("cuda")) CheckEveryPolicyTogether("cuda");
}

}  // namespace
}  // namespace sluice
