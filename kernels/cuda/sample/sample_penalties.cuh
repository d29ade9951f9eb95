// The changes that a row's settings make to its logits, in float32 as on the CPU paths.
#pragma once

#include <cstdint>

#include "kernels/cuda/sample/sample_select.cuh"

namespace sluice::kernels::cuda {

__device__ __forceinline__ bool HasPenalties(const SamplingSlot& s) {
  return s.repetition_penalty != 1 || s.frequency_penalty != 0 || s.presence_penalty != 0;
}

// Applies repetition, frequency and presence penalties by counting the history in the bins. It
// takes a part of the slice at a time, and reads the history once for each. It leaves the bins
// zero.
__device__ __forceinline__ void ApplyPenalties(const SamplingSlot& s, const int32_t* history,
                                               int length, const Slice& slice,
                                               SelectMemory& memory) {
  constexpr uint32_t kInPrompt = 0x80000000u;  // the other bits count output tokens
  constexpr int kPart = 2 * kBins;
  constexpr int kAhead = 8;  // loads in flight
  uint32_t* counts = &memory.bins[0].x;
  for (int begin = 0; begin < slice.count; begin += kPart) {
    const int size = min(kPart, slice.count - begin);
    for (int first = threadIdx.x; first < length; first += kAhead * kSampleThreads) {
      int32_t token[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = first + j * kSampleThreads;
        token[j] = i < length ? history[i] : -1;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t at = static_cast<uint32_t>(token[j] - (slice.begin + begin));
        if (at >= static_cast<uint32_t>(size)) continue;
        if (first + j * kSampleThreads < s.prompt_length) {
          atomicOr(counts + at, kInPrompt);
        } else {
          atomicAdd(counts + at, 1u);
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kSampleThreads) {
      const uint32_t seen = counts[i];
      if (seen == 0) continue;
      counts[i] = 0;
      const uint32_t outputs = seen & ~kInPrompt;
      float l = slice.logits[begin + i];
      l = l > 0 ? l / s.repetition_penalty : l * s.repetition_penalty;
      if (outputs > 0) {
        l -= s.frequency_penalty * static_cast<float>(outputs) + s.presence_penalty;
      }
      slice.logits[begin + i] = l;
    }
    __syncthreads();
  }
}

// Applies logit_bias, then the stop ids, to the tokens in this slice. If a biased id occurs
// again, its first entry adds all of its biases, in order.
__device__ __forceinline__ void ApplyBiasAndStops(const SampleParams& p, const SamplingSlot& s,
                                                  int64_t slot, bool stops, const Slice& slice) {
  const int32_t* ids = p.bias_ids + slot * kMaxLogitBias;
  const float* values = p.bias_values + slot * kMaxLogitBias;
  for (int i = threadIdx.x; i < s.bias_count; i += kSampleThreads) {
    const int id = ids[i];
    const int at = id - slice.begin;
    if (at < 0 || at >= slice.count) continue;
    bool is_first = true;
#pragma unroll 8
    for (int j = 0; j < i; ++j) is_first = is_first && ids[j] != id;
    if (!is_first) continue;
    float l = slice.logits[at] + values[i];
#pragma unroll 8
    for (int j = i + 1; j < s.bias_count; ++j) {
      if (ids[j] == id) l += values[j];
    }
    slice.logits[at] = l;
  }
  __syncthreads();
  for (int i = threadIdx.x; stops && i < s.stop_count; i += kSampleThreads) {
    const int at = p.stop_ids[slot * kMaxStopIds + i] - slice.begin;
    if (at >= 0 && at < slice.count) slice.logits[at] = -INFINITY;
  }
  __syncthreads();
}

}  // namespace sluice::kernels::cuda
