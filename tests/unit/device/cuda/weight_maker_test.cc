// Matrices of weights on the GPU from parts of every form.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/fp8_pairs.h"
#include "src/device/cuda/cuda_device.h"
#include "src/device/kernel_set.h"
#include "src/device/weight_rows.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int32_t kColumns = 300;  // 3 columns of scales
constexpr int32_t kScaleColumns = 3;

// A part of a checkpoint in fp8.
struct Fp8Part {
  Fp8Part(int32_t count, std::mt19937_64& random)
      : rows(count), codes(size_t(count) * kColumns), scales(size_t((count + 127) / 128) * 3) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random() % 0x7F);
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    for (float& scale : scales) scale = uniform(random);
  }
  MatrixPart Part() const {
    MatrixPart part{};
    part.rows = rows;
    part.fp8 = codes.data();
    part.scales = scales.data();
    return part;
  }
  int32_t rows;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

template <typename T>
std::vector<T> Read(Device& device, const void* from, size_t count) {
  auto host = device.Allocate(MemoryKind::kPinned, count * sizeof(T), "a test");
  REQUIRE(host.ok());
  const auto stream = device.NewStream(Device::StreamKind::kCopy);
  const auto done = device.NewEvent();
  stream->Copy(host->data(), from, count * sizeof(T));
  stream->Record(*done);
  done->Wait();
  return {host->as<T>(), host->as<T>() + count};
}

MatrixPart FormulaPart(int32_t rows) {
  MatrixPart part{};
  part.rows = rows;
  part.formula = {0xABCDEF0123456789ull, 0.25f, 0.0f};
  part.fp8_formula = true;
  return part;
}

TEST_CASE("parts of fp8 stay fp8, a scale for each 32 rows", "[device][cuda]") {
  auto device = NewCudaDevice();
  if (absl::IsFailedPrecondition(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  std::mt19937_64 random(TestSeed());
  const Fp8Part first(160, random), last(100, random);
  const MatrixPart parts[] = {first.Part(), FormulaPart(64), last.Part()};
  const auto weight = (*device)->kernels().Prepare(parts, kColumns);
  REQUIRE(weight.ok());
  CHECK(weight->matrix.layout == kernels::WeightLayout::kFp8Blocks);
  CHECK(weight->matrix.n == 324);
  CHECK(weight->matrix.k == kColumns);
  CHECK(int64_t(weight->storage.bytes()) == (*device)->kernels().PreparedBytes(parts, kColumns));
  std::vector<uint8_t> made(64 * kColumns);
  kernels::FillWeights(parts[1].formula, 0, int64_t(made.size()), made.data());
  std::vector<uint8_t> want(size_t(324) * kColumns);
  auto at = std::copy(first.codes.begin(), first.codes.end(), want.begin());
  at = std::copy(made.begin(), made.end(), at);
  std::copy(last.codes.begin(), last.codes.end(), at);
  CHECK(Read<uint8_t>(**device, weight->matrix.data, want.size()) == want);
  const auto scales = Read<float>(**device, weight->matrix.scales, size_t(11) * kScaleColumns);
  for (int32_t block = 0; block < 11; ++block) {
    for (int32_t column = 0; column < kScaleColumns; ++column) {
      INFO("block " << block << " column " << column);
      const float scale = block < 5   ? first.scales[size_t(block / 4 * 3 + column)]
                          : block < 7 ? kernels::FormulaScale(parts[1].formula)
                                      : last.scales[size_t(column)];
      CHECK(scales[size_t(block * 3 + column)] == scale);
    }
  }
}

TEST_CASE("fp8 of a multiple of 16 columns is put in pairs", "[device][cuda]") {
  auto device = NewCudaDevice();
  if (!device.ok()) return SkipTest(std::string(device.status().message()));
  std::mt19937_64 random(TestSeed());
  constexpr int32_t kPairedColumns = 304;  // 3 columns of scales too
  std::vector<uint8_t> codes(size_t(64) * kPairedColumns), made(size_t(32) * kPairedColumns);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  const std::vector<float> scales(3, 1.0f);
  MatrixPart part{};
  part.rows = 64;
  part.fp8 = codes.data();
  part.scales = scales.data();
  const MatrixPart parts[] = {part, FormulaPart(32)};
  const auto weight = (*device)->kernels().Prepare(parts, kPairedColumns);
  REQUIRE(weight.ok());
  CHECK(weight->matrix.layout == kernels::kFp8Pairs);
  kernels::FillWeights(parts[1].formula, 0, int64_t(made.size()), made.data());
  codes.insert(codes.end(), made.begin(), made.end());
  std::vector<uint8_t> want(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    want[size_t(kernels::PairedPlace(int64_t(i)))] = codes[i];
  }
  CHECK(Read<uint8_t>(**device, weight->matrix.data, want.size()) == want);
}

TEST_CASE("a part of fp8 that begins inside a block of scales is refused", "[device][cuda]") {
  auto device = NewCudaDevice();
  if (absl::IsFailedPrecondition(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  const MatrixPart parts[] = {FormulaPart(100), FormulaPart(32)};
  const auto weight = (*device)->kernels().Prepare(parts, kColumns);
  REQUIRE(absl::IsInvalidArgument(weight.status()));
  const std::string message(weight.status().message());
  INFO(message);
  CHECK(message.find("row 100") != std::string::npos);
  CHECK(message.find("--device cpu") != std::string::npos);
}

TEST_CASE("parts of several forms become one bf16 matrix, each weight rounded once",
          "[device][cuda]") {
  auto device = NewCudaDevice();
  if (absl::IsFailedPrecondition(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  std::mt19937_64 random(TestSeed());
  const Fp8Part fp8(160, random);
  std::vector<float> values(70 * kColumns);
  std::normal_distribution<float> normal;
  for (float& v : values) v = normal(random);
  std::vector<uint16_t> bf16(9 * kColumns);
  for (uint16_t& v : bf16) v = static_cast<uint16_t>(random() % 0x7F00);
  MatrixPart exact{}, plain{};
  exact.rows = 70;
  exact.values = values.data();
  plain.rows = 9;
  plain.data = bf16.data();
  MatrixPart made = FormulaPart(33);
  made.fp8_formula = false;
  const MatrixPart parts[] = {fp8.Part(), exact, plain, made, FormulaPart(5)};
  const auto weight = (*device)->kernels().Prepare(parts, kColumns);
  REQUIRE(weight.ok());
  CHECK(weight->matrix.layout == kernels::WeightLayout::kRowMajor);
  std::vector<uint16_t> want(size_t(160 + 70 + 9 + 33 + 5) * kColumns);
  size_t at = 0;
  for (const MatrixPart& part : parts) {
    for (int32_t row = 0; row < part.rows; ++row, at += kColumns) {
      BFloat16Row(part, row, kColumns, want.data() + at);
    }
  }
  CHECK(Read<uint16_t>(**device, weight->matrix.data, want.size()) == want);
  CHECK(int64_t(weight->storage.bytes()) == (*device)->kernels().PreparedBytes(parts, kColumns));
}

}  // namespace
}  // namespace sluice
