// Decode attention. It reads every K and V byte of the rows' contexts once, 4 * head_dim bytes
// per (token, KV head). For rows that several blocks share, it also writes and reads about 1 % of
// that in partial results. Floor: those bytes over the GPU's read rate.
//
// Measured on an H100, 32/8 heads of 128, blocks of 32 tokens scattered over 34 GiB, both
// kernels, as the share of the rate at which a plain kernel reads the same number of bytes
// (tests/bench/cuda): 75-87 % at 32 MB (1 x 8K: 17.6 us, 8 x 1K: 15.2 us), 92 % at 256 MB (64 x
// 1K: 95.3 us), 94-99 % from 1 GiB on (64 x 8K: 728 us). The share is least where a few long rows
// are cut among all SMs: 81 % for 1 x 128K (213 us), 85 % for one row of 128K among 63 of 1K (305
// us).
#include <algorithm>
#include <limits>

#include "kernels/cuda/attention/attention_combine.cuh"
#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tensor_map.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kBlocksPerSm = 1;
// A block may have so much besides MakePlan's memory, whose alignment takes 1 KiB.
constexpr size_t kSharedBytes = 226 << 10;

template <typename Out>
__device__ void ZeroPaddedRows(const AttentionParams& p) {
  const int width = p.heads * p.cache.head_dim;
  for (int r = static_cast<int>(blockIdx.x); r < p.rows; r += static_cast<int>(gridDim.x)) {
    if (p.slots[r] >= 0) continue;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kDecodeThreads) {
      StoreAs(static_cast<Out*>(p.out) + int64_t{r} * width + i, 0.0f);
    }
    if (p.lse == nullptr) continue;
    for (int h = static_cast<int>(threadIdx.x); h < p.heads; h += kDecodeThreads) {
      p.lse[int64_t{r} * p.heads + h] = NegativeInfinity();
    }
  }
}

template <int dim>
__device__ void StoreEntry(const PartialState<dim>& state, int elements, float* o, float* m,
                           float* l) {
#pragma unroll
  for (int i = 0; i < PartialState<dim>::kElements; ++i) {
    const int index = state.Index(i);
    if (index >= elements) break;
    o[index] = state.o[i];
    if (index % dim != 0) continue;
    m[index / dim] = state.softmax[i].m;
    l[index / dim] = state.softmax[i].l;
  }
}

// Adds the warps' sums of a split, of `heads` heads of a tile, in the order of the warps.
template <int dim, int tiles>
__device__ PartialState<dim> AddWarps(DecodeShared<dim, tiles>& shared, int tile, int heads) {
  const auto softmax = [&](int warp, int head) {
    return shared.states[warp][tile * kTileHeads + head];
  };
  const float* const sums = shared.Sums(tile);
  PartialState<dim> split;
  split.Clear();
#pragma unroll
  for (int i = 0; i < PartialState<dim>::kElements; ++i) {
    const int index = Anew<DecodeShared<dim, tiles>::kKept>(split.Index(i));
    const int head = index / dim;
    if (head >= heads) break;
    const int column = DecodeShared<dim>::Column(head, index % dim);
    float m = softmax(0, head).m;
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) m = fmaxf(m, softmax(w, head).m);
    const float base = FiniteBase(m);  // a bundle's shorter rows may have no token of the split
    float l = 0, o = 0;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float weight = Exp2(softmax(w, head).m - base);
      l = fmaf(softmax(w, head).l, weight, l);
      o = fmaf(sums[(w * heads + head) * dim + column], weight, o);
    }
    split.softmax[i] = {m, l};
    split.o[i] = o;
  }
  return split;
}

// Returns where the states of groups and rows are.
template <typename Shared, typename InRegisters>
__device__ __forceinline__ auto& StatesOf(Shared& shared, InRegisters& in_registers) {
  if constexpr (Shared::kKept) {
    return shared.kept().states;
  } else {
    return in_registers;
  }
}

// Returns the heads of a tile among the `heads` of a bundle and a KV head; a later tile than the
// first may have none.
__device__ int HeadsOfTile(int heads, int tile) {
  const int first = tile * kTileHeads;
  return tile == 0 ? min(heads, kTileHeads) : max(min(heads - first, kTileHeads), 0);
}

// Without `bundles`, shape.bundle_rows is 1.
template <int dim, int tiles, bool bundles>
__global__ void __launch_bounds__(kDecodeThreads, kBlocksPerSm)
    DecodeKernel(const __grid_constant__ AttentionParams p,
                 const __grid_constant__ CUtensorMap cache, DecodeShape shape) {
  using Shared = DecodeShared<dim, tiles>;
  using Queries = std::conditional_t<Shared::kKept, QueriesInShared<dim, tiles>,
                                     QueriesInRegisters<dim, tiles>>;
  constexpr bool kScarce = Shared::kKept || bundles;  // registers are
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int group = p.heads / p.cache.kv_heads;
  const int entry_heads = bundles ? group * shape.bundle_rows : group;

  LetNextKernelStart();
  if (threadIdx.x == 0) PrefetchMap(&cache);
  if (lane < Shared::kStages) InitBarrier(SharedAddress(&shared.landed[warp][lane]), 1);
  PublishBarriers();
  // Slots, positions and block tables are copied to the device before a step's kernels.
  MakePlan(p, shape, shared.plan);
  const WorkRange range(shared.plan, p, shape, blocks);
  const int begin = range.Begin(block), end = range.Begin(block + 1);
  SliceCursor ahead, at;
  ahead.Start(p, range, begin, end);
  at = ahead;
  FindPage(p, shape, ahead, warp);

  const uint32_t ring = SharedAddress(shared.ring[warp]);
  const uint32_t landed = SharedAddress(shared.landed[warp]);
  int copy_stage = 0, stage = 0;
  uint32_t phases = 0;  // parity of the barriers, one bit per stage
  const auto copy_next = [&] {
    if (ahead.left > 0) {
      const int token = ahead.Token(warp);
      if (lane == 0 && token <= ahead.position) {
        CopySlice<dim>(cache, p.cache, shape, ahead, token,
                       ring + static_cast<uint32_t>(copy_stage * 2 * Shared::kHalfSlice),
                       landed + static_cast<uint32_t>(copy_stage * 8));
      }
      if (++ahead.slice == kWarpSlices) {
        ahead.slice = 0;
        ahead.NextSplit(p, range);
      }
      FindPage(p, shape, ahead, warp);
    }
    copy_stage = copy_stage + 1 == Shared::kStages ? 0 : copy_stage + 1;
  };
  // The kernels before this one write the newest tokens of a sequence, at most as many as a block
  // holds (kMaxNewTokens). Tokens a block or more before a row's position are unchanged, so
  // reading them need not wait.
  bool waited = false;
  for (int i = 0; i < Shared::kStages; ++i) {
    if (!waited && ahead.left > 0 &&
        ahead.Token(warp) + kSliceTokens + p.cache.block_tokens > ahead.position + 1) {
      WaitForPriorKernels();
      waited = true;
    }
    copy_next();
  }
  if (!waited) WaitForPriorKernels();

  WarpAttention<dim, tiles, bundles, Queries> attention;
  if constexpr (Shared::kKept) attention.queries.operands = shared.kept().queries;
  std::conditional_t<Shared::kKept, int, KeptStates<dim, tiles>> in_registers;
  auto& states = StatesOf(shared, in_registers);
  for (int unit = begin; unit < end; ++unit) {
    if (unit == begin || at.split == 0) {
      const float* q = p.q + at.row * p.q_stride + int64_t{at.head} * group * dim;
      attention.LoadQuery(q, p.q_stride, at.rows, group, p.scale * kLog2E, lane);
      states.Clear();
      if constexpr (Shared::kKept) __syncthreads();  // the queries are there
    }
    attention.Clear();
    for (at.slice = 0; at.slice < kWarpSlices; ++at.slice) {
      const int token = at.Token(warp);
      if (token <= at.position) {
        const int valid = at.position + 1 - token;
        const uint32_t offset = static_cast<uint32_t>(stage * 2 * Shared::kHalfSlice);
        WaitBarrier(landed + static_cast<uint32_t>(stage * 8), phases >> stage & 1);
        phases ^= 1u << stage;
        if (valid < kSliceTokens) {
          ClearValues<dim>(shared.ring[warp] + offset, valid, Anew<kScarce>(lane));
        }
        attention.AddSlice(ring + offset, valid, lane);
      }
      __syncwarp();
      copy_next();
      stage = stage + 1 == Shared::kStages ? 0 : stage + 1;
    }

    // The split's result is folded into the group's, or stored in `partial`.
    const int head_unit = range.FirstUnit(at.row) + at.head * at.splits;
    const Fragment fragment = {max(begin - head_unit, 0), min(end - head_unit, at.splits),
                               at.splits};
    const int number = at.split / kGroupSplits;
    const bool in_group = fragment.HasGroup(number);
    const bool group_ends =
        in_group && (at.split + 1 == at.splits || (at.split + 1) % kGroupSplits == 0);
    float* const entry =
        p.partial + (int64_t{2 * block + (begin < head_unit ? 1 : 0)} * shape.fragment_entries +
                     (in_group ? number : fragment.SplitEntry(at.split))) *
                        EntryFloats(entry_heads, dim);
    const int in_unit = bundles ? at.rows * group : group;
    __syncthreads();  // the last reader of `sums` is done
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int heads = HeadsOfTile(in_unit, tile);
      attention.HandOver(tile, shared.Sums(tile) + warp * heads * dim,
                         shared.states[warp] + tile * kTileHeads, heads, Anew<kScarce>(lane));
    }
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile * kTileHeads;
      const int heads = HeadsOfTile(in_unit, tile), elements = heads * dim;
      PartialState<dim> result = AddWarps<dim, tiles>(shared, tile, heads);
      if (in_group) {
        states.group[tile].Add(result, elements);
        if (!group_ends) continue;
        result = states.group[tile].Get();
        states.group[tile].Clear();
      }
      if (!fragment.HasAll()) {
        StoreEntry(result, elements, entry + first * dim, entry + entry_heads * dim + first,
                   entry + entry_heads * (dim + 1) + first);
        continue;
      }
      states.row[tile].Add(result, elements);
      if (at.split + 1 < at.splits) continue;
      result = states.row[tile].Get();
#pragma unroll
      for (int i = 0; i < PartialState<dim>::kElements; ++i) {
        const int index = result.Index(i);
        if (index >= elements) break;
        WriteResult(p, at.row, at.head, first + index / dim, index % dim, result.softmax[i],
                    result.o[i]);
      }
    }
    at.NextSplit(p, range);
  }
  p.out_type == DType::kFloat32 ? ZeroPaddedRows<float>(p) : ZeroPaddedRows<__nv_bfloat16>(p);
}

// Returns the blocks for the current device's SM count; 0 if there is no device.
int DecodeBlocks() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 0;
  }
  return kBlocksPerSm * processors;
}

// Returns the most rows of a bundle: as many as two tiles of heads take.
int32_t BundleRows(int32_t group, int32_t sequence_rows) {
  return std::max(std::min(2 * kTileHeads / group, sequence_rows), 1);
}

template <int dim, int tiles, bool bundles = false>
cudaError_t Launch(const AttentionParams& p, cudaStream_t stream) {
  const int group = p.heads / p.cache.kv_heads, blocks = DecodeBlocks();
  const int bundle_rows = BundleRows(group, p.sequence_rows), entry_heads = group * bundle_rows;
  using Shared = DecodeShared<dim, tiles>;
  static_assert(Shared::Bytes(Shared::kHeads) <= kSharedBytes);
  const size_t shared = Shared::Bytes(entry_heads);
  cudaError_t error = cudaFuncSetAttribute(DecodeKernel<dim, tiles, bundles>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(Shared::Bytes(Shared::kHeads)));
  if (error != cudaSuccess) return error;
  // Both kernels ask for the same split of an SM's memory: changing it between kernels drains the
  // SM.
  error = cudaFuncSetAttribute(CombineKernel<dim, tiles>,
                               cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const int64_t floats = p.partial_rows * p.heads * (dim + 1);
  const int64_t entries = floats / (int64_t{2} * blocks * EntryFloats(entry_heads, dim));
  CUtensorMap cache;
  const int32_t rows = std::numeric_limits<int32_t>::max();  // as far as the block tables reach
  error = MakeTileMap(p.cache.base, rows, dim, kSliceTokens, &cache);
  if (error != cudaSuccess) return error;
  AttentionParams some = p;
  const DecodeShape shape = {
      static_cast<int32_t>(std::min<int64_t>(entries, 1 << 20)),
      static_cast<uint32_t>(((int64_t{1} << 32) + p.cache.block_tokens - 1) / p.cache.block_tokens),
      static_cast<int32_t>(p.cache.page_bytes / (2 * dim)), bundle_rows};
  for (int32_t r = 0; r < p.rows; r += kPlanRows) {
    some.q = p.q + r * p.q_stride;
    some.slots = p.slots + r;
    some.positions = p.positions + r;
    some.out = static_cast<char*>(p.out) + int64_t{r} * p.heads * dim * SizeOf(p.out_type);
    some.lse = p.lse == nullptr ? nullptr : p.lse + int64_t{r} * p.heads;
    some.rows = std::min(p.rows - r, kPlanRows);
    cudaError_t launched = LaunchKernel(DecodeKernel<dim, tiles, bundles>, dim3(blocks),
                                        dim3(kDecodeThreads), shared, stream, some, cache, shape);
    if (launched == cudaSuccess && shape.fragment_entries > 0) {
      launched = LaunchKernel(CombineKernel<dim, tiles>, dim3(blocks),
                              dim3(32 * kCombineWarps<tiles>), 0, stream, some, shape);
    }
    if (launched != cudaSuccess) return launched;
  }
  return cudaSuccess;
}

// Takes the kernel of one tile if it is enough for a bundle's heads.
template <int dim>
cudaError_t LaunchOfDim(const AttentionParams& p, cudaStream_t stream) {
  const int32_t group = p.heads / p.cache.kv_heads, rows = BundleRows(group, p.sequence_rows);
  const bool two_tiles = rows * group > kTileHeads;
  if (rows > 1) {
    return two_tiles ? Launch<dim, 2, true>(p, stream) : Launch<dim, 1, true>(p, stream);
  }
  return two_tiles ? Launch<dim, 2>(p, stream) : Launch<dim, 1>(p, stream);
}

}  // namespace

int64_t AttentionScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t kv_heads,
                              int32_t head_dim, int32_t max_context, int32_t sequence_rows) {
  if (max_decode_rows <= 0 || kv_heads <= 0) return 0;
  if (!HasFastShape(heads / kv_heads, head_dim)) return 0;
  const int64_t splits = (int64_t{max_context} + kSplitTokens - 1) / kSplitTokens;
  const int64_t entries = 2 * DecodeBlocks() * FragmentEntries(splits);
  const int32_t group = heads / kv_heads, entry_heads = group * BundleRows(group, sequence_rows);
  const int64_t bytes = entries * EntryFloats(entry_heads, head_dim) * int64_t{sizeof(float)};
  // The result covers whole rows of AttentionParams::partial.
  const int64_t row = int64_t{heads} * (head_dim + 1) * int64_t{sizeof(float)};
  return (bytes + row - 1) / row * row;
}

cudaError_t LaunchDecodeAttention(const AttentionParams& p, cudaStream_t stream) {
  return p.cache.head_dim == 128 ? LaunchOfDim<128>(p, stream) : LaunchOfDim<64>(p, stream);
}

}  // namespace sluice::kernels::cuda
