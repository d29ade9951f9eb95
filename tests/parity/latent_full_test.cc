// Policy full through the whole engine on models with latent caches: it gives transformers' tokens,
// and each sequence's bits depend on that sequence alone.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::CheckGreedy;
using testing::CheckTogether;
using testing::GreedyRequest;
using testing::HasPath;
using testing::kExact;
using testing::Node;
using testing::NodeOptions;
using testing::ToleranceOf;

NodeOptions Options(const std::string& path, DType kv_dtype) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-deepseek-v32");
  options.kernels = path;
  options.kv_dtype = kv_dtype;
  options.max_context = 1024;
  return options;
}

// Prompts come in chunks, so that the same steps have rows of prompts and decode rows.
void CheckTogetherOn(const std::string& path, DType kv_dtype) {
  if (!HasPath(path)) return;
  INFO(DTypeName(kv_dtype));
  CheckTogether(Options(path, kv_dtype));
}

}  // namespace

TEST_CASE("latent models give transformers' tokens through the engine") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    NodeOptions options = Options("reference", DType::kFloat32);
    options.model_dir = fixtures::ModelDir(name);
    Node node(options);
    for (size_t c = 0; c < golden->size(); ++c) {
      const fixtures::GoldenCase& g = (*golden)[c];
      INFO(name << " case " << c);
      const auto steps = static_cast<uint32_t>(g.tokens.size());
      CheckGreedy(node.Generate(GreedyRequest(g.prompt, steps)).ids, g, kExact.margin);
      CHECK(node.Quiescent());
    }
  }
}

// Every step of cases 0 and 1 selects everything (fixtures' README).
void CheckDenseCases(const std::string& path) {
  if (!HasPath(path)) return;
  const auto golden = fixtures::LoadGolden("tiny-deepseek-v32");
  REQUIRE(golden.ok());
  Node node(Options(path, DType::kBFloat16));
  for (size_t c = 0; c < 2; ++c) {
    const fixtures::GoldenCase& g = (*golden)[c];
    INFO(path << " case " << c);
    const auto steps = static_cast<uint32_t>(g.tokens.size());
    CheckGreedy(node.Generate(GreedyRequest(g.prompt, steps)).ids, g, ToleranceOf(path).margin);
  }
}
TEST_CASE("latent models give transformers' tokens with bf16 caches") {
  CheckDenseCases("portable");
}
TEST_CASE("latent models give transformers' tokens with bf16 caches on a GPU", "[cuda]") {
  CheckDenseCases("cuda");
}

TEST_CASE("sequences of latent models together give exactly what each gives alone") {
  CheckTogetherOn("portable", DType::kFloat8E4M3);
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    if (std::string(table->name) == "avx512bf16") CheckTogetherOn(table->name, DType::kBFloat16);
  }
}
TEST_CASE("sequences of latent models together give exactly what each gives alone on a GPU",
          "[cuda]") {
  for (const DType type : {DType::kFloat8E4M3, DType::kBFloat16}) CheckTogetherOn("cuda", type);
}

TEST_CASE("preempted sequences of latent models go on with the same bits") {
  NodeOptions options = Options("portable", DType::kFloat8E4M3);
  options.hbm_bytes = 700 * 3 * (656 + 132);  // Three layers, for the longest sequence.
  options.overcommit = 4;
  CHECK(CheckTogether(options) > 0);
}

}  // namespace sluice
