#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/e4m3.h"
#include "src/base/dtype.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/cpu/cpu_stream.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

TEST_CASE("a stream runs more commands than its ring holds, in order") {
  auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCopy);
  const auto done = (*device)->NewEvent();
  constexpr int kCopies = 10000;
  std::vector<int> chain(kCopies + 1, 0);
  chain[0] = 42;
  for (int i = 0; i < kCopies; ++i) stream->Copy(&chain[i + 1], &chain[i], sizeof(int));
  stream->Record(*done);
  done->Wait();
  CHECK(done->Ready());
  CHECK(std::count(chain.begin(), chain.end(), 42) == kCopies + 1);
}

TEST_CASE("a stream waits for another's event") {
  auto device = NewCpuDevice({"portable", 2});
  REQUIRE(device.ok());
  for (int round = 0; round < 200; ++round) {
    const auto first = (*device)->NewStream(Device::StreamKind::kCopy);
    const auto second = (*device)->NewStream(Device::StreamKind::kCompute);
    const auto copied = (*device)->NewEvent();
    const auto done = (*device)->NewEvent();
    std::vector<uint8_t> a(1 << 16, 7), b(1 << 16, 0), c(1 << 16, 0);
    first->Copy(b.data(), a.data(), a.size());
    first->Record(*copied);
    second->WaitFor(*copied);
    second->Copy(c.data(), b.data(), b.size());
    second->Record(*done);
    done->Wait();
    REQUIRE(c == a);
  }
}

TEST_CASE("an event that was never recorded is ready") {
  auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  const auto event = (*device)->NewEvent();
  CHECK(event->Ready());
  event->Wait();
}

TEST_CASE("timed events tell how long what lies between them took") {
  auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCopy);
  const auto before = (*device)->NewTimedEvent();
  const auto between = (*device)->NewTimedEvent();
  const auto after = (*device)->NewTimedEvent();
  std::vector<uint8_t> from(1 << 22, 7), to(1 << 22, 0);
  for (int round = 0; round < 3; ++round) {  // an event may be recorded again
    const auto start = std::chrono::steady_clock::now();
    stream->Record(*before);
    for (int i = 0; i < 8; ++i) stream->Copy(to.data(), from.data(), from.size());
    stream->Record(*between);
    stream->Record(*after);
    after->Wait();
    const absl::Duration outside = absl::FromChrono(std::chrono::steady_clock::now() - start);
    const absl::Duration copies = between->Since(*before);
    // A fill of 32 MiB takes longer than a microsecond, and no longer than the time around it.
    CHECK(copies > absl::Microseconds(1));
    CHECK(after->Since(*between) >= absl::ZeroDuration());
    CHECK(copies + after->Since(*between) == after->Since(*before));
    CHECK(after->Since(*before) <= outside);
    CHECK(before->Since(*after) == -after->Since(*before));
  }
}

// There are many hand-overs with pauses on both sides of the spin: a lost wake-up would hang here.
TEST_CASE("no wake-up is lost between a stream, its waiter and its helpers") {
  auto device = NewCpuDevice({"portable", 3});
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  const auto done = (*device)->NewEvent();
  std::vector<float> x(64 * 1024, 1.0f), y(64 * 1024, 0.0f), weight(1024, 1.0f);
  kernels::RmsNormParams norm{};
  norm.x = x.data();
  norm.weight = weight.data();
  norm.out = y.data();
  norm.x_stride = 1024;
  norm.rows = 64;
  norm.dim = 1024;
  norm.epsilon = 0;
  norm.out_type = DType::kFloat32;
  for (int round = 0; round < 3000; ++round) {
    if (round % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(40 + round % 40));
    (*device)->kernels().RmsNorm(*stream, norm);
    stream->Record(*done);
    done->Wait();
  }
  CHECK(y[0] == Approx(1.0f));
}

TEST_CASE("a team gives every share to exactly one worker") {
  CpuTeam team(4);
  for (int workers = 1; workers <= 4; ++workers) {
    for (int round = 0; round < 500; ++round) {
      std::atomic<int> shares[4] = {};
      team.Run(
          [](const void* work, kernels::Worker worker) {
            auto* counts = static_cast<std::atomic<int>*>(const_cast<void*>(work));
            counts[worker.index].fetch_add(worker.count);
          },
          shares, workers);
      for (int i = 0; i < 4; ++i) REQUIRE(shares[i].load() == (i < workers ? workers : 0));
    }
  }
}

TEST_CASE("memory is zeroed, and a refusal says for what it was asked") {
  auto device = NewCpuDevice({"portable", 1});
  REQUIRE(device.ok());
  auto buffer = (*device)->Allocate(MemoryKind::kDevice, 5 << 20, "a test");
  REQUIRE(buffer.ok());
  const auto* bytes = buffer->as<uint8_t>();
  CHECK(std::all_of(bytes, bytes + buffer->bytes(), [](uint8_t b) { return b == 0; }));
  const auto refused = (*device)->Allocate(MemoryKind::kPinned, size_t{1} << 60, "the caches");
  REQUIRE(absl::IsResourceExhausted(refused.status()));
  CHECK(std::string(refused.status().message()).find("the caches") != std::string::npos);
}

TEST_CASE("unknown kernels are refused with those that this processor has") {
  const auto device = NewCpuDevice({"quantum", 1});
  REQUIRE(absl::IsInvalidArgument(device.status()));
  const std::string message(device.status().message());
  CHECK(message.find("quantum") != std::string::npos);
  CHECK(message.find("portable") != std::string::npos);
}

TEST_CASE("matrices prepared together are one below the other") {
  for (const char* name : {"reference", "portable"}) {
    auto device = NewCpuDevice({name, 2});
    REQUIRE(device.ok());
    constexpr int kColumns = 5;
    std::vector<uint16_t> a(3 * kColumns), b(18 * kColumns);
    for (size_t i = 0; i < a.size(); ++i) a[i] = FloatToBFloat16(static_cast<float>(i % 7) - 3);
    for (size_t i = 0; i < b.size(); ++i) b[i] = FloatToBFloat16(static_cast<float>(i % 5) - 2);
    const MatrixPart parts[] = {{a.data(), 3}, {b.data(), 18}};
    auto weight = (*device)->kernels().Prepare(parts, kColumns);
    REQUIRE(weight.ok());
    CHECK(weight->matrix.n == 21);
    const std::vector<float> x = {1, -1, 2, 0.5f, -2};
    std::vector<float> y(21, 99.0f);
    kernels::LinearParams linear{};
    linear.x = x.data();
    linear.w = weight->matrix;
    linear.y = y.data();
    linear.rows = 1;
    linear.x_type = DType::kFloat32;
    const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
    const auto done = (*device)->NewEvent();
    (*device)->kernels().Linear(*stream, linear);
    stream->Record(*done);
    done->Wait();
    for (size_t row = 0; row < 21; ++row) {
      float want = 0;
      for (size_t k = 0; k < kColumns; ++k) {
        const uint16_t w = row < 3 ? a[row * kColumns + k] : b[(row - 3) * kColumns + k];
        want += x[k] * BFloat16ToFloat(w);
      }
      CHECK(y[row] == Approx(want));
    }
  }
}

TEST_CASE("parts of any form are prepared together, exactly where the kernels are exact") {
  constexpr int kColumns = 200, kRows = 150;  // neither is a multiple of a block of scales
  const auto element = [](int row, int col, int salt) { return (row * 31 + col * 7 + salt) % 15; };
  std::vector<uint16_t> bf16;
  std::vector<float> floats;
  std::vector<uint8_t> fp8;
  const std::vector<float> scales = {0.1f, 0.3f, 0.7f, 1.1f};  // [2][2]
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kColumns; ++col) {
      bf16.push_back(FloatToBFloat16(static_cast<float>(element(row, col, 0)) - 7));
      floats.push_back(static_cast<float>(element(row, col, 1)) / 3);
      fp8.push_back(kernels::FloatToE4M3(static_cast<float>(element(row, col, 2)) - 7));
    }
  }
  const kernels::WeightFormula formula{123, 0.5f, 0.0f};
  const std::vector<MatrixPart> parts = {
      {.data = bf16.data(), .rows = kRows},
      {.data = nullptr, .rows = kRows, .values = floats.data()},
      {.data = nullptr, .rows = kRows, .fp8 = fp8.data(), .scales = scales.data()},
      {.data = nullptr, .rows = kRows, .formula = formula, .fp8_formula = true},
      {.data = nullptr, .rows = kRows, .formula = formula}};
  const auto want = [&](int part, int row, int col) -> float {
    const auto i = static_cast<size_t>(row * kColumns + col);
    switch (part) {
      case 0:
        return BFloat16ToFloat(bf16[i]);
      case 1:
        return floats[i];
      case 2:
        return kernels::E4M3ToFloat(fp8[i]) *
               scales[static_cast<size_t>(row / 128 * 2 + col / 128)];
      case 3:
        return kernels::E4M3ToFloat(kernels::FormulaE4M3(formula, i)) *
               kernels::FormulaScale(formula);
      default:
        return BFloat16ToFloat(kernels::FormulaElement(formula, i));
    }
  };
  for (const char* name : {"reference", "portable"}) {
    auto device = NewCpuDevice({name, 2});
    REQUIRE(device.ok());
    const auto weight = (*device)->kernels().Prepare(parts, kColumns);
    REQUIRE(weight.ok());
    REQUIRE(weight->matrix.n == 5 * kRows);
    const bool exact = std::string(name) == "reference";
    CHECK((weight->matrix.layout == kernels::WeightLayout::kFloat32) == exact);
    const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
    const auto done = (*device)->NewEvent();
    for (const int col : {0, 63, 127, 128, 199}) {  // a column at a time
      std::vector<float> x(kColumns), y(5 * kRows, 99.0f);
      x[static_cast<size_t>(col)] = 1;
      kernels::LinearParams linear{};
      linear.x = x.data();
      linear.w = weight->matrix;
      linear.y = y.data();
      linear.rows = 1;
      linear.x_type = DType::kFloat32;
      (*device)->kernels().Linear(*stream, linear);
      stream->Record(*done);
      done->Wait();
      for (int row = 0; row < 5 * kRows; ++row) {
        INFO(name << ", part " << row / kRows << ", row " << row % kRows << ", column " << col);
        const float value = want(row / kRows, row % kRows, col);
        REQUIRE(y[static_cast<size_t>(row)] ==
                (exact ? value : BFloat16ToFloat(FloatToBFloat16(value))));
      }
    }
  }
}

}  // namespace
}  // namespace sluice
