// A real model, every CPU path: each greedy token of golden.json, and its log-probability. The
// model is made by `tools/fetch-model smollm2-135m-instruct models/smollm2-135m-instruct`.
//
// With float32 caches and activations every log-probability is transformers' own to 1e-3. Rounding
// the caches to bf16 moves single ones by up to 0.08 whatever computes them (nothing else is
// rounded on the portable and AVX2 paths), so there, and where activations are rounded too, the
// root mean square of a case is held to 0.02, and each one to 0.1.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

struct Tolerance {
  double margin;  // Tokens may differ if the golden's margin is at most this.
  double logprob_rms;
  double logprob_worst;
};
constexpr Tolerance kExact{0.002, 1e-3, 1e-3};
constexpr Tolerance kFloat32{0.05, 0.02, 0.1};
constexpr Tolerance kBFloat16{0.1, 0.02, 0.1};
constexpr Tolerance kCuda{0.15, 0.02, 0.1};

std::string ModelDirectory() {
  const char* given = std::getenv("SLUICE_TEST_SMOLLM2");
  return given != nullptr ? given : SLUICE_SOURCE_DIR "/models/smollm2-135m-instruct";
}

// With a `policy` other than full only those cases are decoded that fit its budget.
void CheckPath(const std::string& path, DType kv_dtype, const Tolerance& tolerance,
               const std::string& policy = "full") {
  if (const absl::Status status = testing::TestDevice(path).status(); !status.ok()) {
    SkipTest(std::string(status.message()));
    return;
  }
  if (!std::filesystem::exists(ModelDirectory() + "/model.safetensors")) {
    SkipTest("no model in " + ModelDirectory() +
             "; tools/fetch-model smollm2-135m-instruct makes it");
    return;
  }
  const auto text =
      fixtures::ReadFile(fixtures::SourceDir("smollm2-135m-instruct") + "/golden.json");
  REQUIRE(text.ok());
  const nlohmann::json golden = nlohmann::json::parse(*text);
  NodeOptions options;
  options.model_dir = ModelDirectory();
  options.kernels = path;
  options.max_context = 4096;
  options.chunk_tokens = 512;
  options.kv_dtype = kv_dtype;
  options.hbm_bytes = int64_t{512} << 20;
  options.policy.name = policy;
  options.policy.worker_deadline = absl::Seconds(60);
  Node node(options);
  for (size_t c = 0; c < golden.size(); ++c) {
    const size_t length = golden[c].at("ids").size() + golden[c].at("tokens").size();
    if (static_cast<int64_t>(length) > node.policy().exact_tokens() + 1) continue;
    const auto want = golden[c].at("tokens").get<std::vector<int32_t>>();
    const auto logprobs = golden[c].at("logprobs").get<std::vector<double>>();
    const auto margins = golden[c].at("margins").get<std::vector<double>>();
    Request request = GreedyRequest(golden[c].at("ids").get<std::vector<int32_t>>(),
                                    static_cast<uint32_t>(want.size()));
    request.sampling.logprobs = 0;
    const Generated got = node.Generate(std::move(request));
    REQUIRE(got.ids.size() == want.size());
    double squares = 0;
    size_t compared = 0;
    for (; compared < want.size(); ++compared) {
      const size_t i = compared;
      INFO("case " << c << ", token " << i << ", margin " << margins[i]);
      // After a legitimate flip the two texts differ.
      if (got.ids[i] != want[i] && margins[i] <= tolerance.margin) break;
      REQUIRE(got.ids[i] == want[i]);
      const double error = *got.tokens[i].logprob - logprobs[i];
      CHECK(std::abs(error) <= tolerance.logprob_worst);
      squares += error * error;
    }
    INFO("case " << c << ", " << compared << " tokens compared");
    if (compared > 0) {
      CHECK(std::sqrt(squares / static_cast<double>(compared)) <= tolerance.logprob_rms);
    }
  }
}

}  // namespace

TEST_CASE("SmolLM2 gives transformers' tokens on portable kernels") {
  CheckPath("portable", DType::kBFloat16, kFloat32);
}
TEST_CASE("SmolLM2 gives transformers' tokens on AVX2 kernels") {
  CheckPath("avx2", DType::kBFloat16, kFloat32);
}
TEST_CASE("SmolLM2 gives transformers' tokens on AVX-512 BF16 kernels") {
  CheckPath("avx512bf16", DType::kBFloat16, kBFloat16);
}
TEST_CASE("SmolLM2 gives transformers' tokens on AMX kernels") {
  CheckPath("amx", DType::kBFloat16, kBFloat16);
}
TEST_CASE("SmolLM2 gives transformers' tokens on a GPU", "[cuda]") {
  CheckPath("cuda", DType::kBFloat16, kCuda);
}
TEST_CASE("SmolLM2 gives transformers' log-probabilities with float32 caches") {
  const bool avx2 = kernels::FindKernelTable("avx2") != nullptr;
  CheckPath(avx2 ? "avx2" : "portable", DType::kFloat32, kExact);
}

TEST_CASE("SmolLM2 gives transformers' log-probabilities under every policy while it fits") {
  const bool avx2 = kernels::FindKernelTable("avx2") != nullptr;
  for (const char* policy : {"scout", "recall", "hgca", "clo"}) {
    INFO(policy);
    CheckPath(avx2 ? "avx2" : "portable", DType::kFloat32, kExact, policy);
  }
}
TEST_CASE("SmolLM2 gives transformers' tokens under every policy while it fits, on a GPU",
          "[cuda]") {
  for (const char* policy : {"scout", "recall", "hgca", "clo"}) {
    INFO(policy);
    CheckPath("cuda", DType::kBFloat16, kCuda, policy);
  }
}

}  // namespace sluice
