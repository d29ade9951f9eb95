// An engine whose steps other ranks take part in, against an engine that is alone. The ranks are
// threads of the test's process.
#pragma once

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/support/cases.h"
#include "tests/support/node.h"

namespace sluice::testing {

inline NodeOptions OptionsFor(const std::string& model) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(model);
  options.kernels = "portable";
  options.kv_dtype = DType::kFloat32;
  options.max_context = 512;
  options.max_sequences = 4;
  return options;
}

// Returns the tokens of more requests than there are slots, greedy and sampled.
inline std::vector<std::vector<int32_t>> Answers(Node& node) {
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < (kSanitized ? 6 : 9); ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 1 + 23 * i; ++t) prompt.push_back((7 * t + i) % 500);
    Request request = GreedyRequest(prompt, kSanitized ? 8 : 20);
    if (i % 3 == 1) {
      request.sampling.temperature = 0.7f;
      request.sampling.seed = static_cast<uint64_t>(i);
    }
    streams.push_back(node.Start(std::move(request)));
  }
  std::vector<std::vector<int32_t>> ids;
  for (auto& stream : streams) ids.push_back(Node::Collect(*stream).ids);
  return ids;
}

inline void CheckSameAnswers(NodeOptions options, int size) {
  std::vector<std::vector<int32_t>> want;
  {
    NodeOptions whole = options;
    whole.divide_experts = false;
    Node alone(whole);
    want = Answers(alone);
  }
  OnRanks(options, size, [&](Node& node) {
    CHECK(Answers(node) == want);
    if (!kSanitized) CHECK(Answers(node) == want);
    CHECK(node.Quiescent());
  });
}

}  // namespace sluice::testing
