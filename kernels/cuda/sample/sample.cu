// Logits to tokens. A cluster of eight blocks holds one row's logits in its shared memory, so
// that they are read from HBM once, however many passes the row's settings ask for. Rows differ
// in their settings, which only the device knows.
//
// Every sum is of integers and every choice is by logit, then by id: the result is a function of
// the row alone. Changed logits are computed in float32 as the CPU paths do, weights from
// float64.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/sample/sample_draw.cuh"
#include "kernels/cuda/sample/sample_list.cuh"
#include "kernels/cuda/sample/sample_penalties.cuh"
#include "kernels/cuda/sample/sample_select.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kMaxSlice = (kMaxSharedBytes - static_cast<int>(sizeof(SampleMemory))) / 16 * 4;
static_assert(kMaxSlice * kClusterBlocks >= kMaxVocabulary, "a row fits its cluster");

// The best token of a row, with its logit. It is usable if there is one and no logit is NaN or
// +inf.
struct Best {
  float logit;
  int32_t id;
  bool usable;
};

// The best of the tokens that a thread has seen, in order of id.
class BestSoFar {
 public:
  __device__ void See(float l, int id) {
    bad_ = bad_ || !(l < INFINITY);
    if (l > logit_) {
      logit_ = l;
      id_ = id;
    }
  }
  __device__ Best Agree(Cluster& cluster) const {
    const uint64_t mine = uint64_t{KeyOf(logit_)} << 32 | ~static_cast<uint32_t>(id_);
    const uint64_t best = cluster.Max(bad_ ? ~uint64_t{0} : mine);
    const float logit = FloatOf(static_cast<uint32_t>(best >> 32));
    return {logit, static_cast<int32_t>(~static_cast<uint32_t>(best)),
            best != ~uint64_t{0} && logit > -INFINITY};
  }
  __device__ float logit() const { return logit_; }

 private:
  float logit_ = -INFINITY;
  int32_t id_ = 0;
  bool bad_ = false;
};

// Reads the block's part of a row into shared memory.
__device__ BestSoFar Load(const float* row, const Slice& slice, bool aligned) {
  BestSoFar best;
  constexpr int kStep = 4 * kSampleThreads;
  constexpr int kAhead = 5;  // loads in flight: a slice of 151,936 logits takes ten a thread
  for (int first = 4 * threadIdx.x; first < slice.count; first += kAhead * kStep) {
    float4 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kStep;
      if (aligned) {
        if (i < slice.count) v[j] = __ldcs(reinterpret_cast<const float4*>(row + slice.begin + i));
      } else {
        const auto at = [&](int k) {
          return i + k < slice.count ? row[slice.begin + i + k] : -INFINITY;
        };
        v[j] = {at(0), at(1), at(2), at(3)};
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kStep;
      if (i >= slice.count) break;
      *reinterpret_cast<float4*>(slice.logits + i) = v[j];
      best.See(v[j].x, slice.begin + i);
      best.See(v[j].y, slice.begin + i + 1);
      best.See(v[j].z, slice.begin + i + 2);
      best.See(v[j].w, slice.begin + i + 3);
    }
  }
  return best;
}

// Puts the `wanted` best of the raw logits into block 0's alternatives.
__device__ void FindAlternatives(Cluster& cluster, SampleMemory& memory, const Slice& slice,
                                 int wanted, float largest, float mine) {
  const auto keep = [&](const Candidate& candidate) {
    const int at = atomicAdd(cluster.At(&memory.alternatives, 0), 1);
    cluster.At(memory.alternative, 0)[at] = candidate;
  };
  const int count =
      GatherBest(cluster, memory.select, memory.own_candidates, slice, largest, mine, wanted);
  if (count >= 0) {
    if (cluster.rank() == 0 && static_cast<int>(threadIdx.x) < count) {
      const Candidate* list = ListOf(memory.select).all;
      const Candidate candidate = list[threadIdx.x];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += IsBetter(list[j], candidate) ? 1 : 0;
      if (rank < wanted) keep(candidate);
    }
    ClearList(cluster, memory.select, memory.own_candidates);
    return;
  }
  CutSearch<CountTokens> search(cluster, memory.select, slice, KeepAll(), CountTokens());
  while (!search.done()) {
    search.Narrow([&](uint64_t) { return static_cast<uint64_t>(wanted); });
  }
  const Cut cut = search.Finish();
  slice.ForEachFour([&](const float(&l)[4], int id) {
    for (int j = 0; j < 4; ++j) {
      if (id + j >= slice.begin + slice.count || !cut.Keeps(l[j], id + j)) continue;
      keep({l[j], id + j, 0});
    }
  });
  cluster.Sync();
}

// Block 0's last work for a row that asks for log-probabilities. lse is of the raw logits.
__device__ void ReportLogprobs(const SampleParams& p, const SampleMemory& memory, int64_t row,
                               int wanted, int token, double lse) {
  const int i = threadIdx.x;
  if (i == 0) {
    const double logit = p.logits[row * p.vocab + token];
    p.out_logprobs[row] = static_cast<float>(logit - lse);
  }
  if (i >= wanted) return;
  const int64_t out = row * kMaxTopLogprobs;
  if (i >= memory.alternatives) {
    p.out_top_ids[out + i] = -1;
    p.out_top_logprobs[out + i] = -INFINITY;
    return;
  }
  const Candidate mine = memory.alternative[i];
  int rank = 0;
  for (int j = 0; j < memory.alternatives; ++j) {
    rank += IsBetter(memory.alternative[j], mine) ? 1 : 0;
  }
  p.out_top_ids[out + rank] = mine.id;
  p.out_top_logprobs[out + rank] = static_cast<float>(static_cast<double>(mine.logit) - lse);
}

__device__ bool HasStops(const SamplingSlot& s, int outputs) {
  return outputs < s.min_tokens && s.stop_count > 0;
}

__device__ bool ChangesLogits(const SamplingSlot& s, int outputs) {
  return HasPenalties(s) || s.bias_count > 0 || HasStops(s, outputs);
}

__device__ bool WantsLogprobs(const SamplingSlot& s) {
  return s.logprobs != 0 || s.top_logprobs > 0;
}

// The work that a greedy row without further settings does not need. `best` is the best of the
// raw logits, and `mine` is this thread's best. It is a function apart from the kernel, whose
// registers would not suffice for both. Returns the token to block 0.
__device__ __noinline__ int Choose(const SampleParams& p, SampleMemory& memory, Cluster cluster,
                                   Slice slice, Best best, float mine) {
  const int64_t row = blockIdx.x / kClusterBlocks;
  const int64_t slot = p.slots[row];
  const int position = p.positions[row];
  const SamplingSlot& s = memory.slot;
  const int outputs = position + 1 - s.prompt_length;
  double lse = 0;
  if (WantsLogprobs(s)) {
    const double largest = best.logit;
    uint64_t sum = 0;
    slice.ForEachFour([&](const float(&l)[4], int) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += Weight(l[j], largest, kLog2E);
    });
    lse = largest + log(static_cast<double>(cluster.Sum(sum).total) / kWeightOfBest);
    const int wanted = min(s.top_logprobs, p.vocab);
    if (wanted > 0) FindAlternatives(cluster, memory, slice, wanted, best.logit, mine);
  }
  if (ChangesLogits(s, outputs)) {
    __syncthreads();
    if (HasPenalties(s)) {
      ApplyPenalties(s, p.tokens + slot * p.token_stride, position + 1, slice, memory.select);
    }
    ApplyBiasAndStops(p, s, slot, HasStops(s, outputs), slice);
    BestSoFar changed;
    slice.ForEachFour([&](const float(&l)[4], int id) {
#pragma unroll
      for (int j = 0; j < 4; ++j) changed.See(l[j], id + j);
    });
    best = changed.Agree(cluster);
    mine = changed.logit();
    if (!best.usable) return -1;
  }
  const int token = s.temperature == 0
                        ? best.id
                        : Draw(cluster, memory, slice, s, outputs, p.vocab, best.logit, mine);
  if (cluster.rank() == 0 && WantsLogprobs(s)) {
    ReportLogprobs(p, memory, row, s.top_logprobs, token, lse);
  }
  return token;
}

// The grid is (rows * kClusterBlocks), in clusters of kClusterBlocks with one row each. Dynamic
// shared memory: a SampleMemory and `slice_size` floats, where slice_size is a multiple of 4 and
// kClusterBlocks slices cover the vocabulary. The kernel reads 4 bytes per logit from HBM. Two
// blocks share an SM at 151,936.
//
// Measured at that vocabulary (H100, one after the other in a graph), 1 / 8 / 64 rows, whose
// bytes take 0.25 / 2 / 16 us at the speed of a large copy:
//   greedy                                               4.2 / 6.4 /  24 us
//   temperature                                           15 /  23 /  62
//   top_k 50, with top_p 0.95 or without                  18 /  21 /  66
//   top_p 0.95, few tokens in the nucleus                 24 /  32 /  88
//   top_p 0.95, tens of thousands in the nucleus          52 /  69 / 185
//   top_k, top_p, min_p, penalties of 8K, 5 alternatives  42 /  50 / 147
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kSampleThreads, 2)
    SampleKernel(const __grid_constant__ SampleParams p, int slice_size, bool aligned) {
  extern __shared__ __align__(16) unsigned char shared[];
  SampleMemory& memory = *reinterpret_cast<SampleMemory*>(shared);
  Cluster cluster(memory.exchange);
  LetNextKernelStart();
  for (int i = threadIdx.x; i < kBins; i += kSampleThreads) memory.select.bins[i] = {0, 0};
  if (threadIdx.x == 0) memory.alternatives = memory.own_candidates = 0;
  cluster.Arrive();
  WaitForPriorKernels();
  const int64_t row = blockIdx.x / kClusterBlocks;
  const int64_t slot = p.slots[row];
  if (slot < 0) {
    cluster.Wait();
    return;
  }
  // written for all warps once the blocks have agreed on the best
  const SamplingSlot& s = memory.slot;
  if (threadIdx.x == 0) memory.slot = p.sampling[slot];
  const int position = p.positions[row];
  const int begin = min(cluster.rank() * slice_size, p.vocab);
  const Slice slice = {reinterpret_cast<float*>(shared + sizeof(SampleMemory)), begin,
                       min(slice_size, p.vocab - begin)};
  const BestSoFar mine = Load(p.logits + row * p.vocab, slice, aligned);
  cluster.Wait();  // every block has started: now its memory may be written
  const Best best = mine.Agree(cluster);
  int token = best.usable ? best.id : -1;
  if (best.usable && (s.temperature != 0 || WantsLogprobs(s) ||
                      ChangesLogits(s, position + 1 - s.prompt_length))) {
    token = Choose(p, memory, cluster, slice, best, mine.logit());
  }
  if (cluster.rank() == 0 && threadIdx.x == 0) {
    p.out_tokens[row] = token;
    if (Stores(p, row)) p.tokens[slot * p.token_stride + position + 1] = token;
  }
}

}  // namespace

cudaError_t LaunchSample(const SampleParams& p, cudaStream_t stream) {
  const int slice_size = ((p.vocab + kClusterBlocks - 1) / kClusterBlocks + 3) / 4 * 4;
  if (p.rows < 0 || p.vocab < 1 || slice_size > kMaxSlice) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t allowed = cudaFuncSetAttribute(
      SampleKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const bool aligned = p.vocab % 4 == 0 && AreAligned(16, p.logits);
  const size_t shared = sizeof(SampleMemory) + sizeof(float) * static_cast<size_t>(slice_size);
  return LaunchKernel(SampleKernel, p.rows * kClusterBlocks, kSampleThreads, shared, stream, p,
                      slice_size, aligned);
}

}  // namespace sluice::kernels::cuda
