// Timing of CUDA kernels: graphs of launches over rotating buffers, and the rate at which a plain
// kernel reads, which is the ceiling of every operator that must read as many bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/bench/cuda/stream_timing.h"

namespace sluice::bench {

template <typename T>
T* DeviceArray(int64_t size) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(size, 1)) * sizeof(T)),
        "cudaMalloc");
  return static_cast<T*>(data);
}

template <typename T>
T* DeviceCopy(const std::vector<T>& from) {
  T* to = DeviceArray<T>(static_cast<int64_t>(from.size()));
  Check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return to;
}

// Returns the time of one launch: `launch(i, stream)` for i in [0, launches), timed together by
// TimeGraph.
template <typename Launch>
Timing Time(int launches, int samples, Launch launch) {
  const Timing all = TimeGraph(
      [&](cudaStream_t stream) {
        for (int i = 0; i < launches; ++i) launch(i, stream);
      },
      samples);
  return {all.median_us / launches, all.least_us / launches, all.most_us / launches};
}

template <int unroll>
__global__ void ReadKernel(const uint4* data, int64_t count, uint32_t* sink) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  uint32_t sum = 0;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (unroll - 1) * step < count; i += unroll * step) {
    uint4 v[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) v[u] = __ldcs(data + i + u * step);
#pragma unroll
    for (int u = 0; u < unroll; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < count; i += step) sum ^= __ldcs(data + i).x;
  if (sum == 0x9E3779B9u) *sink = sum;
}

// Returns the GB/s of a plain kernel that reads `bytes` at a time, front to back, from places in
// `data` that rotate through `data_bytes`. It is the best of a few grids.
inline double ReadRate(const void* data, int64_t data_bytes, int64_t bytes) {
  int processors = 0;
  Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "device");
  static uint32_t* const sink = DeviceArray<uint32_t>(1);
  const int64_t places = std::max<int64_t>(1, std::min<int64_t>(32, data_bytes / bytes));
  const int launches = static_cast<int>(std::clamp<int64_t>((int64_t{2} << 30) / bytes, 2, 32));
  double best = 0;
  for (const int blocks_per_sm : {2, 4, 8}) {
    const Timing t = Time(launches, 5, [&](int i, cudaStream_t stream) {
      const char* at = static_cast<const char*>(data) + i % places * (bytes / 256 * 256);
      ReadKernel<8><<<processors * blocks_per_sm, 256, 0, stream>>>(
          reinterpret_cast<const uint4*>(at), bytes / 16, sink);
    });
    best = std::max(best, static_cast<double>(bytes) / t.median_us / 1e3);
  }
  return best;
}

}  // namespace sluice::bench
