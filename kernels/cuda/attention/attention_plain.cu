// Attention for every shape of the contracts, dense, over lists and over parts that are pulled, in
// float32. A block computes one query head of a row at a time. It reads the cache once per query
// head, and serves only shapes that no large served model has.
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/attention/attention_plan.cuh"
#include "kernels/cuda/attention/pull_dialogue.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/pull_part.h"
#include "kernels/unit_list.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxHeadDim = 256;
constexpr int kLaneElements = kMaxHeadDim / 32;

__device__ float AsFloat(float v) { return v; }
__device__ float AsFloat(__nv_bfloat16 v) { return __bfloat162float(v); }

// Returns the start of the key of token `token` of the cache. Its value lies block_tokens *
// head_dim elements further.
template <typename T>
__device__ const T* KeyOf(const PagedCache& c, int slot, int head, int token) {
  const int block = token / c.block_tokens;
  return BlockKeys<T>(c, slot, block, head) + int64_t{token - block * c.block_tokens} * c.head_dim;
}

// The tokens [0, tokens) that a row attends to; At() says where they lie in the cache.
struct Context {
  int tokens;
  __device__ int At(int token) const { return token; }
};

struct Listed {
  UnitList list;
  int tokens;
  __device__ int At(int token) const { return static_cast<int>(PlaceOfToken(list, token)); }
};

__device__ Context TokensOf(const AttentionParams& p, int row, int) {
  return {p.slots[row] < 0 ? 0 : p.positions[row] + 1};
}

__device__ Listed TokensOf(const SparseAttentionParams& p, int row, int kv_head) {
  const UnitList list = UnitListOf(p, row, kv_head);
  return {list, static_cast<int>(list.tokens)};
}

struct Results {
  void* out;
  float* lse;
  DType type;
};

__device__ Results ResultsOf(const AttentionParams& p) { return {p.out, p.lse, p.out_type}; }
__device__ Results ResultsOf(const SparseAttentionParams& p) {
  return {p.o, p.lse, DType::kFloat32};
}

template <typename Out>
__device__ void WriteRow(const Results& results, int dim, int64_t item, const Softmax& total,
                         const float (&o)[kLaneElements], bool empty) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const int d = i * 32 + lane;
    if (d >= dim) break;
    StoreAs(static_cast<Out*>(results.out) + item * dim + d, empty ? 0.0f : o[i] / total.l);
  }
  if (lane == 0 && results.lse != nullptr) {
    results.lse[item] = empty ? NegativeInfinity() : NaturalLse(total);
  }
}

struct PlainShared {
  float query[kMaxHeadDim];
  float sums[kWarps][kMaxHeadDim];
  Softmax states[kWarps];
};

// Chunks of 32 tokens go to the warps in turn. A lane scores one token, then holds a part of o. All
// threads of the block call it, and may do so again with the same memory.
template <typename T, typename Params>
__device__ __forceinline__ void AttendHead(const Params& p, int row, int head,
                                           PlainShared& shared) {
  auto& [query, sums, states] = shared;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const PagedCache& c = p.cache;
  const int dim = c.head_dim, kv_head = head / (p.heads / c.kv_heads);
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += 32 * kWarps) {
    query[i] = p.q[row * p.q_stride + int64_t{head} * dim + i] * (p.scale * kLog2E);
  }
  __syncthreads();

  const int slot = p.slots[row];
  const auto context = TokensOf(p, row, kv_head);
  const int tokens = context.tokens;
  Softmax state = {NegativeInfinity(), 0.0f};
  float o[kLaneElements] = {};
  for (int first = warp * 32; first < tokens; first += 32 * kWarps) {
    const bool valid = first + lane < tokens;
    const T* key = KeyOf<T>(c, slot, kv_head, context.At(valid ? first + lane : first));
    float score = 0;
    for (int i = 0; i < dim; ++i) score = fmaf(query[i], AsFloat(key[i]), score);
    if (!valid) score = NegativeInfinity();
    float m = score;
    for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
    m = fmaxf(m, state.m);
    const float weight = Exp2(score - m);
    float sum = weight;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float keep = Exp2(state.m - m);
    state = {m, fmaf(state.l, keep, sum)};
    for (int i = 0; i < kLaneElements; ++i) o[i] *= keep;
    const T* value = key + int64_t{c.block_tokens} * dim;
    for (int t = 0; t < min(32, tokens - first); ++t) {
      const T* from = reinterpret_cast<const T*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(value), t));
      const float w = __shfl_sync(0xffffffffu, weight, t);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        if (i * 32 + lane < dim) o[i] = fmaf(w, AsFloat(from[i * 32 + lane]), o[i]);
      }
    }
  }
  if (lane == 0) states[warp] = state;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) sums[warp][i * 32 + lane] = o[i];
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    if (states[w].l == 0.0f) continue;  // this warp had no chunk
    const FoldWeights weights = Fold(state, states[w]);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) o[i] = Fold(weights, o[i], sums[w][i * 32 + lane]);
  }
  const int64_t item = int64_t{row} * p.heads + head;
  const Results results = ResultsOf(p);
  results.type == DType::kFloat32
      ? WriteRow<float>(results, dim, item, state, o, tokens == 0)
      : WriteRow<__nv_bfloat16>(results, dim, item, state, o, tokens == 0);
}

template <typename T, typename Params>
__global__ void __launch_bounds__(32 * kWarps)
    PlainKernel(const __grid_constant__ Params p, int first_head) {
  __shared__ PlainShared shared;
  const int row = static_cast<int>(blockIdx.x);
  const int head = first_head + static_cast<int>(blockIdx.y);
  WaitForPriorKernels();
  LetNextKernelStart();
  if constexpr (requires { p.wanted; }) {
    const int list = row * p.cache.kv_heads + head / (p.heads / p.cache.kv_heads);
    if (p.wanted != nullptr && p.wanted[list] == 0) return;
  }
  AttendHead<T>(p, row, head, shared);
}

// A block is a puller. The block's barriers in AttendHead() stand between the reads of `part` and
// its next value.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    PlainPullKernel(const __grid_constant__ PullAttentionParams p) {
  __shared__ PlainShared shared;
  __shared__ PulledPart part;
  WaitForPriorKernels();
  PullDialogue dialogue(p, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) dialogue.Begin();
  while (true) {
    if (threadIdx.x == 0) part = dialogue.Next();
    __syncthreads();
    const PulledPart now = part;
    if (now.list < 0) return;
    const PartUnits units = UnitsOfPart(p, now.list, now.part);
    const SparseAttentionParams attention = AttentionOfPart(p, now.list, now.part, units);
    for (int head = 0; head < attention.heads; ++head) {
      AttendHead<T>(attention, 0, head, shared);
    }
    if (threadIdx.x == 0) TakePart(p, now);
  }
}

template <typename Params>
cudaError_t Launch(const Params& p, int first_head, int heads, cudaStream_t stream) {
  const auto kernel = p.cache.type == DType::kFloat32 ? PlainKernel<float, Params>
                                                      : PlainKernel<__nv_bfloat16, Params>;
  return LaunchKernel(kernel, dim3(p.rows, heads), dim3(32 * kWarps), 0, stream, p, first_head);
}

}  // namespace

cudaError_t LaunchPlainAttention(const AttentionParams& p, cudaStream_t stream) {
  return Launch(p, 0, p.heads, stream);
}

cudaError_t LaunchPlainSparseAttention(const SparseAttentionParams& p, cudaStream_t stream) {
  const int group = p.heads / p.cache.kv_heads;
  return Launch(p, p.kv_head_begin * group, (p.kv_head_end - p.kv_head_begin) * group, stream);
}

cudaError_t LaunchPlainPullAttention(const PullAttentionParams& p, cudaStream_t stream) {
  const auto kernel = p.attention.cache.type == DType::kFloat32 ? PlainPullKernel<float>
                                                                : PlainPullKernel<__nv_bfloat16>;
  return LaunchKernel(kernel, dim3(static_cast<unsigned>(p.pullers)), dim3(32 * kWarps), 0, stream,
                      p);
}

}  // namespace sluice::kernels::cuda
