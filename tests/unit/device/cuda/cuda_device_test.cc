// Tests of the CUDA device alone: the sentence for an unfit machine, errors of the GPU, and large
// pinned memory.
#include <catch2/catch.hpp>
#include <cstring>
#include <string>
#include <vector>

#include "src/base/error.h"
#include "src/device/cuda/cuda_device.h"
#include "src/device/cuda/cuda_machine.h"
#include "src/device/cuda/read_probe.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

CudaMachine Good() {
  CudaMachine machine;
  machine.driver_version = machine.runtime_version = 13000;
  machine.gpus = 1;
  machine.gpu = "NVIDIA H100 80GB HBM3";
  machine.major = 9;
  return machine;
}

// The sentence has all of these parts, and a remedy.
void CheckRefused(const CudaMachine& machine, const std::vector<std::string>& parts) {
  const absl::Status status = CheckCudaMachine(machine);
  REQUIRE(absl::IsFailedPrecondition(status));
  const std::string message(status.message());
  INFO(message);
  for (const std::string& part : parts) CHECK(message.find(part) != std::string::npos);
  CHECK(message.find("--device cpu") != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("an unfit machine is refused with what it lacks", "[device]") {
  CHECK(CheckCudaMachine(Good()).ok());
  CudaMachine machine = Good();
  machine.driver_version = 13020;  // newer drivers are as good, and so is an older one of CUDA 13
  machine.runtime_version = 13010;
  CHECK(CheckCudaMachine(machine).ok());
  std::swap(machine.driver_version, machine.runtime_version);
  CHECK(CheckCudaMachine(machine).ok());

  machine = Good();
  machine.driver_version = 0;
  CheckRefused(machine, {"no NVIDIA driver", "13.0"});
  machine = Good();
  machine.driver_version = 12040;
  machine.gpus = 0;
  machine.error = "CUDA driver version is insufficient for CUDA runtime version";
  CheckRefused(machine, {"12.4", "13.0", "newer driver"});
  machine = Good();
  machine.gpus = 0;
  CheckRefused(machine, {"no GPU", "CUDA_VISIBLE_DEVICES"});
  machine.error = "system not yet initialized";
  CheckRefused(machine, {"system not yet initialized"});
  machine = Good();
  machine.gpu = "NVIDIA A100-SXM4-80GB";
  machine.major = 8;
  CheckRefused(machine, {"NVIDIA A100-SXM4-80GB", "8.0", "9.0", "H100"});
}

TEST_CASE("a model that an operator would refuse is refused by name (cuda)", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  const KernelSet& kernels = (*device)->kernels();
  CHECK(kernels.Check({4096, 151936, 32, 128}).ok());
  const auto refuses = [&](const ModelShape& shape, const char* field) {
    const absl::Status status = kernels.Check(shape);
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Catch::StartsWith(std::string(field) + ": "));
  };
  refuses({4096, 151936, 24, 128}, "block_tokens");
  refuses({16388, 151936, 32, 128}, "hidden_size");
  refuses({4096, 400000, 32, 128}, "vocab_size");
  refuses({4096, 151936, 32, 72}, "head_dim");
  refuses({4096, 151936, 32, 512}, "head_dim");
}

TEST_CASE("the probe reads a GPU's memory at a rate that it can have (cuda)", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda", /*threads=*/1);
  if (absl::IsNotFound(device.status())) return SkipTest(std::string(device.status().message()));
  REQUIRE(device.ok());
  constexpr size_t kWindow = size_t{256} << 20;
  const auto window = (*device)->Allocate(MemoryKind::kDevice, kWindow, "a window");
  REQUIRE(window.ok());
  const double rate = CudaReadRate(window->data(), kWindow, 8 * kWindow);
  CHECK(rate > 100e9);
  CHECK(rate < 20e12);
  CHECK((*device)->Health().ok());
}

TEST_CASE("a failing operator is named by the device's health", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  kernels::RmsNormParams nonsense{};
  nonsense.rows = 1;
  nonsense.dim = -4;
  SECTION("enqueued: the device has failed") {
    (*device)->kernels().RmsNorm(*stream, nonsense);
    const absl::Status health = (*device)->Health();
    REQUIRE(absl::IsInternal(health));
    CHECK(ReasonOf(health) == "GPU_FAILED");
    CHECK(std::string(health.message()).find("the GPU failed: RMSNorm") == 0);
    const auto done = (*device)->NewEvent();
    stream->Record(*done);
    done->Wait();
  }
  SECTION("recorded: the recording has, and the device goes on") {
    const auto program =
        (*device)->Record(*stream, [&](Stream& s) { (*device)->kernels().RmsNorm(s, nonsense); });
    REQUIRE(absl::IsInternal(program.status()));
    CHECK(std::string(program.status().message()).find("RMSNorm") == 0);
    CHECK((*device)->Health().ok());
    CHECK((*device)->Record(*stream, [](Stream&) {}).ok());
  }
}

TEST_CASE("a program with a branch that nothing comes after is refused", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  const auto memory = (*device)->Allocate(MemoryKind::kDevice, 64, "a test");
  REQUIRE(memory.ok());
  const auto refused = [&](std::function<void(Stream&)> enqueue, const char* why) {
    const auto program = (*device)->Record(*stream, std::move(enqueue));
    REQUIRE(absl::IsInternal(program.status()));
    CHECK_THAT(std::string(program.status().message()), Catch::Contains(why));
  };
  for (int round = 0; round < 2; ++round) {
    refused(
        [&](Stream& s) {
          s.Branch(0).After(s);
          s.Branch(0).Fill(memory->data(), 1, 64);
        },
        "After() all its branches");
    refused([&](Stream& s) { s.Branch(0).Fill(memory->data(), 1, 64); },
            "before it came after anything");
    // The stream and its branch go on, in programs and outside.
    stream->Branch(0).After(*stream);
    stream->Branch(0).Fill(memory->data(), 2, 64);
    stream->After(stream->Branch(0));
    CHECK((*device)
              ->Record(*stream,
                       [&](Stream& s) {
                         s.Branch(0).After(s);
                         s.Branch(0).Fill(memory->data(), 1, 64);
                         s.After(s.Branch(0));
                       })
              .ok());
    const auto done = (*device)->NewEvent();
    stream->Record(*done);
    done->Wait();
    CHECK((*device)->Health().ok());
  }
}

TEST_CASE("copies anywhere in pinned memory of more than a GiB", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  constexpr size_t kBoundary = size_t{1} << 30, kBytes = 4 << 20;
  const auto pinned = (*device)->Allocate(MemoryKind::kPinned, kBoundary + kBytes, "a test");
  REQUIRE(pinned.ok());
  const auto hbm = (*device)->Allocate(MemoryKind::kDevice, kBytes, "a test");
  REQUIRE(hbm.ok());
  uint8_t* const across = pinned->as<uint8_t>() + kBoundary - kBytes / 2;
  for (size_t i = 0; i < kBytes; ++i) across[i] = static_cast<uint8_t>(i * 37 >> 3);
  const std::vector<uint8_t> want(across, across + kBytes);
  const auto stream = (*device)->NewStream(Device::StreamKind::kCopy);
  const auto done = (*device)->NewEvent();
  const auto finish = [&] {
    stream->Record(*done);
    done->Wait();
    REQUIRE((*device)->Health().ok());
  };
  stream->Copy(hbm->data(), across, kBytes);
  finish();
  std::memset(across, 0, kBytes);
  stream->Copy(across, hbm->data(), kBytes);
  finish();
  CHECK(std::memcmp(across, want.data(), kBytes) == 0);
  // The same holds in a batch.
  stream->Fill(hbm->data(), 0, kBytes);
  std::vector<Stream::CopyOp> ops;
  constexpr size_t kPiece = kBytes / 5;  // the middle one crosses the GiB
  for (size_t i = 0; i < 5; ++i) {
    ops.push_back({hbm->as<uint8_t>() + i * kPiece, across + i * kPiece, kPiece});
  }
  stream->CopyBatch(ops.data(), ops.size());
  finish();
  std::memset(across, 0, kBytes);
  stream->Copy(across, hbm->data(), 5 * kPiece);
  finish();
  CHECK(std::memcmp(across, want.data(), 5 * kPiece) == 0);
}

// This comes last: an illegal address is the end of every device of the process.
TEST_CASE("a kernel that fails is the device's failure, and no wait hangs", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  const auto done = (*device)->NewEvent();
  kernels::SiluMulParams nowhere{};
  nowhere.gate_up = reinterpret_cast<const float*>(uintptr_t{1} << 46);
  nowhere.out = reinterpret_cast<void*>((uintptr_t{1} << 46) + (1 << 20));
  nowhere.rows = 4;
  nowhere.dim = 256;
  nowhere.out_type = DType::kBFloat16;
  (*device)->kernels().SiluMul(*stream, nowhere);
  stream->Record(*done);
  done->Wait();
  const absl::Status health = (*device)->Health();
  INFO(health);
  CHECK(absl::IsInternal(health));
  CHECK(ReasonOf(health) == "GPU_FAILED");
}

}  // namespace
}  // namespace sluice
