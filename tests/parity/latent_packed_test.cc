// Every kernel path over packed caches, compared with the float64 reference on the same caches.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/e4m3.h"
#include "src/base/dtype.h"
#include "src/model/checkpoint.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/latent_outcome.h"
#include "tests/parity/latent_teacher.h"
#include "tests/parity/parity_support.h"

namespace sluice {
namespace {

using fixtures::GoldenCase;
using testing::BoundsOf;
using testing::Difference;
using testing::Golden;
using testing::HasPath;
using testing::IsWide;
using testing::Joined;
using testing::LatentBounds;
using testing::LatentTeacher;
using testing::Outcome;
using testing::Recall;
using testing::Summarise;
using testing::Text;

// Returns the largest gap of a list that differs from the reference's, as a part of the range of
// its scores.
double Gap(const std::vector<int32_t>& got, const std::vector<int32_t>& want,
           const std::vector<float>& scores) {
  std::vector<int32_t> gone, come;
  std::set_difference(want.begin(), want.end(), got.begin(), got.end(), std::back_inserter(gone));
  std::set_difference(got.begin(), got.end(), want.begin(), want.end(), std::back_inserter(come));
  REQUIRE(gone.size() == come.size());
  if (gone.empty()) return 0;
  const auto worse = [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] < scores[static_cast<size_t>(b)];
  };
  const auto [least, most] = std::minmax_element(scores.begin(), scores.end());
  const float best_gone =
      scores[static_cast<size_t>(*std::max_element(gone.begin(), gone.end(), worse))];
  const float worst_come =
      scores[static_cast<size_t>(*std::min_element(come.begin(), come.end(), worse))];
  return (double{best_gone} - double{worst_come}) / (double{*most} - double{*least});
}

// Steps over the golden prompts' quantised caches: before each step the path gets the reference's
// caches.
Outcome StepBeside(LatentTeacher& reference, LatentTeacher& teacher, const GoldenCase& golden) {
  const int prompt = static_cast<int>(golden.prompt.size());
  reference.Begin(Joined(golden));
  teacher.Begin(Joined(golden));
  reference.SetGolden(golden);
  Outcome out;
  for (size_t step = 0; step < golden.tokens.size(); ++step) {
    const int position = prompt + static_cast<int>(step);
    teacher.SetCaches(reference.Caches());
    const std::vector<float> want = reference.Step(position, 1, /*generates=*/true);
    teacher.Step(position, 1, /*generates=*/true);
    std::vector<std::vector<int32_t>> selected;
    for (int layer = 0; layer < teacher.config().layers; ++layer) {
      selected.push_back(reference.Selected(layer));
      const std::vector<int32_t> got = teacher.Selected(layer);
      out.recall += Recall(got, selected.back()) / static_cast<double>(golden.tokens.size()) /
                    teacher.config().layers;
      // Only the first layer that differs counts; the next ones have another input.
      const bool first = std::all_of(selected.begin(), selected.end() - 1, [&](const auto& list) {
        return list == teacher.Selected(static_cast<int>(&list - selected.data()));
      });
      if (first) {
        out.gap =
            std::max(out.gap, Gap(got, selected.back(), reference.Scores(layer, position + 1)));
      }
    }
    teacher.ForceSelection(selected);
    const std::vector<float> got = teacher.Step(position, 1, /*generates=*/true);
    teacher.ForceSelection({});
    out.steps.push_back(Difference(got, want.data()));
  }
  Summarise(&out);
  return out;
}

// Writes the fp8 model's weights as a path with bf16 weights keeps them.
void WriteRounded(const std::string& from, const std::string& to) {
  auto config = nlohmann::json::parse(fixtures::ReadFile(from + "/config.json").value());
  config.erase("quantization_config");
  REQUIRE(fixtures::WriteFile(to + "/config.json", config.dump()).ok());
  const auto checkpoint = Checkpoint::Open(from);
  REQUIRE(checkpoint.ok());
  const auto bytes_of = [](const Checkpoint::Entry& entry) {
    return reinterpret_cast<const char*>(entry.file->Data(*entry.tensor));
  };
  constexpr const char* kScales = "_scale_inv";
  std::vector<fixtures::RawTensor> tensors;
  for (const auto& [name, entry] : checkpoint->tensors()) {
    if (absl::EndsWith(name, kScales)) continue;
    const auto& shape = entry.tensor->shape;
    if (entry.tensor->type != TensorType::kF8E4M3) {
      tensors.push_back({name, entry.tensor->type, shape, {bytes_of(entry), entry.tensor->bytes}});
      continue;
    }
    const auto& scales = checkpoint->tensors().at(absl::StrCat(name, kScales));
    std::string rounded;
    for (int64_t i = 0; i < shape[0] * shape[1]; ++i) {
      const int64_t at = i / shape[1] / 128 * scales.tensor->shape[1] + i % shape[1] / 128;
      float scale;
      std::memcpy(&scale, bytes_of(scales) + at * 4, 4);
      const auto code = static_cast<uint8_t>(bytes_of(entry)[i]);
      const uint16_t value = FloatToBFloat16(kernels::E4M3ToFloat(code) * scale);
      rounded.append(reinterpret_cast<const char*>(&value), 2);
    }
    tensors.push_back({name, TensorType::kBF16, shape, rounded});
  }
  REQUIRE(fixtures::WriteSafetensors(to + "/model.safetensors", tensors).ok());
}

void CheckAgainstReference(const std::string& path) {
  if (!HasPath(path)) return;
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const LatentBounds bounds = BoundsOf(path, name);
    std::string dir = fixtures::ModelDir(name);
    const fixtures::TempDir rounded;
    if (IsWide(path) && name == "tiny-deepseek-v32-fp8") {
      WriteRounded(dir, rounded.path());
      dir = rounded.path();
    }
    LatentTeacher reference(dir, "reference", DType::kFloat8E4M3);
    LatentTeacher teacher(fixtures::ModelDir(name), path, DType::kFloat8E4M3);
    const auto golden = Golden(name);
    for (size_t c = 0; c < golden.size(); ++c) {
      const Outcome out = StepBeside(reference, teacher, golden[c]);
      INFO(path << ", " << name << " packed, case " << c << ": " << Text(out));
      CHECK(out.worst <= bounds.packed);
      CHECK(out.median <= bounds.packed_median);
      CHECK(out.recall >= bounds.overlap);
      CHECK(out.gap <= bounds.gap);
    }
  }
}

TEST_CASE("packed caches on portable kernels") { CheckAgainstReference("portable"); }
TEST_CASE("packed caches on AVX2 kernels") { CheckAgainstReference("avx2"); }
TEST_CASE("packed caches on AVX-512 BF16 kernels") { CheckAgainstReference("avx512bf16"); }
TEST_CASE("packed caches on AMX kernels") { CheckAgainstReference("amx"); }
TEST_CASE("packed caches on a GPU", "[cuda]") { CheckAgainstReference("cuda"); }

}  // namespace
}  // namespace sluice
