// Policy ess's schedules follow what is missed while a node serves: sizes of steps are recorded
// again between two steps, and no token knows of it.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::CheckSame;
using testing::Generated;
using testing::GreedyRequest;
using testing::HasPath;
using testing::Node;
using testing::NodeOptions;
using Overlap = PolicyOptions::Ess::Overlap;

// Twelve sequences at once, in rounds, each of which fits its pool; and how often a schedule
// changed.
std::pair<std::vector<Generated>, int64_t> Serve(const std::string& path, int row_bucket,
                                                 Overlap overlap) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-deepseek-v32");
  options.kernels = path;
  options.row_bucket = row_bucket;
  options.kv_dtype = DType::kFloat8E4M3;
  options.max_context = 1024;
  options.max_sequences = 12;
  options.policy.name = "ess";
  options.policy.ess.sparse_memory_ratio = 0.1;
  options.policy.ess.least_places = 128;
  options.policy.ess.overlap = overlap;
  Node node(options);
  std::vector<Generated> out;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < options.max_sequences; ++i) {
      std::vector<int32_t> prompt;
      for (int t = 0; t < 30; ++t) prompt.push_back(3 + (t * 7919 + i * 104729 + round) % 500);
      Request request = GreedyRequest(prompt, 90);
      request.sampling.logprobs = 1;
      streams.push_back(node.Start(std::move(request)));
    }
    for (const auto& stream : streams) out.push_back(Node::Collect(*stream));
  }
  return {std::move(out), node.policy().Schedules().changes};
}

void CheckFollows(const std::string& path, int row_bucket) {
  if (!HasPath(path)) return;
  INFO(path << ", steps padded to a multiple of " << row_bucket);
  const auto [want, never] = Serve(path, row_bucket, Overlap::kDba);
  CHECK(never == 0);
  const auto [got, changes] = Serve(path, row_bucket, Overlap::kLayerWise);
  CHECK(changes > 0);
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    REQUIRE(got[i].finish.status.ok());
    CheckSame(got[i], want[i]);
  }
}

TEST_CASE("ess: steps that are recorded again while they run change no bit") {
  CheckFollows("portable", 0);
  CheckFollows("portable", 12);
}
TEST_CASE("ess: steps that are recorded again while they run change no bit (cuda)", "[cuda]") {
  CheckFollows("cuda", 0);
}

}  // namespace
}  // namespace sluice
