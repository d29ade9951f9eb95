// Every kernel path on every tiny model, held to transformers' logits and tokens.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/parity_support.h"
#include "tests/parity/teacher.h"
#include "tests/support/device.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::CheckGreedy;
using testing::CheckTeacherForced;
using testing::CheckTogether;
using testing::Generated;
using testing::GreedyRequest;
using testing::HasPath;
using testing::kExact;
using testing::Node;
using testing::NodeOptions;
using testing::Teacher;
using testing::TogetherOptions;
using testing::Tolerance;
using testing::ToleranceOf;

void CheckPath(const std::string& path) {
  if (!HasPath(path)) return;
  const Tolerance tolerance = ToleranceOf(path);
  for (const std::string& name : fixtures::TinyModels()) {
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    Teacher teacher(fixtures::ModelDir(name), path, DType::kBFloat16);
    NodeOptions options;
    options.model_dir = fixtures::ModelDir(name);
    options.kernels = path;
    options.max_context = 1024;
    Node node(options);
    for (size_t c = 0; c < golden->size(); ++c) {
      const fixtures::GoldenCase& g = (*golden)[c];
      INFO(name << " case " << c);
      CheckTeacherForced(teacher, g, tolerance, /*from_cache=*/false);
      CheckTeacherForced(teacher, g, tolerance, /*from_cache=*/true);

      const auto steps = static_cast<uint32_t>(g.tokens.size());
      CheckGreedy(node.Generate(GreedyRequest(g.prompt, steps)).ids, g, tolerance.margin);
      Request pushed = GreedyRequest({}, steps);
      pushed.handoff.transfer_id =
          node.Push(g.prompt, static_cast<uint32_t>(g.prompt.size()), steps, g.k, g.v);
      const Generated generated = node.Generate(std::move(pushed));
      CheckGreedy(generated.ids, g, tolerance.margin);
      CHECK(generated.finish.cached_tokens == g.prompt.size());
      CHECK(node.Quiescent());
    }
  }
}

}  // namespace

TEST_CASE("tiny models match transformers on reference kernels") { CheckPath("reference"); }
TEST_CASE("tiny models match transformers on portable kernels") { CheckPath("portable"); }
TEST_CASE("tiny models match transformers on AVX2 kernels") { CheckPath("avx2"); }
TEST_CASE("tiny models match transformers on AVX-512 BF16 kernels") { CheckPath("avx512bf16"); }
TEST_CASE("tiny models match transformers on AMX kernels") { CheckPath("amx"); }

TEST_CASE("tiny models match transformers on a GPU", "[cuda]") { CheckPath("cuda"); }

TEST_CASE("reference kernels with float32 caches match transformers to 1e-3") {
  for (const std::string& name : fixtures::TinyModels()) {
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    Teacher teacher(fixtures::ModelDir(name), "reference", DType::kFloat32);
    for (size_t c = 0; c < golden->size(); ++c) {
      INFO(name << " case " << c);
      CheckTeacherForced(teacher, (*golden)[c], kExact, /*from_cache=*/false);
    }
  }
}

TEST_CASE("sixteen sequences together give exactly what each gives alone") {
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    if (std::string(table->name) != "reference") CheckTogether(TogetherOptions(table->name));
  }
}
TEST_CASE("sixteen sequences together give exactly what each gives alone on a GPU", "[cuda]") {
  if (HasPath("cuda")) CheckTogether(TogetherOptions("cuda"));
}

}  // namespace sluice
