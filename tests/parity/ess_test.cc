// Policy ess is lossless: what policy full attends to and its tokens, with pools that are smaller
// than what a few steps select, under every schedule, and without its ideas (offload-naive).
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/against_full.h"
#include "tests/parity/latent_watch.h"
#include "tests/parity/parity_support.h"
#include "tests/parity/teacher.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::Best;
using testing::BothPolicies;
using testing::CheckTogether;
using testing::Generated;
using testing::GreedyRequest;
using testing::HasPath;
using testing::LatentWatch;
using testing::Node;
using testing::NodeOptions;
using testing::RelativeError;
using testing::Teacher;
using Overlap = PolicyOptions::Ess::Overlap;

void SmallPools(PolicyOptions& options) {
  options.name = "ess";
  options.ess.sparse_memory_ratio = 0.2;
  options.ess.least_places = 0;  // what a step selects, 64 tokens, and the next one
}

NodeOptions OptionsOf(const std::string& model, const std::string& path, DType kv_dtype,
                      const std::string& policy, Overlap overlap = Overlap::kLayerWise) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(model);
  options.kernels = path;
  options.kv_dtype = kv_dtype;
  options.max_context = 512;
  SmallPools(options.policy);
  options.policy.name = policy;
  options.policy.ess.overlap = overlap;
  return options;
}

std::vector<Generated> Run(const NodeOptions& options,
                           const std::vector<fixtures::GoldenCase>& golden) {
  Node node(options);
  std::vector<Generated> out;
  for (const fixtures::GoldenCase& g : golden) {
    out.push_back(node.Generate(GreedyRequest(g.prompt, static_cast<uint32_t>(g.tokens.size()))));
    CHECK(out.back().finish.status.ok());
  }
  CHECK(node.Quiescent());
  return out;
}

// Up to a token whose golden margin is no more than `margin`: what follows a flip is another text.
void CheckTokens(const std::string& path, DType kv_dtype, double margin,
                 const std::vector<std::string>& models = {"tiny-deepseek-v32",
                                                           "tiny-deepseek-v32-fp8"},
                 const std::vector<Overlap>& overlaps = {Overlap::kNone, Overlap::kDa,
                                                         Overlap::kDba},
                 size_t cases = 3) {
  for (const std::string& model : models) {
    auto golden = fixtures::LoadGolden(model);
    REQUIRE(golden.ok());
    golden->resize(std::min(cases, golden->size()));
    const std::vector<Generated> full = Run(OptionsOf(model, path, kv_dtype, "full"), *golden);
    std::vector<NodeOptions> others = {OptionsOf(model, path, kv_dtype, "offload-naive")};
    for (const Overlap overlap : overlaps) {
      others.push_back(OptionsOf(model, path, kv_dtype, "ess", overlap));
    }
    for (const NodeOptions& options : others) {
      const std::vector<Generated> got = Run(options, *golden);
      for (size_t i = 0; i < full.size(); ++i) {
        REQUIRE(got[i].ids.size() == full[i].ids.size());
        for (size_t t = 0; t < full[i].ids.size(); ++t) {
          if (got[i].ids[t] != full[i].ids[t] && double{(*golden)[i].margin[t]} <= margin) break;
          INFO(path << ", " << model << ", " << options.policy.name << ", case " << i << ", token "
                    << t << ", margin " << (*golden)[i].margin[t]);
          REQUIRE(got[i].ids[t] == full[i].ids[t]);
        }
      }
    }
  }
}

TEST_CASE("ess gives full's tokens from float32 caches") {
  CheckTokens("reference", DType::kFloat32, 0, {"tiny-deepseek-v32"}, {Overlap::kDba});
}
TEST_CASE("ess gives full's tokens from packed caches") {
  CheckTokens("portable", DType::kFloat8E4M3, testing::kFloat32.margin, {"tiny-deepseek-v32-fp8"});
}
TEST_CASE("ess gives full's tokens from packed caches (cuda)", "[cuda]") {
  if (!HasPath("cuda")) return;
  // Case 2 selects 64 of 200 tokens and more. In a random model one selection that flips near the
  // cut, as an activation's last bit does it, is another text (fixtures' README); that what is
  // selected is attended to alike is tests/unit/attention/ess_policy_test.cc's.
  CheckTokens("cuda", DType::kFloat8E4M3, testing::kCuda.margin,
              {"tiny-deepseek-v32", "tiny-deepseek-v32-fp8"},
              {Overlap::kNone, Overlap::kDa, Overlap::kDba}, 2);
}

// Both policies in one model that goes on with what full gives: their inputs, and so what is
// selected, are the same to the bit, in every case and step.
void CheckOnSameInputs(const std::string& path, DType kv_dtype) {
  if (!HasPath(path)) return;
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    Teacher teacher(fixtures::ModelDir(name), path, kv_dtype);
    const testing::PlacedPolicy ess = teacher.Place(SmallPools);
    BothPolicies both(&teacher.policy(), ess.policy.get(), &teacher.device(), teacher.model());
    teacher.SetFront(&both);
    double worst = 0;
    for (const fixtures::GoldenCase& g : *golden) {
      std::vector<int32_t> tokens = g.prompt;
      tokens.insert(tokens.end(), g.tokens.begin(), g.tokens.end());
      teacher.Begin(tokens);
      const auto prompt = static_cast<int>(g.prompt.size());
      teacher.Step(0, prompt, /*generates=*/false);
      for (int layer = 0; layer < teacher.config().layers; ++layer) {
        REQUIRE(both.First(layer, prompt) == both.Second(layer, prompt));
      }
      for (int step = 0; step < static_cast<int>(g.tokens.size()); ++step) {
        teacher.Step(prompt + step, 1, /*generates=*/true);
        for (int layer = 0; layer < teacher.config().layers; ++layer) {
          const double error = RelativeError(both.Second(layer, 1)[0], both.First(layer, 1)[0]);
          INFO(path << ", " << name << ", prompt of " << prompt << ", step " << step << ", layer "
                    << layer << ": " << error);
          REQUIRE(error <= 2e-3);
          worst = std::max(worst, error);
        }
      }
    }
    int64_t missing = 0;
    for (const PolicyStatistics::Layer& layer : ess.policy->Statistics().layers) {
      missing += layer.missing;
    }
    CHECK(missing > 0);
    std::printf("%s on %s: worst relative error of attention against full %.2g, %lld misses\n",
                name.c_str(), path.c_str(), worst, static_cast<long long>(missing));
  }
}

TEST_CASE("ess attends as full does to the same rows of a model") {
  CheckOnSameInputs("reference", DType::kFloat32);
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    CheckOnSameInputs(table->name, DType::kFloat8E4M3);
  }
}
TEST_CASE("ess attends as full does to the same rows of a model (cuda)", "[cuda]") {
  CheckOnSameInputs("cuda", DType::kFloat8E4M3);
}

// Two models, each going on with what its policy gives, full's tokens being dictated to both.
class SideBySide {
 public:
  SideBySide(const std::string& model, const std::string& path, DType kv_dtype)
      : full_(fixtures::ModelDir(model), path, kv_dtype),
        ess_(fixtures::ModelDir(model), path, kv_dtype, SmallPools),
        watch_full_(&full_.policy(), &full_.device(), full_.model()),
        watch_ess_(&ess_.policy(), &ess_.device(), ess_.model()) {
    full_.SetFront(&watch_full_);
    ess_.SetFront(&watch_ess_);
  }

  void Run(const fixtures::GoldenCase& golden) {
    const auto prompt = static_cast<int>(golden.prompt.size());
    std::vector<int32_t> tokens = golden.prompt;
    tokens.resize(golden.prompt.size() + golden.tokens.size());
    full_.Begin(tokens);
    ess_.Begin(tokens);
    std::vector<float> want = full_.Step(0, prompt, false), got = ess_.Step(0, prompt, false);
    watch_full_.Collect(0, prompt);
    watch_ess_.Collect(0, prompt);
    for (int step = 0;; ++step) {
      std::vector<float> sorted = want;
      std::sort(sorted.rbegin(), sorted.rend());
      const int32_t token = Best(want);
      std::printf("  step %2d: logits differ by %.3g, tokens %d %d, margin %.3f\n", step,
                  RelativeError(got, want), token, Best(got), sorted[0] - sorted[1]);
      if (step == static_cast<int>(golden.tokens.size()) || flips_ > 3) return;
      const int position = prompt + step;
      full_.SetToken(position, token);
      ess_.SetToken(position, token);
      want = full_.Step(position, 1, true);
      got = ess_.Step(position, 1, true);
      watch_full_.Collect(position, 1);
      watch_ess_.Collect(position, 1);
      for (int layer = 0; layer < full_.config().layers; ++layer) Compare(layer);
    }
  }

 private:
  void Compare(int layer) {
    const std::vector<double> full = watch_full_.Scores(layer), ess = watch_ess_.Scores(layer);
    const std::vector<int32_t> a = watch_full_.Selected(layer), b = watch_ess_.Selected(layer);
    std::vector<int32_t> gone, come;
    std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(gone));
    std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(come));
    double apart = 0, most = -1e30, low = 1e30, least = 1e30;
    for (size_t t = 0; t < full.size(); ++t) {
      apart = std::max(apart, std::abs(full[t] - ess[t]));
      most = std::max(most, full[t]);
      low = std::min(low, full[t]);
    }
    for (const int32_t unit : a) least = std::min(least, full[static_cast<size_t>(unit)]);
    std::printf("    layer %d: queries %s, results %s, scores %.4f..%.4f, cut %.4f, apart %.3g;",
                layer, watch_full_.Query(layer) == watch_ess_.Query(layer) ? "same" : "differ",
                watch_full_.Result(layer) == watch_ess_.Result(layer) ? "same" : "differ", low,
                most, least, apart);
    for (const int32_t t : gone) {
      std::printf(" -%d (%.5f, %.5f)", t, full[static_cast<size_t>(t)],
                  ess[static_cast<size_t>(t)]);
    }
    for (const int32_t t : come) {
      std::printf(" +%d (%.5f, %.5f)", t, full[static_cast<size_t>(t)],
                  ess[static_cast<size_t>(t)]);
    }
    std::printf("\n");
    if (!gone.empty()) ++flips_;
  }

  int flips_ = 0;
  Teacher full_, ess_;
  LatentWatch watch_full_, watch_ess_;
};

void Trace(const std::string& path) {
  if (!HasPath(path)) return;
  for (const std::string& model : fixtures::TinyLatentModels()) {
    const auto golden = fixtures::LoadGolden(model);
    REQUIRE(golden.ok());
    std::printf("%s on %s\n", model.c_str(), path.c_str());
    SideBySide(model, path, DType::kFloat8E4M3).Run((*golden)[2]);
  }
}
TEST_CASE("trace") {
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) Trace(table->name);
}
TEST_CASE("trace (cuda)", "[cuda]") { Trace("cuda"); }

TEST_CASE("under ess a sequence gives the same bits alone and among others") {
  NodeOptions options = testing::TogetherOptions("portable");
  options.model_dir = fixtures::ModelDir("tiny-deepseek-v32");
  options.kv_dtype = DType::kFloat8E4M3;
  SmallPools(options.policy);
  CheckTogether(options);
}

}  // namespace
}  // namespace sluice
