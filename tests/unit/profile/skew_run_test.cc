#include "src/profile/skew_run.h"

#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"

namespace sluice {
namespace {

CapturedQueries Captured(const std::string& name, int64_t tokens) {
  const auto device = *testing::TestDevice("auto");
  Model::Options options;
  options.directory = fixtures::ModelDir(name);
  options.max_context = 512;
  options.max_rows = 128;
  options.max_logits = 1;
  const auto model = *Model::Load(options, device.get());
  auto captured = CaptureQueries(device.get(), model.get(),
                                 RandomTraffic(4, tokens, model->config().vocab_size, 11),
                                 4 * tokens, [](int64_t, int64_t) {});
  REQUIRE(captured.ok());
  return *std::move(captured);
}

}  // namespace

// Random weights give queries little structure: a skew finds what RoPE leaves.
TEST_CASE(
    "skewed columns order the keys of queries that they have not seen better than plain ones") {
  for (const std::string& name : fixtures::TinyModels()) {
    const CapturedQueries captured = Captured(name, 200);
    int64_t told = 0;
    const SkewResult skew =
        MakeSkew(captured, captured.head_dim / 4, 2, [&](int64_t done, int64_t all) {
          CHECK(done == ++told);
          CHECK(all == captured.layers * captured.kv_heads);
        });
    CHECK(told == captured.layers * captured.kv_heads);
    CHECK(static_cast<int64_t>(skew.projection.size()) ==
          captured.layers * captured.kv_heads * captured.head_dim * (captured.head_dim / 4));
    REQUIRE(static_cast<int64_t>(skew.layers.size()) == captured.layers);
    double plain = 0, skewed = 0;
    for (const SkewQuality& layer : skew.layers) {
      std::printf("%s: plain %.3f, skewed %.3f\n", name.c_str(), layer.plain, layer.skewed);
      plain += layer.plain;
      skewed += layer.skewed;
    }
    CHECK(skewed > plain);
  }
}

TEST_CASE("a skew does not depend on the number of threads") {
  const CapturedQueries captured = Captured("tiny-llama", 60);
  const auto quiet = [](int64_t, int64_t) {};
  CHECK(MakeSkew(captured, 16, 1, quiet).projection == MakeSkew(captured, 16, 5, quiet).projection);
}

}  // namespace sluice
