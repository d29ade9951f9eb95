// Tests of the policy's options, the device and the model that a configuration makes.
#include <catch2/catch.hpp>
#include <string>
#include <utility>

#include "src/config/setting.h"
#include "src/server/model_setup.h"
#include "tests/fixtures/fixtures.h"

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
  CHECK(of_node->recall.margin == own.recall.margin);
  CHECK(of_node->hgca.window_tokens == own.hgca.window_tokens);
  CHECK(of_node->hgca.beta == own.hgca.beta);
  CHECK(of_node->hgca.alpha == own.hgca.alpha);
  CHECK(of_node->recompute_last == own.recompute_last);
  CHECK(of_node->ess.sparse_memory_ratio == own.ess.sparse_memory_ratio);
  CHECK(of_node->ess.least_places == own.ess.least_places);
  CHECK(of_node->ess.divide_places == own.ess.divide_places);
  CHECK(of_node->ess.prefetch == own.ess.prefetch);
  CHECK(of_node->ess.warm_up == own.ess.warm_up);
  CHECK(of_node->ess.overlap == own.ess.overlap);
  CHECK(of_node->ess.transfer_workers == own.ess.transfer_workers);
  CHECK(of_node->fluxion.placement == own.fluxion.placement);
}

TEST_CASE(
    "fluxion_placement pull keeps a thread for the arbiter where workers are not configured") {
  Config config = DefaultConfig();
  config.set_threads(4);
  config.set_fluxion_placement("pull");
  using Placement = PolicyOptions::Fluxion::Placement;
  for (const auto& [configured, workers] : {std::pair(0u, 3), {4u, 4}}) {
    config.set_policy_workers(configured);
    const absl::StatusOr<PolicyOptions> options = PolicyOptionsOf(config, "", CacheLayout());
    REQUIRE(options.ok());
    CHECK(options->fluxion.placement == Placement::kPull);
    CHECK(options->workers == workers);
  }
}

TEST_CASE("device auto takes the CPU for kernels of the CPU, and says why") {
  Config config = DefaultConfig();
  REQUIRE(config.device() == "auto");
  config.set_kernels("portable");
  std::string why;
  const auto device = NewDevice(config, &why);
  REQUIRE(device.ok());
  CHECK((*device)->name() == "cpu");
  CHECK(why == "auto: kernels portable compute on the CPU");
  config.set_device("cpu");
  REQUIRE(NewDevice(config, &why).ok());
  CHECK(why == "as configured");
}

TEST_CASE("device auto gives a device on every machine") {
  std::string why;
  const auto device = NewDevice(DefaultConfig(), &why);
  INFO(device.status());
  REQUIRE(device.ok());
  CHECK_THAT(why, Catch::StartsWith("auto: "));
  const auto found = FindMemory(DefaultConfig(), **device);
  REQUIRE(found.ok());
  CHECK(found->gpu == ((*device)->name() == "cuda"));
  CHECK(found->host.total_bytes > 0);
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
  config.set_policy_workers(65);
  const absl::Status status = PolicyOptionsOf(config, "", CacheLayout()).status();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Contains("policy_workers"));
}

TEST_CASE("the caches' element type is the setting, and auto is what fits the model") {
  Config config = DefaultConfig();
  const auto type = [&](const char* model) {
    const absl::StatusOr<ModelConfig> of = LoadModelConfig(fixtures::SourceDir(model));
    INFO(of.status());
    REQUIRE(of.ok());
    return KvDType(config, *of);
  };
  CHECK(config.kv_dtype() == "auto");
  CHECK(type("tiny-qwen3") == DType::kBFloat16);
  CHECK(type("tiny-deepseek-v32") == DType::kFloat8E4M3);
  for (const char* model : {"tiny-qwen3", "tiny-deepseek-v32"}) {
    for (const DType wanted : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat32}) {
      config.set_kv_dtype(std::string(DTypeName(wanted)));
      CHECK(type(model) == wanted);
    }
  }
}

TEST_CASE("keys and values have no packed form") {
  Config config = DefaultConfig();
  config.set_model(fixtures::SourceDir("tiny-qwen3"));
  config.set_load_format("dummy");
  config.set_kv_dtype("fp8");
  const auto device = NewDevice(config);
  REQUIRE(device.ok());
  const absl::Status refused = LoadModel(config, 8, 1, device->get()).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("kv_dtype"));
}

}  // namespace
}  // namespace sluice
