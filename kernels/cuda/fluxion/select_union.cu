// SelectUnion: a cluster of thread blocks takes a list, and each of its blocks every so many-th
// query head of the group. A head's scores become integers of the same order, which stay in shared
// memory; histograms of their digits find its last block (select.cuh), and what it selects becomes
// bits. The first thread block of the cluster joins the bits of all and writes the units.
//
// The kernel moves 4 bytes a block and head: 256 KB of 8 lists of 2,048 blocks and 4 heads. Its
// time is latency: of loads, which depend on each other three deep, of 10 to 15 barriers of a
// thread block, and of two of the cluster. Measured on an H200 with 4 heads: 8 lists of 2,048
// blocks 7.1 us, of 8,192 blocks 12.7 us, of 65,536 blocks 87 us; 64 lists of 2,048 blocks 12.4 us.
#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/fluxion/union_words.cuh"
#include "kernels/fluxion_segments.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kMostBlocks = 8;       // thread blocks of a cluster, on any device
constexpr int kKeptScores = 20480;   // scores for which a thread block has room
constexpr int kAtOnce = 8;           // loads of a thread under way
constexpr int kWords = kSelectBins;  // words of a list
constexpr int kThreadWords = 4;      // words that a thread joins
constexpr int kShortStride = 16384;  // scores, up to which a thread block has fewer threads
constexpr int kShortThreads = 512, kLongThreads = 1024;

struct Shared {
  // A thread block alone uses the first bins only. The others hold words of bits, and how many
  // bits are set in the words before each.
  SelectShared select;
  uint32_t ranges[32][2];  // least and largest key of each warp

  __device__ __forceinline__ uint32_t* words() { return select.bins[1]; }
  __device__ __forceinline__ uint32_t* numbers() { return select.bins[2]; }
};

constexpr int kKeysAt = (sizeof(Shared) + 15) / 16 * 16;

// The keys of a head's scores, of which the least is 0. The best score has the least key.
struct HeadKeys {
  const float* scores;
  const uint32_t* kept;
  int kept_count;
  int count;
  uint32_t least;

  __device__ __forceinline__ uint32_t At(int i) const {
    return (i < kept_count ? kept[i] : RankKey(scores[i])) - least;
  }
};

// Puts as many scores as there is room for into shared memory, and finds the range of all. Returns
// in how many bits the keys fit. All threads of a block meet.
template <int kThreads>
__device__ __forceinline__ int LoadKeys(HeadKeys* keys, uint32_t* kept, Shared& shared) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t least = kAll, largest = 0;
  for (int from = static_cast<int>(threadIdx.x); from < keys->count; from += kAtOnce * kThreads) {
    float loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = from + i * kThreads;
      loaded[i] = at < keys->count ? keys->scores[at] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = from + i * kThreads;
      if (at >= keys->count) continue;
      const uint32_t key = RankKey(loaded[i]);
      least = min(least, key);
      largest = max(largest, key);
      if (at < keys->kept_count) kept[at] = key;
    }
  }
  least = __reduce_min_sync(kAll, least);
  largest = __reduce_max_sync(kAll, largest);
  if (lane == 0) {
    shared.ranges[warp][0] = least;
    shared.ranges[warp][1] = largest;
  }
  __syncthreads();
  const uint32_t(&other)[2] = shared.ranges[min(lane, kThreads / 32 - 1)];
  keys->least = __reduce_min_sync(kAll, other[0]);
  largest = __reduce_max_sync(kAll, other[1]);
  return max(1, 32 - __clz(static_cast<int>(largest - keys->least)));
}

// The list of (row, KV head).
struct List {
  int row;
  int first_head;  // among the heads of all rows
  int group;
  UnionBlocks blocks;
  bool has_all;   // a head selects all blocks
  bool has_some;  // a head selects blocks
};

__device__ __forceinline__ List ListOf(const SelectUnionParams& p, int list) {
  List l = {};
  l.row = list / p.kv_heads;
  l.group = p.heads / p.kv_heads;
  l.first_head = l.row * p.heads + (list - l.row * p.kv_heads) * l.group;
  const int slot = p.slots[l.row], level = p.levels[list], position = p.positions[l.row];
  if (slot < 0 || level < 0) return l;
  const FluxionSegments segments = SegmentsOf(position);
  l.blocks = {FirstBlock(segments, level), CpuBlocks(segments, level),
              LevelTokens(level) / p.unit_tokens, 0};
  l.blocks.sink_units = max(segments.sink / p.unit_tokens - l.blocks.first * l.blocks.units, 0);
  if (l.blocks.count == 0) return l;
  for (int h = 0; h < l.group; ++h) {
    const int wanted = p.blocks[l.first_head + h];
    l.has_all |= wanted >= l.blocks.count;
    l.has_some |= wanted > 0;
  }
  return l;
}

// Sets the bits of the blocks that this thread block's heads select: those with numbers rank,
// rank + cluster, and so on.
template <int kThreads>
__device__ __forceinline__ void SelectHeads(const SelectUnionParams& p, const List& list,
                                            int cluster, int rank, int room, uint32_t* kept,
                                            Shared& shared) {
  for (int h = list.first_head + rank; h < list.first_head + list.group; h += cluster) {
    const int wanted = p.blocks[h];
    if (wanted <= 0) continue;
    __syncthreads();  // the bins are 0, and no thread needs the last head's keys any more
    HeadKeys keys = {p.scores + h * p.score_stride + list.blocks.first, kept,
                     min(list.blocks.count, room), list.blocks.count, 0};
    const int bits = LoadKeys<kThreads>(&keys, kept, shared);
    uint32_t lacking;
    const SelectCut cut = FindSelectCut<kThreads>(keys, bits, static_cast<uint32_t>(wanted), 1, 0,
                                                  shared.select, &lacking);
    MarkTaken<kThreads>(keys, cut, shared.words(), shared.select);
  }
}

// Joins the bits of the first `sources` thread blocks of the cluster, or sets those of all blocks,
// and numbers them. Returns how many are set.
__device__ __forceinline__ int JoinWords(const List& list, int cluster, int sources,
                                         Shared& shared) {
  const int at = static_cast<int>(threadIdx.x) * kThreadWords;
  uint32_t words[kThreadWords] = {};
  if (32 * at < list.blocks.count) {
    for (int source = 0; !list.has_all && source < sources; ++source) {
      const uint4 v = ReadBlock(shared.words() + at, source, cluster);
      words[0] |= v.x;
      words[1] |= v.y;
      words[2] |= v.z;
      words[3] |= v.w;
    }
  }
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kThreadWords; ++i) {
    if (list.has_all) words[i] = BlocksOfWord(list.blocks, at + i);
    bits += static_cast<uint32_t>(__popc(words[i]));
  }
  const BlockSum sum = ScanBlock(bits, shared.select.totals);
  uint32_t number = sum.before;
#pragma unroll
  for (int i = 0; at < kWords && i < kThreadWords; ++i) {
    shared.words()[at + i] = words[i];
    shared.numbers()[at + i] = number;
    number += static_cast<uint32_t>(__popc(words[i]));
  }
  return static_cast<int>(sum.total);
}

// Writes how many units the list has, and counts them.
__device__ __forceinline__ void WriteCount(const SelectUnionParams& p, int list, int count) {
  p.selected.counts[list] = count;
  const int row = list / p.kv_heads, slot = p.slots[row];
  if (slot < 0 || p.counters == nullptr) return;
  using Sum = unsigned long long;
  SparseCounters& counters = p.counters[slot];
  if (list == row * p.kv_heads) atomicAdd(reinterpret_cast<Sum*>(&counters.steps), Sum{1});
  if (count == 0) return;
  atomicAdd(reinterpret_cast<Sum*>(&counters.selected), static_cast<Sum>(count) * p.unit_tokens);
}

// Grid: lists * cluster.
template <int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    SelectUnionKernel(const __grid_constant__ SelectUnionParams p, int cluster, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  uint32_t* const kept = reinterpret_cast<uint32_t*>(memory + kKeysAt);
  const int index = static_cast<int>(blockIdx.x) / cluster;
  const int rank = static_cast<int>(blockIdx.x) - index * cluster;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kSelectBins; i += kThreads) {
    (&shared.select.bins[0][0])[i] = 0;
  }
  WaitForPriorKernels();
  LetNextKernelStart();
  const List list = ListOf(p, index);
  if (!list.has_some) {
    if (rank == 0 && threadIdx.x == 0) WriteCount(p, index, 0);
    return;
  }
  const bool meets = !list.has_all && cluster > 1;
  if (!list.has_all) {
    SelectHeads<kThreads>(p, list, cluster, rank, room, kept, shared);
    MeetBlocks(cluster);
  }
  if (rank != 0) {
    if (!meets) return;
    LeaveCluster();
    AwaitCluster();  // until the first thread block has read the words
    return;
  }
  const int taken = JoinWords(list, cluster, min(cluster, list.group), shared);
  if (meets) LeaveCluster();
  __syncthreads();
  const int skipped = (shared.words()[0] & 1) != 0 ? list.blocks.sink_units : 0;
  WriteUnits<kThreads>(list.blocks, shared.words(), shared.numbers(),
                       p.selected.units + int64_t{index} * p.selected.capacity);
  if (threadIdx.x == 0) WriteCount(p, index, taken * list.blocks.units - skipped);
  if (meets) AwaitCluster();
}

template <int kThreads, int kBlocksPerSm>
cudaError_t Launch(const SelectUnionParams& p, cudaStream_t stream) {
  const auto kernel = SelectUnionKernel<kThreads, kBlocksPerSm>;
  static const cudaError_t roomy = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kKeysAt + 4 * kKeptScores);
  if (roomy != cudaSuccess) return roomy;
  int cluster = 1;  // a power of two
  while (cluster < kMostBlocks && cluster < p.heads / p.kv_heads) cluster *= 2;
  const int room = static_cast<int>(min(p.score_stride, int64_t{kKeptScores}));
  const auto shared = static_cast<size_t>(kKeysAt + 4 * room);
  const dim3 grid(static_cast<unsigned>(int64_t{p.rows} * p.kv_heads * cluster));
  if (cluster == 1) {
    return LaunchKernel(kernel, grid, dim3(kThreads), shared, stream, p, cluster, room);
  }
  return LaunchClusters(kernel, grid, dim3(kThreads), dim3(static_cast<unsigned>(cluster)), shared,
                        stream, p, cluster, room);
}

}  // namespace

cudaError_t LaunchSelectUnion(const SelectUnionParams& p, cudaStream_t stream) {
  if ((p.unit_tokens != 16 && p.unit_tokens != 32 && p.unit_tokens != 64) ||
      p.score_stride > 32 * kWords) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return p.score_stride <= kShortStride ? Launch<kShortThreads, 3>(p, stream)
                                        : Launch<kLongThreads, 2>(p, stream);
}

}  // namespace sluice::kernels::cuda
