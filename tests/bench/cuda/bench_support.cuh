// Support for benchmarks of products: memory, random contents, and the speed at which this GPU
// reads. Every error ends the program.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tests/bench/cuda/stream_timing.h"

namespace sluice::bench {

// Device memory whose bytes are all ones at first: NaN as float32 and as bf16.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    Check(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc");
    Check(cudaMemset(data_, 0xFF, size * sizeof(T)), "cudaMemset");
  }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
  }
  ~DeviceArray() { cudaFree(data_); }
  T* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  size_t size_;
};

__device__ __forceinline__ uint32_t HashOf(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull;
  i = (i ^ (i >> 30)) * 0xBF58476D1CE4E5B9ull;
  return static_cast<uint32_t>(i >> 32);
}

// Fills with bf16 uniform in [-scale, scale).
__global__ void FillBf16(uint16_t* out, size_t size, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    const float v = (static_cast<float>(HashOf(seed + i)) * 0x1p-31f - 1.0f) * scale;
    out[i] = static_cast<uint16_t>(__float_as_uint(v) >> 16);
  }
}

inline DeviceArray<uint16_t> RandomBf16(size_t size, uint64_t seed, float scale) {
  DeviceArray<uint16_t> array(size);
  FillBf16<<<1024, 256>>>(array.data(), size, seed << 40, scale);
  Check(cudaGetLastError(), "FillBf16");
  return array;
}

// Reads everything once, 16 bytes a thread, four reads in flight.
__global__ void __launch_bounds__(512) ReadAll(const uint4* data, size_t count, uint32_t* never) {
  uint32_t seen = 0;
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 v[4];
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(data + i + j * step);
    for (int j = 0; j < 4; ++j) seen |= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) seen |= data[i].x;
  if (seen == 0x12345678) *never = seen;
}

// Returns the GB/s at which a plain kernel reads `bytes` at a time, one launch after the other,
// over all of `data`.
inline double ReadCeiling(const void* data, size_t total_bytes, size_t bytes) {
  static const DeviceArray<uint32_t> never(1);
  const size_t launches = total_bytes / bytes;
  const Timing t = TimeGraph([&](cudaStream_t stream) {
    for (size_t i = 0; i < launches; ++i) {
      ReadAll<<<132 * 4, 512, 0, stream>>>(
          reinterpret_cast<const uint4*>(static_cast<const char*>(data) + i * bytes), bytes / 16,
          never.data());
    }
  });
  return static_cast<double>(launches * bytes) / t.median_us * 1e-3;
}

}  // namespace sluice::bench
