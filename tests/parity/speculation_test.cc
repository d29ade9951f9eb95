// Speculation on every tiny model and kernel path: tokens and log-probabilities are those without
// it, to the bit, under every policy that verifies drafts.
#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
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

std::vector<Request> Requests(int32_t vocab) {
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 5 + i * 70; ++t) prompt.push_back((t * 7919 + i * 104729) % vocab);
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
uint32_t CheckDrafter(NodeOptions options, Drafter* drafter, const std::vector<Request>& requests,
                      const std::vector<Generated>& want) {
  options.drafter = drafter;
  options.draft_tokens = 5;
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

void CheckNode(NodeOptions options) {
  options.max_context = 512;
  std::vector<Request> requests;
  std::vector<Generated> want;
  GuessingDrafter::Options guess;
  {
    Node plain(options);
    guess.vocab = plain.model().config().vocab_size;
    requests = Requests(guess.vocab);
    for (const Request& request : requests) {
      want.push_back(plain.Generate(request));
      std::vector<int32_t>& known = guess.known.emplace_back(request.prompt);
      known.insert(known.end(), want.back().ids.begin(), want.back().ids.end());
    }
  }
  GuessingDrafter guessing(guess);
  for (const int row_bucket : {0, 8}) {
    options.row_bucket = row_bucket;
    CHECK(CheckDrafter(options, &guessing, requests, want) > 20);
  }
  const auto ngram = NewNgramDrafter();
  CheckDrafter(options, ngram.get(), requests, want);
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
}

}  // namespace

TEST_CASE("speculation changes no bit on portable kernels") { CheckPath("portable"); }
TEST_CASE("speculation changes no bit on AVX2 kernels") { CheckPath("avx2"); }
TEST_CASE("speculation changes no bit on AVX-512 BF16 kernels") { CheckPath("avx512bf16"); }
TEST_CASE("speculation changes no bit on AMX kernels") { CheckPath("amx"); }
TEST_CASE("speculation changes no bit on a GPU", "[cuda]") { CheckPath("cuda"); }

}  // namespace sluice
