// Speculation on every tiny model and kernel path: tokens and log-probabilities are those without
// it, to the bit, under every policy that verifies drafts: full, ess and offload-naive.
#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/engine/mtp_drafter.h"
#include "src/engine/ngram_drafter.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/support/guessing_drafter.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::CheckSame;
using testing::Generated;
using testing::GreedyRequest;
using testing::GuessingDrafter;
using testing::HasPath;
using testing::Node;
using testing::NodeOptions;

constexpr int kTokens = 40;

// Says what nodes are compared with: drafts of a sequence in a step, and how much longer each
// prompt is.
struct Case {
  int drafts = 5;
  int longer = 70;
};

std::vector<Request> Requests(const Case& c, int32_t vocab) {
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 5 + i * c.longer; ++t) prompt.push_back((t * 7919 + i * 104729) % vocab);
    Request request = GreedyRequest(std::move(prompt), kTokens);
    if (i % 2 == 1) {
      request.sampling.temperature = 0.9f;
      request.sampling.seed = static_cast<uint64_t>(i);
      request.sampling.repetition_penalty = 1.2f;
      request.sampling.frequency_penalty = 0.3f;
    }
    request.sampling.logprobs = 2;
    requests.push_back(std::move(request));
  }
  return requests;
}

// Returns how many drafts were accepted.
uint32_t CheckDrafter(const Case& c, NodeOptions options, Drafter* drafter,
                      const std::vector<Request>& requests, const std::vector<Generated>& want) {
  options.drafter = drafter;
  options.draft_tokens = c.drafts;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  uint32_t accepted = 0;
  for (size_t i = 0; i < streams.size(); ++i) {
    INFO("drafter " << drafter->name() << ", sequence " << i);
    const Generated got = Node::Collect(*streams[i]);
    CheckSame(got, want[i]);
    accepted += got.finish.accepted_tokens;
  }
  CHECK(node.Quiescent());
  return accepted;
}

void CheckNode(NodeOptions options, const Case& c = {}) {
  options.max_context = 512;
  std::vector<Request> requests;
  std::vector<Generated> want;
  GuessingDrafter::Options guess;
  {
    Node plain(options);
    guess.vocab = plain.model().config().vocab_size;
    requests = Requests(c, guess.vocab);
    for (const Request& request : requests) {
      want.push_back(plain.Generate(request));
      std::vector<int32_t>& known = guess.known.emplace_back(request.prompt);
      known.insert(known.end(), want.back().ids.begin(), want.back().ids.end());
    }
  }
  GuessingDrafter guessing(guess);
  for (const int row_bucket : {0, 8}) {
    options.row_bucket = row_bucket;
    CHECK(CheckDrafter(c, options, &guessing, requests, want) > 20);
  }
  const auto ngram = NewNgramDrafter();
  CheckDrafter(c, options, ngram.get(), requests, want);
}

// The same with drafts of the model's next-token layer.
void CheckNextTokenLayer(NodeOptions options) {
  options.max_context = 512;
  for (const Case& c : {Case{.drafts = 1}, Case{.drafts = 3}}) {
    if (options.policy.name == "ess") options.policy.rows_per_sequence = 1 + c.drafts;
    options.row_bucket = 0;
    std::vector<Request> requests;
    std::vector<Generated> want;
    {
      Node plain(options);
      requests = Requests(c, plain.model().config().vocab_size);
      for (const Request& request : requests) want.push_back(plain.Generate(request));
    }
    const auto mtp = NewMtpDrafter();
    for (const int row_bucket : {0, 8}) {
      options.row_bucket = row_bucket;
      CHECK(CheckDrafter(c, options, mtp.get(), requests, want) > 10);
    }
  }
}

// Pools hold what a step of three rows selects, 192 of up to 465 tokens, so that entries come and
// go.
NodeOptions OffloadedOptions(const std::string& path, const std::string& policy) {
  NodeOptions options;
  options.kernels = path;
  options.model_dir = fixtures::ModelDir("tiny-deepseek-v32");
  options.policy.name = policy;
  options.policy.rows_per_sequence = 3;
  options.policy.ess.sparse_memory_ratio = 0.1;
  options.policy.ess.least_places = 0;
  return options;
}

// The node without drafts has pools of the same size.
void CheckOffloaded(const std::string& path) {
  if (!HasPath(path)) return;
  const Case c = {.drafts = 2, .longer = 140};
  for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat32}) {
    INFO(path << " with caches of " << DTypeName(type));
    NodeOptions options = OffloadedOptions(path, "ess");
    options.kv_dtype = type;
    if (type == DType::kFloat8E4M3) options.model_dir = fixtures::ModelDir("tiny-deepseek-v32-fp8");
    CheckNode(options, c);
    options.policy.name = "offload-naive";
    CheckNode(options, c);
  }
  NodeOptions options = OffloadedOptions(path, "ess");
  options.model_dir = fixtures::ModelDir(fixtures::TinyDraftModels()[0]);
  CheckNextTokenLayer(options);
}

void CheckPath(const std::string& path) {
  if (!HasPath(path)) return;
  NodeOptions options;
  options.kernels = path;
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name << " on " << path);
    options.model_dir = fixtures::ModelDir(name);
    CheckNode(options);
  }
  for (const std::string& name : fixtures::TinyLatentModels()) {
    options.model_dir = fixtures::ModelDir(name);
    for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3}) {
      INFO(name << " on " << path << " with caches of " << DTypeName(type));
      options.kv_dtype = type;
      CheckNode(options);
    }
  }
  for (const std::string& name : fixtures::TinyDraftModels()) {
    options.model_dir = fixtures::ModelDir(name);
    for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3}) {
      INFO(name << " on " << path << " with caches of " << DTypeName(type));
      options.kv_dtype = type;
      CheckNextTokenLayer(options);
    }
  }
}

}  // namespace

TEST_CASE("speculation changes no bit on portable kernels") { CheckPath("portable"); }
TEST_CASE("speculation changes no bit on AVX2 kernels") { CheckPath("avx2"); }
TEST_CASE("speculation changes no bit on AVX-512 BF16 kernels") { CheckPath("avx512bf16"); }
TEST_CASE("speculation changes no bit on AMX kernels") { CheckPath("amx"); }
TEST_CASE("speculation changes no bit on a GPU", "[cuda]") { CheckPath("cuda"); }

TEST_CASE("speculation changes no bit of entries in two tiers on portable kernels") {
  CheckOffloaded("portable");
}
TEST_CASE("speculation changes no bit of entries in two tiers on AVX-512 BF16 kernels") {
  CheckOffloaded("avx512bf16");
}
TEST_CASE("speculation changes no bit of entries in two tiers on a GPU", "[cuda]") {
  CheckOffloaded("cuda");
}

TEST_CASE("a transfer lost under rows of drafts ends their sequence alone") {
  NodeOptions options = OffloadedOptions("portable", "ess");
  options.max_context = 512;
  const Case c = {.drafts = 2, .longer = 140};
  GuessingDrafter::Options guess;
  std::vector<Request> requests;
  std::vector<Generated> want;
  {
    Node plain(options);
    guess.vocab = plain.model().config().vocab_size;
    requests = Requests(c, guess.vocab);
    for (const Request& request : requests) want.push_back(plain.Generate(request));
  }
  guess.right = 1;
  for (size_t i = 0; i < requests.size(); ++i) {
    std::vector<int32_t>& known = guess.known.emplace_back(requests[i].prompt);
    known.insert(known.end(), want[i].ids.begin(), want[i].ids.end());
  }
  GuessingDrafter guessing(guess);
  options.drafter = &guessing;
  options.draft_tokens = c.drafts;
  Node node(options);
  const ScopedFailpoints lost("attention.gather=error*1");
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  int failed = 0;
  for (size_t i = 0; i < streams.size(); ++i) {
    const Generated got = Node::Collect(*streams[i]);
    if (got.finish.status.ok()) {
      CheckSame(got, want[i]);
    } else {
      ++failed;
      CHECK(ReasonOf(got.finish.status) == reasons::kTransferFailed);
    }
  }
  CHECK(failed == 1);
  CHECK(node.Quiescent());
}

}  // namespace sluice
