// A real model, every CPU path: each greedy token of golden.json, and its log-probability. The model is
// made by `tools/fetch-model smollm2-135m-instruct models/smollm2-135m-instruct`.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

constexpr double kLogprobTolerance = 0.02;

std::string ModelDirectory() {
  const char* given = std::getenv("SLUICE_TEST_SMOLLM2");
  return given != nullptr ? given : SLUICE_SOURCE_DIR "/models/smollm2-135m-instruct";
}

void CheckPath(const std::string& path, double margin) {
  if (kernels::FindKernelTable(path.c_str()) == nullptr) {
    SkipTest("this processor has no " + path);
    return;
  }
  if (!std::filesystem::exists(ModelDirectory() + "/model.safetensors")) {
    SkipTest("no model in " + ModelDirectory() + "; tools/fetch-model smollm2-135m-instruct makes it");
    return;
  }
  const auto text = fixtures::ReadFile(fixtures::SourceDir("smollm2-135m-instruct") + "/golden.json");
  REQUIRE(text.ok());
  const nlohmann::json golden = nlohmann::json::parse(*text);
  NodeOptions options;
  options.model_dir = ModelDirectory();
  options.kernels = path;
  options.max_context = 4096;
  options.chunk_tokens = 512;
  options.hbm_bytes = int64_t{512} << 20;
  Node node(options);
  for (size_t c = 0; c < golden.size(); ++c) {
    const auto want = golden[c].at("tokens").get<std::vector<int32_t>>();
    const auto logprobs = golden[c].at("logprobs").get<std::vector<double>>();
    const auto margins = golden[c].at("margins").get<std::vector<double>>();
    Request request = GreedyRequest(golden[c].at("ids").get<std::vector<int32_t>>(),
                                    static_cast<uint32_t>(want.size()));
    request.sampling.logprobs = 0;
    const Generated got = node.Generate(std::move(request));
    REQUIRE(got.ids.size() == want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      INFO("case " << c << ", token " << i << ", margin " << margins[i]);
      // After a legitimate flip the two texts are different ones.
      if (got.ids[i] != want[i] && margins[i] <= margin) break;
      REQUIRE(got.ids[i] == want[i]);
      CHECK(std::abs(*got.tokens[i].logprob - logprobs[i]) <= kLogprobTolerance);
    }
  }
}

}  // namespace

TEST_CASE("SmolLM2 gives transformers' tokens on portable kernels") { CheckPath("portable", 0.05); }
TEST_CASE("SmolLM2 gives transformers' tokens on AVX2 kernels") { CheckPath("avx2", 0.05); }
TEST_CASE("SmolLM2 gives transformers' tokens on AVX-512 BF16 kernels") {
  CheckPath("avx512bf16", 0.1);
}
TEST_CASE("SmolLM2 gives transformers' tokens on AMX kernels") { CheckPath("amx", 0.1); }

}  // namespace sluice
