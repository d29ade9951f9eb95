#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/common/launch.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

using cuda::CopyPiece;

struct DeviceFree {
  void operator()(unsigned char* data) const { cudaFree(data); }
};
using DeviceBytes = std::unique_ptr<unsigned char, DeviceFree>;

DeviceBytes NewDeviceBytes(int64_t bytes) {
  void* data = nullptr;
  REQUIRE(cudaMalloc(&data, static_cast<size_t>(bytes)) == cudaSuccess);
  REQUIRE(cudaMemset(data, 0xFF, static_cast<size_t>(bytes)) == cudaSuccess);
  return DeviceBytes(static_cast<unsigned char*>(data));
}

// Offsets of a piece on both sides.
struct Place {
  int64_t target, source, bytes;
};

// Returns pieces of 0 to 100,000 bytes, most of them short, at any alignment, that do not
// overlap.
std::vector<Place> RandomPlaces(int64_t count, Random& random, int64_t* end) {
  std::vector<Place> places;
  int64_t target = 0, source = 0;
  for (int64_t i = 0; i < count; ++i) {
    target += static_cast<int64_t>(random() % 40);
    source += static_cast<int64_t>(random() % 40);
    if (random() % 2 == 0) source += (target - source) & 15;  // equally aligned
    const uint64_t limits[] = {1, 20, 300, 5000, 100001};
    const int64_t bytes = static_cast<int64_t>(random() % limits[random() % std::size(limits)]);
    places.push_back({target, source, bytes});
    target += bytes;
    source += bytes;
  }
  *end = std::max(target, source);
  return places;
}

void Copy(const std::vector<Place>& places, unsigned char* target, const unsigned char* source,
          int max_blocks) {
  Guarded<CopyPiece> pieces(static_cast<int64_t>(places.size()));
  for (size_t i = 0; i < places.size(); ++i) {
    pieces[static_cast<int64_t>(i)] = {target + places[i].target, source + places[i].source,
                                       static_cast<size_t>(places[i].bytes)};
  }
  REQUIRE(cuda::LaunchCopyBatch(pieces.data(), pieces.size(), max_blocks, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE("a batch of copies moves every byte of its pieces and no other", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  for (const int64_t count : {0, 1, 3, 511, 513, 1500}) {
    for (const int max_blocks : {0, 1, 5}) {
      INFO(count << " pieces, at most " << max_blocks << " blocks");
      int64_t bytes = 0;
      const std::vector<Place> places = RandomPlaces(count, random, &bytes);
      Guarded<unsigned char> source(bytes + 1), target(bytes + 1), want(bytes + 1);
      for (int64_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(random());
      for (const Place& p : places) {
        std::copy_n(source.data() + p.source, p.bytes, want.data() + p.target);
      }
      // The pieces go to the target's offsets in HBM, and from there to pinned memory.
      const DeviceBytes hbm = NewDeviceBytes(bytes + 1);
      Copy(places, hbm.get(), source.data(), max_blocks);
      std::vector<Place> out = places;
      for (Place& p : out) p.source = p.target;
      Copy(out, target.data(), hbm.get(), max_blocks);
      CHECK(target.Damage() == "");
      CHECK(std::equal(want.span().begin(), want.span().end(), target.span().begin()));
    }
  }
}

TEST_CASE("a batch of copies of a wrong shape is refused", "[kernels][cuda]") {
  CHECK(cuda::LaunchCopyBatch(nullptr, -1, 0, nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::LaunchCopyBatch(nullptr, 1, -1, nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::LaunchCopyBatch(nullptr, 0, 0, nullptr) == cudaSuccess);
}

}  // namespace
}  // namespace sluice::kernels
