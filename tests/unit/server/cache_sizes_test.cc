#include "src/server/cache_sizes.h"

#include <catch2/catch.hpp>
#include <string>

#include "src/config/setting.h"

namespace sluice {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

MemoryFound OnCpu(int64_t total) {
  MemoryFound found;
  found.host.total_bytes = total;
  found.host.available_bytes = total;
  return found;
}

MemoryFound OnGpu(int64_t free, int64_t total, int64_t available) {
  MemoryFound found;
  found.gpu = true;
  found.gpu_free_bytes = free;
  found.host.total_bytes = total;
  found.host.available_bytes = available;
  return found;
}

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 3;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 256);
  return {30, {kind}};
}

TEST_CASE("a size that is given is kept") {
  for (const MemoryFound& found : {OnCpu(kGiB), OnGpu(kGiB, kGiB, kGiB)}) {
    for (const CacheSize& size :
         {DecodeHbmSize(12345, found, kGiB), DecodeDramSize(12345, found),
          PrefillHbmSize(12345, found, Layout(), 1000), HoldSize(12345, found)}) {
      CHECK(size.bytes == 12345);
      CHECK(size.why == "as configured");
    }
    CHECK(HoldSize(0, found).bytes == 0);
  }
}

TEST_CASE("on the CPU automatic sizes are small shares of the memory with a limit") {
  const MemoryFound small = OnCpu(4 * kGiB), large = OnCpu(512 * kGiB);
  CHECK(DecodeHbmSize(kAutoBytes, small, 0).bytes == 512 * kMiB);
  CHECK(DecodeDramSize(kAutoBytes, small).bytes == kGiB);
  CHECK(HoldSize(kAutoBytes, small).bytes == 512 * kMiB);
  CHECK(DecodeHbmSize(kAutoBytes, large, 0).bytes == kGiB);
  CHECK(DecodeDramSize(kAutoBytes, large).bytes == 4 * kGiB);
  CHECK(HoldSize(kAutoBytes, large).bytes == 2 * kGiB);
  CHECK(DecodeHbmSize(kAutoBytes, small, 0).why ==
        "auto: an eighth of the 4.00 GiB of memory that the machine has, 1GiB at most");
  MemoryFound limited = small;
  limited.host.limit_file = "/sys/fs/cgroup/memory.max";
  CHECK_THAT(DecodeDramSize(kAutoBytes, limited).why,
             Catch::Contains("4.00 GiB of memory that /sys/fs/cgroup/memory.max allows"));
}

TEST_CASE("on a GPU a decode node takes 90 % of the free HBM, less what it needs beside") {
  const MemoryFound found = OnGpu(60 * kGiB, 512 * kGiB, 500 * kGiB);
  CHECK(DecodeHbmSize(kAutoBytes, found, kGiB).bytes == 54 * kGiB);
  CHECK(DecodeHbmSize(kAutoBytes, found, kGiB).why ==
        "auto: 90 % of the 60.00 GiB of HBM that are free after the weights");
  // 60 GiB less 8 and the 512 MiB that CUDA takes.
  CHECK(DecodeHbmSize(kAutoBytes, found, 8 * kGiB).bytes == 51 * kGiB + 512 * kMiB);
  CHECK_THAT(DecodeHbmSize(kAutoBytes, found, 8 * kGiB).why,
             Catch::Contains("less 8.50 GiB for the batch, the policy and CUDA"));
  CHECK(DecodeHbmSize(kAutoBytes, found, 60 * kGiB).bytes == 0);
}

TEST_CASE("on a GPU node DRAM is shared out, and never more than is available") {
  const MemoryFound calm = OnGpu(60 * kGiB, 512 * kGiB, 500 * kGiB);
  CHECK(DecodeDramSize(kAutoBytes, calm).bytes == 128 * kGiB);
  CHECK(HoldSize(kAutoBytes, calm).bytes == 64 * kGiB);
  const MemoryFound small = OnGpu(60 * kGiB, 128 * kGiB, 120 * kGiB);
  CHECK(DecodeDramSize(kAutoBytes, small).bytes == 64 * kGiB);
  CHECK(HoldSize(kAutoBytes, small).bytes == 32 * kGiB);
  const MemoryFound busy = OnGpu(60 * kGiB, 512 * kGiB, 100 * kGiB);
  CHECK(DecodeDramSize(kAutoBytes, busy).bytes == 90 * kGiB);
  CHECK_THAT(DecodeDramSize(kAutoBytes, busy).why,
             Catch::Contains("90 % of the 100.00 GiB of memory that are available"));
}

TEST_CASE("the DRAM of ranks fits into /dev/shm") {
  MemoryFound found = OnGpu(60 * kGiB, 512 * kGiB, 500 * kGiB);
  found.shared_bytes = 200 * kGiB;
  CHECK(DecodeDramSize(kAutoBytes, found).bytes == 128 * kGiB);
  CHECK(CheckCacheSizes(found, kGiB, kGiB, 128 * kGiB).ok());
  found.shared_bytes = 100 * kGiB;
  CHECK(DecodeDramSize(kAutoBytes, found).bytes == 90 * kGiB);
  CHECK_THAT(DecodeDramSize(kAutoBytes, found).why, Catch::Contains("100.00 GiB of /dev/shm"));
  CHECK(DecodeDramSize(12345, found).bytes == 12345);
  const absl::Status refused = CheckCacheSizes(found, kGiB, kGiB, 128 * kGiB);
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(std::string(refused.message()),
             Catch::Contains("dram_bytes: ") && Catch::Contains("lower --dram-bytes to 90GiB"));
  found.gpu = false;
  found.gpu_free_bytes = 0;
  CHECK(absl::IsResourceExhausted(CheckCacheSizes(found, 0, kGiB, 128 * kGiB)));
}

TEST_CASE("a prefill node takes what one prompt of max_context needs") {
  const CacheLayout layout = Layout();
  const MemoryFound gpu = OnGpu(60 * kGiB, 512 * kGiB, 500 * kGiB);
  const uint64_t prompt = static_cast<uint64_t>(layout.BytesFor(8192 + 32)) + 4096;
  CHECK(PrefillHbmSize(kAutoBytes, gpu, layout, 8192).bytes == prompt);
  CHECK(PrefillHbmSize(kAutoBytes, gpu, layout, 8192).why ==
        "auto: one prompt of max_context, 8192 tokens");
  CHECK(PrefillHbmSize(kAutoBytes, gpu, layout, int64_t{1} << 40).bytes == 54 * kGiB);
  CHECK(PrefillHbmSize(kAutoBytes, OnCpu(512 * kGiB), layout, int64_t{1} << 40).bytes == kGiB);
}

TEST_CASE("sizes that do not fit are refused with the setting to lower and by how much") {
  const MemoryFound found = OnGpu(60 * kGiB, 512 * kGiB, 400 * kGiB);
  CHECK(CheckCacheSizes(found, kGiB, 58 * kGiB, 256 * kGiB).ok());
  // 512 MiB are set aside for CUDA, and what may just fit is tried.
  CHECK(CheckCacheSizes(found, kGiB, 59 * kGiB, 256 * kGiB).ok());
  const auto refusal = [&](const MemoryFound& of, int64_t beside, uint64_t hbm, uint64_t dram) {
    const absl::Status status = CheckCacheSizes(of, beside, hbm, dram);
    CHECK(absl::IsResourceExhausted(status));
    return std::string(status.message());
  };
  CHECK(refusal(found, kGiB, 70 * kGiB, 256 * kGiB) ==
        "hbm_bytes: 70.00 GiB do not fit: 60.00 GiB of HBM are free after the weights, and the "
        "batch and the policy take 1.00 GiB; lower --hbm-bytes by 11.50 GiB to 59904MiB, or leave "
        "it at auto");
  CHECK(refusal(found, kGiB, 50 * kGiB, 450 * kGiB) ==
        "dram_bytes: 450.00 GiB do not fit: of the 512.00 GiB of memory that the machine has "
        "400.00 GiB are available; lower --dram-bytes by 90.00 GiB to 360GiB, or leave it at auto");
  CHECK_THAT(refusal(OnGpu(2 * kGiB, 512 * kGiB, 400 * kGiB), 3 * kGiB, 0, kGiB),
             Catch::Contains("hbm_bytes: no HBM is left for KV caches: 2.00 GiB are free") &&
                 Catch::Contains("until they take 1.50 GiB less"));
  // The CPU device takes memory when it is first touched.
  CHECK(CheckCacheSizes(OnCpu(kGiB), 0, 512 * kGiB, 512 * kGiB).ok());
}

}  // namespace
}  // namespace sluice
