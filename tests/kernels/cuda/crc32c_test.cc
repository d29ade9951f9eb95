#include <cuda_runtime_api.h>

#include "kernels/cuda/common/crc32c.h"
#include "kernels/reference/crc32c.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

constexpr int64_t kSegment = 32 << 10;  // of crc32c.cu

// Memory that is pinned serves as HBM does, and can be read here.
uint32_t OnGpu(const uint8_t* data, int64_t bytes) {
  Guarded<uint32_t> crc(1);
  crc[0] = 0;
  REQUIRE(cuda::LaunchCrc32c(data, bytes, crc.data(), nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(crc.Damage() == "");
  return crc[0];
}

TEST_CASE("the GPU's checksum is the reference's for every size and alignment", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  Guarded<uint8_t> data(3 * kSegment + 64);
  for (int64_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(random());
  std::vector<int64_t> sizes = {0,
                                1,
                                2,
                                3,
                                4,
                                5,
                                63,
                                64,
                                1020,
                                1024,
                                kSegment - 1,
                                kSegment,
                                kSegment + 1,
                                kSegment + 4,
                                3 * kSegment};
  for (int i = 0; i < 8; ++i) sizes.push_back(static_cast<int64_t>(random() % (3 * kSegment)));
  for (const int64_t bytes : sizes) {
    for (int64_t from = 0; from < 5; ++from) {
      INFO(bytes << " bytes from " << from);
      CHECK(OnGpu(data.data() + from, bytes) == reference::Crc32c(data.data() + from, bytes));
    }
  }
}

TEST_CASE("one bit that is wrong anywhere changes the GPU's checksum", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  Guarded<uint8_t> data(2 * kSegment);
  for (int64_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(random());
  const uint32_t right = OnGpu(data.data(), data.size());
  for (int i = 0; i < 32; ++i) {
    const auto at = static_cast<int64_t>(random() % static_cast<uint64_t>(data.size()));
    const auto bit = static_cast<uint8_t>(1u << (random() % 8));
    data[at] ^= bit;
    CHECK(OnGpu(data.data(), data.size()) != right);
    data[at] ^= bit;
  }
}

TEST_CASE("a checksum of a wrong size is refused", "[kernels][cuda]") {
  CHECK(cuda::LaunchCrc32c(nullptr, -1, nullptr, nullptr) == cudaErrorInvalidValue);
}

}  // namespace
}  // namespace sluice::kernels
