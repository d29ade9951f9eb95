#include "src/server/plan.h"

#include <catch2/catch.hpp>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "src/device/planning_device.h"
#include "src/kv/page_pool.h"
#include "src/model/policy_forecast.h"
#include "src/model/weight_source.h"
#include "src/server/model_setup.h"
#include "src/server/speculation.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 3;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 256);
  return {30, {kind}};
}

TEST_CASE("what the plan says fits is what a pool takes") {
  const CacheLayout layout = Layout();
  const int64_t bytes = GENERATE(as<int64_t>(), 1 << 20, 5'000'000, 64 << 20);
  const int64_t context = GENERATE(as<int64_t>(), 1, 33, 500, 2000);
  auto pool = PagePool::Create(
      "hbm", layout,
      Buffer(std::calloc(1, static_cast<size_t>(bytes)), static_cast<size_t>(bytes),
             [](void* data, size_t) { std::free(data); }));
  REQUIRE(pool.ok());
  CHECK(TokensThatFit(layout, bytes) == (*pool)->capacity_tokens());
  std::vector<Reservation> held;
  for (;;) {
    Reservation one = (*pool)->TryReserve(context);
    if (one.empty()) break;
    held.push_back(std::move(one));
  }
  CHECK(SequencesThatFit(layout, bytes, context) == static_cast<int64_t>(held.size()));
}

TEST_CASE("the plan shows the contexts up to the longest, and caps by max_sequences") {
  PlanInput in;
  in.model.name = "m";
  in.model.architecture = "llama";
  in.model.layers = 30;
  in.model.heads = 9;
  in.model.kv_heads = 3;
  in.model.head_dim = 64;
  in.model.hidden_size = 576;
  in.model.intermediate_size = 1536;
  in.model.vocab_size = 49152;
  in.model.tie_word_embeddings = true;
  in.layout = Layout();
  in.hbm_bytes = int64_t{1} << 30;
  in.dram_bytes = int64_t{4} << 30;
  in.max_context = 8192;
  in.max_sequences = 32;
  in.max_rows = 544;
  const std::string plan = FormatPlan(in);
  INFO(plan);
  CHECK_THAT(plan, Catch::Contains("policy full"));
  CHECK_THAT(plan, Catch::Contains("22.5 KiB a token"));
  CHECK_THAT(plan, Catch::Contains("8192"));
  // 512 tokens take 11.25 MiB: 91 would fit into 1 GiB, and 364 fit into 4 GiB.
  CHECK_THAT(plan, Catch::Contains("11.2 MiB"));
  CHECK_THAT(plan, Catch::Contains("512      11.2 MiB                32               364"));
}

Config TinyNode() {
  Config config;
  config.set_model(fixtures::ModelDir("tiny-qwen3"));
  config.set_device("cpu");
  config.set_kernels("portable");
  config.set_threads(1);
  config.set_load_format("auto");
  config.set_block_tokens(32);
  config.set_max_context(700);
  config.set_max_sequences(5);
  config.set_chunk_tokens(64);
  config.set_policy("full");
  config.set_hbm_bytes(8 << 20);
  config.set_dram_bytes(16 << 20);
  config.set_overcommit(1);
  config.set_budget_tokens(128);
  config.set_dense_layers(1);
  config.set_hgca_window_tokens(64);
  config.set_hgca_beta(1);
  config.set_hgca_alpha(0.3);
  config.set_clo_persistent_share(0.2);
  config.set_clo_similarity(0.95);
  config.set_clo_budget_divisor(10);
  config.set_recall_margin(4.5);
  config.set_scout_share_limit(0.12);
  config.set_policy_worker_deadline_seconds(1);
  return config;
}

// Bytes of HBM that hold `tokens` tokens of one sequence.
uint64_t TinyKvBytes(const PlanInput& plan, int64_t tokens) {
  return static_cast<uint64_t>(plan.layout.BytesFor(tokens));
}

TEST_CASE("the plan asks for what a node asks for") {
  Config config = TinyNode();
  const auto plan = PlanOf(config);
  INFO(plan.status());
  REQUIRE(plan.ok());

  const auto device = NewDevice(config);
  REQUIRE(device.ok());
  const auto model = LoadModel(config, 5 + 64, 5, device->get());
  REQUIRE(model.ok());
  CHECK(plan->weight_bytes == (*model)->weight_bytes());
  CHECK(plan->workspace_bytes == (*model)->workspace_bytes());
  CHECK(plan->max_context == 700);
  CHECK(plan->layout.layers == (*model)->cache_layout().layers);
  // Every policy but full has its own footprint: sparse ones take less HBM for long contexts.
  REQUIRE(plan->policies.size() == 5);
  for (const PlanInput::Policy& policy : plan->policies) {
    INFO(policy.name << ": " << policy.status);
    CHECK(policy.status.ok());
    REQUIRE(policy.rooms.size() == 2);
    CHECK(policy.rooms[1].context == 700);
    CHECK(policy.rooms[1].dram_bytes >= plan->layout.BytesFor(700));
    CHECK(policy.rooms[1].hbm_bytes > 0);
    CHECK(policy.rooms[1].running >= 1);
    CHECK(policy.beside_hbm_bytes > 0);
    CHECK(policy.beside_pinned_bytes > 0);
    CHECK_THAT(FormatPlan(*plan), Catch::Contains("policy " + policy.name + ":"));
    CHECK(policy.exact_tokens > 0);
    CHECK(policy.exact_tokens <= 700);
    CHECK_THAT(FormatPlan(*plan),
               Catch::Contains("exact: sequences of up to " + std::to_string(policy.exact_tokens)));
  }
  // The batch has histories, biases and logits of five sequences at least.
  CHECK(plan->batch_bytes > 5 * (700 + 2 * 1024 + (*model)->config().vocab_size) * 4);

  // The memory of the configured policy is part of the batch's lines, and grows with the batch.
  for (const PlanInput::Policy& policy : plan->policies) {
    INFO(policy.name);
    config.set_policy(policy.name);
    config.set_max_sequences(5);
    const auto with = PlanOf(config);
    REQUIRE(with.ok());
    CHECK(with->batch_bytes - policy.beside_hbm_bytes < plan->batch_bytes);
    CHECK(with->pinned_bytes - policy.beside_pinned_bytes < plan->pinned_bytes);
    config.set_max_sequences(50);
    const auto more = PlanOf(config);
    REQUIRE(more.ok());
    // The hash matrices of clo do not grow.
    CHECK(more->batch_bytes > (policy.name == "clo" ? 3 : 5) * with->batch_bytes);
    CHECK(more->pinned_bytes > with->pinned_bytes);
  }
}

TEST_CASE("the plan of latent caches says what each kind takes") {
  PlanInput in;
  in.model.name = "m";
  in.model.architecture = "deepseek_v32";
  in.model.layers = 61;
  in.model.heads = 128;
  LatentConfig& latent = in.model.latent.emplace();
  latent.rank = 512;
  latent.rope_dim = 64;
  latent.indexer = IndexerConfig{64, 2048};
  const absl::StatusOr<CacheLayout> layout = CacheLayoutOf(in.model, DType::kFloat8E4M3, 32);
  REQUIRE(layout.ok());
  in.layout = *layout;
  in.hbm_bytes = int64_t{40} << 30;
  in.dram_bytes = int64_t{400} << 30;
  in.max_context = 32768;
  in.max_sequences = 64;
  const std::string plan = FormatPlan(in);
  INFO(plan);
  CHECK_THAT(plan, Catch::Contains("128 heads, entries of 512 + 64, 2048 selected"));
  // A token takes 61 x (656 + 132) bytes, of which the index has 61 x 132.
  CHECK_THAT(plan, Catch::Contains("46.9 KiB a token (fp8"));
  CHECK_THAT(plan, Catch::Contains("32768 tokens: latent 1.22 GiB, index 251.6 MiB"));
  // A sequence takes 1.467 GiB: 27 fit into 40 GiB, 272 into 400 GiB.
  CHECK_THAT(plan, Catch::Contains("32768      1.47 GiB                27               272"));
}

TEST_CASE("the plan of a model with latent caches asks for what a node asks for") {
  Config config = TinyNode();
  config.set_model(fixtures::SourceDir("tiny-deepseek-v32"));
  config.set_kv_dtype("auto");
  const auto plan = PlanOf(config);
  INFO(plan.status());
  REQUIRE(plan.ok());
  REQUIRE(plan->layout.kinds.size() == 2);
  CHECK(plan->layout.kinds[0].bytes_per_token == 656);
  CHECK(plan->layout.kinds[1].bytes_per_token == 132);
  // The batch has scores and lists of 64 + 5 rows over 700 positions, and of the best 64 of them.
  CHECK(plan->batch_bytes > 69 * (700 + 64) * 4);
  for (const PlanInput::Policy& policy : plan->policies) {
    INFO(policy.name << ": " << policy.status);
    CHECK((policy.name != "scout" && policy.name != "recall"));
  }
  // A node takes the same.
  config.set_load_format("dummy");
  const auto device = NewDevice(config);
  REQUIRE(device.ok());
  const auto model = LoadModel(config, 5 + 64, 5, device->get());
  REQUIRE(model.ok());
  CHECK(plan->workspace_bytes == (*model)->workspace_bytes());
  const auto memory = NewNodeMemory(config, **model, device->get());
  INFO(memory.status());
  CHECK(memory.ok());
}

TEST_CASE("the plan counts what drafts take, and a policy that verifies none is refused") {
  Config config = TinyNode();
  const auto plain = PlanOf(config);
  config.set_speculation_tokens(3);
  config.set_speculation("none");
  CHECK(DraftTokensOf(config) == 0);
  CHECK(NewDrafter(config) == nullptr);
  config.set_speculation("ngram");
  CHECK(DraftTokensOf(config) == 3);
  CHECK(NewDrafter(config) != nullptr);
  const auto plan = PlanOf(config);
  REQUIRE(plain.ok());
  REQUIRE(plan.ok());
  CHECK(plain->max_rows == 5 + 64);
  CHECK(plan->max_rows == 5 * 4 + 64);
  // Three more rows of logits for each sequence.
  CHECK(plan->batch_bytes >= plain->batch_bytes + int64_t{5} * 3 * plan->model.vocab_size * 4);
  CHECK(plan->workspace_bytes > plain->workspace_bytes);
  for (const char* policy : {"scout", "recall", "hgca", "clo", "fluxion"}) {
    config.set_policy(policy);
    const absl::Status refused = PlanOf(config).status();
    CHECK(absl::IsInvalidArgument(refused));
    CHECK_THAT(std::string(refused.message()),
               Catch::StartsWith(absl::StrCat("speculation: expected none with policy ", policy)));
  }
}

TEST_CASE(
    "the plan counts a next-token layer's weights and caches, and auto takes it where it is") {
  Config config = TinyNode();
  config.set_model(fixtures::ModelDir("tiny-deepseek-mtp"));
  config.set_kv_dtype("fp8");
  config.set_speculation_tokens(2);
  config.set_speculation("none");
  const auto plain = PlanOf(config);
  INFO(plain.status());
  REQUIRE(plain.ok());
  CHECK_FALSE(plain->drafts_on_device);
  for (const char* setting : {"mtp", "auto"}) {
    config.set_speculation(setting);
    const auto plan = PlanOf(config);
    INFO(setting << ": " << plan.status());
    REQUIRE(plan.ok());
    CHECK(plan->drafts_on_device);
    CHECK(plan->draft_tokens == 2);
    CHECK(plan->max_rows == 5 * 3 + 64);
    // 22 blocks of 32 entries of 656 bytes hold 700 tokens.
    CHECK(plan->draft_cache_bytes == int64_t{5} * 22 * 32 * 656);
    CHECK(plan->batch_bytes > plain->batch_bytes + plan->draft_cache_bytes);
    CHECK(plan->weight_bytes > plain->weight_bytes * 5 / 4);
    CHECK_THAT(FormatPlan(*plan), Catch::Contains("drafts      up to 2 of the next-token layer"));
    const auto device = NewDevice(config);
    REQUIRE(device.ok());
    const auto model = LoadModel(config, plan->max_rows, 15, device->get());
    REQUIRE(model.ok());
    CHECK(plan->weight_bytes == (*model)->weight_bytes());
    CHECK(plan->workspace_bytes == (*model)->workspace_bytes());
    Config settled = config;
    SettleSpeculation(**model, &settled);
    CHECK(settled.speculation() == "mtp");
    CHECK(NewDrafter(settled)->on_device());
  }
  config.set_speculation_tokens(4);
  CHECK_THAT(std::string(PlanOf(config).status().message()),
             Catch::StartsWith("speculation_tokens: expected at most 3 with speculation auto"));
  config.set_speculation_tokens(3);
  config.set_policy("ess");
  const auto sparse = PlanOf(config);
  INFO(sparse.status());
  REQUIRE(sparse.ok());
  CHECK(sparse->draft_tokens == 3);
  config.set_policy("full");
  config.set_model(fixtures::ModelDir("tiny-deepseek-v32"));
  REQUIRE(PlanOf(config).ok());
  CHECK(PlanOf(config)->draft_tokens == 0);
  config.set_speculation("mtp");
  CHECK_THAT(std::string(PlanOf(config).status().message()),
             Catch::StartsWith("speculation: mtp needs a model with a next-token layer"));
}

TEST_CASE("the plan has the sizes that a node would choose, and says why") {
  Config config = TinyNode();
  config.set_hbm_bytes(kAutoBytes);
  config.set_dram_bytes(kAutoBytes);
  const auto plan = PlanOf(config);
  INFO(plan.status());
  REQUIRE(plan.ok());
  const auto device = NewDevice(config);
  REQUIRE(device.ok());
  const auto found = FindMemory(config, **device);
  REQUIRE(found.ok());
  CHECK(plan->hbm_bytes == static_cast<int64_t>(DecodeHbmSize(kAutoBytes, *found, 0).bytes));
  CHECK(plan->dram_bytes == static_cast<int64_t>(DecodeDramSize(kAutoBytes, *found).bytes));
  const std::string text = FormatPlan(*plan);
  INFO(text);
  CHECK_THAT(text, Catch::Contains("auto: an eighth of the "));
  CHECK_THAT(text, Catch::Contains("auto: a quarter of the "));
  CHECK_THAT(text, Catch::Contains("device      cpu, as configured"));
  CHECK_THAT(text, Catch::Contains("\nDRAM        "));
  CHECK_THAT(text, Catch::Contains("placement   pinned memory: "));
}

TEST_CASE("the plan has the policies that a server can be given") {
  for (const char* model : {"tiny-qwen3", "tiny-deepseek-v32"}) {
    Config config = TinyNode();
    config.set_model(fixtures::SourceDir(model));
    config.set_kv_dtype("auto");
    const auto plan = PlanOf(config);
    INFO(plan.status());
    REQUIRE(plan.ok());
    for (const PlanInput::Policy& policy : plan->policies) {
      CAPTURE(policy.name);
      CHECK((policy.name != "oracle" && policy.name != "offload-naive"));
    }
  }
}

TEST_CASE("policy auto plans its candidates, and the plan is of the one that it takes") {
  Config config = TinyNode();
  config.set_policy("auto");
  for (const char* quality : {"exact", "high", "fast"}) {
    config.set_quality(quality);
    config.set_hbm_bytes(8 << 20);
    const auto plan = PlanOf(config);
    INFO(plan.status());
    REQUIRE(plan.ok());
    INFO(plan->auto_text);
    CHECK(plan->policy != "auto");
    CHECK_THAT(plan->auto_text, Catch::Contains("policy auto, quality " + std::string(quality)));
    CHECK_THAT(FormatPlan(*plan), Catch::Contains(plan->auto_text));
    CHECK_THAT(*CheckedPolicy(config), Catch::Contains("policy auto, quality"));
    // Without a place for one whole sequence of 700 tokens: exact has nothing to take.
    config.set_hbm_bytes(TinyKvBytes(*plan, 600));
    const auto small = PlanOf(config);
    INFO(small.status());
    if (std::string(quality) == "exact") {
      CHECK(small.status().code() == absl::StatusCode::kFailedPrecondition);
    } else if (small.ok()) {
      CHECK(small->policy != "full");
    }
  }
  config.set_policy("full");
  CHECK(CheckedPolicy(config)->empty());
  CHECK(PlanOf(config)->auto_text.empty());
}

TEST_CASE("the forecasts of a plan are near what an H200 was measured at") {
  // policies/speed.md: Qwen3-14B's geometry at 64K, a cap of two whole sequences.
  Config config = TinyNode();
  config.set_model(SLUICE_SOURCE_DIR "/configs/models/qwen3-14b");
  config.set_load_format("dummy");
  config.set_max_context(65536);
  config.set_max_sequences(10);
  config.set_budget_tokens(2048);
  config.set_dense_layers(0);
  config.set_hbm_bytes(uint64_t{20653} << 20);
  config.set_dram_bytes(uint64_t{110} << 30);
  config.set_hgca_window_tokens(512);
  config.set_policy_workers(14);
  DeviceRates rates;
  rates.memory = {4283e9, 54.5e9, 54.5e9, 72e9};
  rates.operator_seconds = 2e-6;
  struct Measured {
    const char* policy;
    int64_t running;
    double tokens_per_second;
  };
  for (const Measured& m :
       {Measured{"full", 2, 147}, Measured{"scout", 10, 815}, Measured{"recall", 6, 266}}) {
    config.set_policy(m.policy);
    INFO(m.policy);
    const auto device = NewDevice(config);
    REQUIRE(device.ok());
    Model::Options options;
    options.directory = config.model();
    options.max_context = 65536;
    options.max_rows = 74;
    options.max_logits = 10;
    options.weights = [](const ModelConfig& shape) { return WeightShapes(shape); };
    const auto planning = NewPlanningDevice(device->get());
    const auto model = Model::Load(options, planning.get());
    REQUIRE(model.ok());
    const auto found = FindMemory(config, **device);
    REQUIRE(found.ok());
    const auto policy = PlanConfiguredPolicy(config, **model, *found, device->get());
    INFO(policy.status());
    REQUIRE(policy.ok());
    REQUIRE(policy->status.ok());
    CHECK(policy->rooms.back().running == m.running);
    const StepForecast step = ForecastStep(m.policy, policy->step_bytes, 40, rates);
    CHECK(static_cast<double>(m.running) / step.seconds ==
          Approx(m.tokens_per_second).epsilon(0.12));
  }
}

TEST_CASE("a policy whose transfers cannot address the host KV cache is refused by name") {
  Config config = TinyNode();
  // Rows of keys are 256 bytes: an index of them ends at 512 GiB.
  config.set_dram_bytes(uint64_t{511} << 30);
  auto plan = PlanOf(config);
  REQUIRE(plan.ok());
  for (const PlanInput::Policy& policy : plan->policies) CHECK(policy.status.ok());
  config.set_dram_bytes(uint64_t{513} << 30);
  plan = PlanOf(config);
  REQUIRE(plan.ok());
  for (const PlanInput::Policy& policy : plan->policies) {
    INFO(policy.name << ": " << policy.status);
    const bool of_tokens = policy.name == "recall" || policy.name == "clo";
    CHECK(policy.status.ok() == !of_tokens);
    if (of_tokens) {
      CHECK_THAT(std::string(policy.status.message()), Catch::StartsWith("dram_bytes: "));
    }
  }
}

TEST_CASE("the plan says by how much the host's memory is too small") {
  PlanInput in;
  in.layout = Layout();
  in.max_context = 100;
  in.max_sequences = 1;
  in.hbm_bytes = int64_t{1} << 30;
  in.dram_bytes = int64_t{6} << 30;
  in.host.total_bytes = int64_t{8} << 30;
  in.host.available_bytes = int64_t{7} << 30;
  CHECK_THAT(FormatPlan(in), Catch::Contains("DRAM        8.00 GiB, 7.00 GiB available\n"));
  in.dram_bytes = int64_t{10} << 30;
  CHECK_THAT(FormatPlan(in), Catch::Contains("available; 11.00 GiB are needed: lower dram_bytes or "
                                             "hbm_bytes by 4.00 GiB\n"));
  in.device = {int64_t{79} << 30, int64_t{80} << 30};
  in.host.limit_file = "/sys/fs/cgroup/memory.max";
  CHECK_THAT(FormatPlan(in),
             Catch::Contains("7.00 GiB available (by /sys/fs/cgroup/memory.max); 10.00 GiB are "
                             "needed: lower dram_bytes by 3.00 GiB\n"));
}

TEST_CASE("the plan says what fits into a device of its own memory") {
  PlanInput in;
  in.layout = Layout();
  in.max_context = 100;
  in.max_sequences = 1;
  in.weight_bytes = int64_t{10} << 30;
  in.hbm_bytes = int64_t{60} << 30;
  CHECK_THAT(FormatPlan(in), !Catch::Contains("HBM         "));
  in.device = {int64_t{79} << 30, int64_t{80} << 30};
  CHECK_THAT(FormatPlan(in), Catch::Contains("80.00 GiB, 79.00 GiB free; hbm_bytes may be up to "
                                             "68.50 GiB"));
  in.hbm_bytes = int64_t{70} << 30;
  CHECK_THAT(
      FormatPlan(in),
      Catch::Contains("hbm_bytes of 70.00 GiB does not fit: lower it by 1.50 GiB to 68.50 GiB"));
  in.weight_bytes = int64_t{100} << 30;
  CHECK_THAT(FormatPlan(in), Catch::Contains("too small: 100.00 GiB are needed"));
  CHECK_THAT(FormatPlan(in), Catch::Contains("until they are 21.50 GiB less"));
}

}  // namespace
}  // namespace sluice
