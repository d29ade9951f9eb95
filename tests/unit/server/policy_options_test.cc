// Configuration -> PolicyOptions.
#include <catch2/catch.hpp>
#include <string>

#include "src/config/setting.h"
#include "src/server/model_setup.h"

namespace sluice {
namespace {

TEST_CASE("a node's policies have the defaults that policies have by themselves") {
  const absl::StatusOr<PolicyOptions> of_node = PolicyOptionsOf(DefaultConfig(), "", CacheLayout());
  REQUIRE(of_node.ok());
  const PolicyOptions own;
  CHECK(of_node->name == own.name);
  CHECK(of_node->budget_tokens == own.budget_tokens);
  CHECK(of_node->dense_layers == own.dense_layers);
  CHECK(of_node->reduction == own.reduction);
  CHECK(of_node->host_kernels == own.host_kernels);
  CHECK(of_node->worker_deadline == own.worker_deadline);
  CHECK(of_node->scout.share_limit == own.scout.share_limit);
  CHECK(of_node->scout.intervals == own.scout.intervals);
  CHECK(of_node->scout.attend_whole == own.scout.attend_whole);
  CHECK(of_node->scout.resident_tokens == own.scout.resident_tokens);
  CHECK(of_node->recall.margin == own.recall.margin);
  CHECK(of_node->recall.fetch_all == own.recall.fetch_all);
  CHECK(of_node->recall.rank == own.recall.rank);
  CHECK(of_node->hgca.window_tokens == own.hgca.window_tokens);
  CHECK(of_node->hgca.beta == own.hgca.beta);
  CHECK(of_node->hgca.alpha == own.hgca.alpha);
  CHECK(of_node->hgca.reduction == own.hgca.reduction);
  CHECK(of_node->oracle.selector == own.oracle.selector);
}

TEST_CASE("CPU workers compute on the path that the node was given") {
  Config config = DefaultConfig();
  config.set_kernels("portable");
  const absl::StatusOr<PolicyOptions> options = PolicyOptionsOf(config, "", CacheLayout());
  REQUIRE(options.ok());
  REQUIRE(options->host_kernels != nullptr);
  CHECK(options->host_kernels->name == std::string("portable"));
}

TEST_CASE("more workers than a mailbox takes are refused by name") {
  Config config = DefaultConfig();
  config.set_policy_workers(33);
  const absl::Status status = PolicyOptionsOf(config, "", CacheLayout()).status();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Contains("policy_workers"));
}

}  // namespace
}  // namespace sluice
