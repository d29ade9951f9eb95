#include "src/profile/query_capture.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/profile/skew.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"

namespace sluice {
namespace {

struct Loaded {
  explicit Loaded(const std::string& name) {
    device = *testing::TestDevice("auto");
    Model::Options options;
    options.directory = fixtures::ModelDir(name);
    options.max_context = 512;
    options.max_rows = 100;  // Not a multiple of a block.
    options.max_logits = 1;
    options.kv_dtype = DType::kFloat32;
    model = *Model::Load(options, device.get());
  }
  CapturedQueries Capture(const std::vector<Prompt>& prompts, int64_t tokens) {
    int64_t told = 0;
    auto captured = CaptureQueries(device.get(), model.get(), prompts, tokens,
                                   [&](int64_t done, int64_t) { told = done; });
    REQUIRE(captured.ok());
    CHECK(told > 0);
    return *std::move(captured);
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
};

}  // namespace

TEST_CASE("captured keys are those that transformers has in its cache") {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name);
    Loaded loaded(name);
    const fixtures::GoldenCase golden = fixtures::LoadGolden(name)->at(1);
    const CapturedQueries captured = loaded.Capture({golden.prompt}, 1000);
    const ModelConfig& config = loaded.model->config();
    REQUIRE(captured.layers == static_cast<int64_t>(golden.k.size()));
    const auto dim = static_cast<size_t>(captured.head_dim);
    const auto kv_heads = static_cast<size_t>(captured.kv_heads);
    for (size_t layer = 0; layer < golden.k.size(); ++layer) {
      for (size_t head = 0; head < kv_heads; ++head) {
        const HeadQueries& got =
            captured.of(static_cast<int64_t>(layer), static_cast<int64_t>(head));
        REQUIRE(got.k.size() == golden.prompt.size() * dim);
        CHECK(got.q.size() == got.k.size() * static_cast<size_t>(config.heads / config.kv_heads));
        double error = 0, size = 0;
        for (size_t t = 0; t < golden.prompt.size(); ++t) {
          for (size_t d = 0; d < dim; ++d) {
            const float want = BFloat16ToFloat(golden.k[layer][(t * kv_heads + head) * dim + d]);
            error += std::pow(got.k[t * dim + d] - want, 2);
            size += std::pow(want, 2);
          }
        }
        CHECK(std::sqrt(error / size) < 0.01);
      }
    }
  }
}

TEST_CASE("tokens are kept evenly over all prompts, and each prompt is its own") {
  Loaded loaded("tiny-llama");
  const std::vector<Prompt> prompts = RandomTraffic(3, 70, 200, 3);
  const CapturedQueries all = loaded.Capture(prompts, 1000);
  const CapturedQueries few = loaded.Capture(prompts, 30);  // Every 7th token.
  const auto dim = static_cast<size_t>(all.head_dim);
  const std::vector<float>& k = all.of(1, 0).k;
  REQUIRE(k.size() == 210 * dim);
  REQUIRE(few.of(1, 0).k.size() == 30 * dim);
  for (size_t t = 0; t < 30; ++t) {
    CHECK(std::equal(&k[t * 7 * dim], &k[t * 7 * dim] + dim, &few.of(1, 0).k[t * dim]));
  }
  const CapturedQueries second = loaded.Capture({prompts[1]}, 1000);
  CHECK(std::equal(second.of(1, 0).q.begin(), second.of(1, 0).q.end(),
                   all.of(1, 0).q.begin() + static_cast<int64_t>(second.of(1, 0).q.size())));
}

}  // namespace sluice
