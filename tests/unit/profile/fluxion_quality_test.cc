// Tests of the cost of ways to budget for a model's next token: one that reads everything costs
// nothing, and each reads what it is told.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "src/base/rng.h"
#include "src/profile/fluxion/tau_quality.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int64_t kSteps = 5;

BudgetSource Always(const FluxionPredictor::Head& head) {
  return {"always", [head](const LayerRow&, size_t) { return head; }, 0};
}

std::vector<Prompt> Documents(std::vector<int64_t> tokens) {
  SplitMix64 random(TestSeed());
  std::vector<Prompt> out;
  for (const int64_t count : tokens) {
    Prompt& document = out.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      document.push_back(static_cast<int32_t>(random.Below(200)));
    }
  }
  return out;
}

struct Loaded {
  Loaded(const std::string& name, DType kv_dtype) {
    device = *testing::TestDevice("auto");
    Model::Options options;
    options.directory = fixtures::ModelDir(name);
    options.max_context = 512;
    options.max_rows = 100;  // not a multiple of a block
    options.max_logits = 1;
    options.kv_dtype = kv_dtype;
    model = *Model::Load(options, device.get());
  }
  absl::Status Measure(const std::vector<BudgetSource>& sources,
                       const std::vector<Prompt>& documents, std::vector<SourceQuality>* out) {
    return MeasureSourceQuality(
        sources, kSteps, device.get(), model.get(), documents, 2,
        [&](int64_t done, int64_t all) {
          CHECK(done == told + 1);
          told = done;
          of = all;
        },
        out);
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  int64_t told = 0, of = 0;
};

}  // namespace

TEST_CASE("a source that reads everything has the logits of full attention, others do not") {
  const std::string name = GENERATE("tiny-llama", "tiny-qwen2", "tiny-qwen3");
  const DType kv_dtype = GENERATE(DType::kFloat32, DType::kBFloat16);
  INFO(name << ", " << static_cast<int>(kv_dtype));
  Loaded loaded(name, kv_dtype);
  std::vector<SourceQuality> out;
  // The shortest document is left out.
  REQUIRE(loaded
              .Measure({Always({{1, 1, 1, 1}, false}), Always({{0, 0, 0, 0}, true}),
                        TauSource(0.02, 0), TauSource(0.2, 0)},
                       Documents({470, 388, 501}), &out)
              .ok());
  CHECK(loaded.told == loaded.of);
  CHECK(loaded.of == 2 * 5 * kSteps);
  REQUIRE(out.size() == 4);
  for (const SourceQuality& of : out) {
    CHECK(of.distance.steps() == 2 * kSteps);
    CHECK(of.sums.rows == 2 * kSteps * loaded.model->cache_layout().layers);
    CHECK(of.cpu_tokens == out[0].cpu_tokens);
    CHECK(of.cpu_tokens > 0);
  }
  CHECK(out[0].sums.tokens == out[0].cpu_tokens);
  CHECK(out[0].sums.row_errors < 1e-6);
  CHECK(out[0].distance.mean_kl() < 1e-4);
  // Tokens that are nearly as probable may change places by rounding.
  CHECK(out[0].distance.top1_agreement() >= 0.7);
  CHECK(out[1].sums.tokens == 0);
  CHECK(out[1].distance.mean_kl() > 1e-3);
  CHECK(out[2].sums.row_errors <= out[3].sums.row_errors);
  CHECK(out[2].sums.bytes() >= out[3].sums.bytes());
}

TEST_CASE("documents in which no row has a choice are refused with what to do") {
  Loaded loaded("tiny-llama", DType::kBFloat16);
  std::vector<SourceQuality> out;
  const absl::Status status =
      loaded.Measure({Always({{1, 1, 1, 1}, false})}, Documents({388, 20}), &out);
  CHECK_THAT(std::string(status.message()),
             Catch::Matchers::Contains("no document has 389 tokens") &&
                 Catch::Matchers::Contains("fewer --steps"));
}

}  // namespace sluice
