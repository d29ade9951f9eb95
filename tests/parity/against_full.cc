#include "tests/parity/against_full.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>

#include "kernels/kernel_table.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice::testing {

double Cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, a2 = 0, b2 = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += double{a[i]} * b[i];
    a2 += double{a[i]} * a[i];
    b2 += double{b[i]} * b[i];
  }
  return dot / std::sqrt(a2 * b2);
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

int32_t Best(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void Dictate(
    const fixtures::GoldenCase& golden, Teacher& full, Teacher& other,
    const std::function<void(const std::vector<float>&, const std::vector<float>&)>& visit) {
  std::vector<int32_t> tokens = golden.prompt;
  tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.end());
  const int prompt = static_cast<int>(golden.prompt.size());
  for (Teacher* teacher : {&full, &other}) {
    teacher->Begin(tokens);
    teacher->Step(0, prompt, /*generates=*/false);
  }
  for (int i = 0; i < static_cast<int>(golden.tokens.size()); ++i) {
    INFO("step " << i);
    const std::vector<float> want = full.Step(prompt + i, 1, /*generates=*/true);
    visit(want, other.Step(prompt + i, 1, /*generates=*/true));
  }
}

fixtures::GoldenCase LongestCase(const std::string& name) {
  const auto golden = fixtures::LoadGolden(name);
  REQUIRE(golden.ok());
  return *std::max_element(golden->begin(), golden->end(), [](const auto& a, const auto& b) {
    return a.prompt.size() < b.prompt.size();
  });
}

void CheckSameAsFull(const std::string& kernels, DType kv_dtype, double tolerance,
                     const SameAsFull& check, double margin) {
  for (const std::string& name : fixtures::TinyModels()) {
    INFO(name << " on " << kernels);
    const fixtures::GoldenCase golden = LongestCase(name);
    Teacher full(fixtures::ModelDir(name), kernels, kv_dtype);
    Teacher other(fixtures::ModelDir(name), kernels, kv_dtype, [&](PolicyOptions& options) {
      options.host_kernels = kernels::FindKernelTable(kernels.c_str());
      check.options(options, static_cast<int>(golden.prompt.size()));
    });
    size_t step = 0;
    double worst = 0;
    Dictate(golden, full, other, [&](const auto& want, const auto& got) {
      const double error = RelativeError(got, want);
      worst = std::max(worst, error);
      CHECK(error <= tolerance);
      ++step;
      const bool close = step < golden.margin.size() && double{golden.margin[step]} <= margin;
      if (!close) CHECK(Best(got) == Best(want));
      check.step(other);
    });
    for (const PolicyStatistics::Layer& layer : other.policy().Statistics().layers) {
      check.layer(layer);
    }
    std::printf("%s on %s: worst relative error of logits against full %.2g\n", name.c_str(),
                kernels.c_str(), worst);
  }
}

void CheckSameAsFullOnEveryPath(const SameAsFull& check) {
  CheckSameAsFull("reference", DType::kFloat32, 1e-5, check);
  for (const kernels::KernelTable* table : kernels::AvailableKernelTables()) {
    const std::string path = table->name;
    if (path == "reference") continue;
    const bool rounds = table->activation_type == kernels::DType::kBFloat16;
    CheckSameAsFull(path, DType::kBFloat16, rounds ? 2e-2 : 1e-3, check);
  }
}

void CheckSameAsFullOnGpu(const SameAsFull& check) {
  const absl::Status status = TestDevice("cuda").status();
  if (absl::IsNotFound(status)) return SkipTest(std::string(status.message()));
  CheckSameAsFull("cuda", DType::kBFloat16, 3e-2, check, /*margin=*/0.15);
}

}  // namespace sluice::testing
