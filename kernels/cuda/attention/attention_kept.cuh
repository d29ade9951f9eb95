// Queries, and the states of groups and rows, which decode attention keeps while slices stream by:
// in registers or, for two tiles of heads of 128, in shared memory (kKeptInShared). There the sums
// of the values alone take half of a thread's registers.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/attention_plan.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = 32 * kDecodeWarps;
inline constexpr int kTileHeads = 8;

template <int dim, int tiles>
inline constexpr bool kKeptInShared = dim > 128 / tiles;

// Returns x. If `scarce`, registers are scarce: what depends on the result is computed at its use,
// instead of early, for all uses, in registers of its own.
template <bool scarce>
__device__ __forceinline__ int Anew(int x) {
  if constexpr (scarce) asm volatile("" : "+r"(x));
  return x;
}

// One lane's part of an A operand of 16 columns: the queries of a tile's heads, rows 0-7 their
// upper parts and rows 8-15 their lower parts.
struct alignas(16) QueryOperand {
  uint32_t part[4];
};

// Makes an operand of a lane's queries: two columns of the first 8 and two of the other 8, times
// `factor`.
__device__ __forceinline__ QueryOperand SplitQuery(float2 left, float2 right, float factor) {
  QueryOperand to;
  SplitBf16(left.x * factor, left.y * factor, to.part[0], to.part[1]);
  SplitBf16(right.x * factor, right.y * factor, to.part[2], to.part[3]);
  return to;
}

// Queries of which every warp keeps a copy of its own.
template <int dim, int tiles>
struct QueriesInRegisters {
  static constexpr bool kInShared = false;
  QueryOperand operands[tiles][dim / 16];

  // Takes a tile's queries. `from` is this lane's first column in the row of query head lane / 4.
  // All loads start before the first is used.
  __device__ void Take(int tile, const float* from, float factor) {
    float2 v[dim / 8];
#pragma unroll
    for (int i = 0; i < dim / 8; ++i) v[i] = *reinterpret_cast<const float2*>(from + i * 8);
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      operands[tile][step] = SplitQuery(v[2 * step], v[2 * step + 1], factor);
    }
  }
  __device__ const QueryOperand& At(int tile, int step) const { return operands[tile][step]; }
};

// Queries of which the block has one copy. Each warp takes its share of the columns, so the block
// has to meet before it takes them, when no warp reads the old ones any more, and behind that.
template <int dim, int tiles>
struct QueriesInShared {
  static constexpr bool kInShared = true;
  // A lane's operands lie side by side with its neighbours': loads have no bank conflicts.
  QueryOperand (*operands)[dim / 16][32];

  __device__ void Take(int tile, const float* from, float factor) {
#pragma unroll
    for (int first = 0; first < dim / 16; first += kDecodeWarps) {
      const int step = first + static_cast<int>(threadIdx.x) / 32;
      if (step >= dim / 16) break;
      const auto* const v = reinterpret_cast<const float2*>(from + step * 16);
      operands[tile][step][threadIdx.x % 32] = SplitQuery(v[0], v[4], factor);
    }
  }
  __device__ QueryOperand At(int tile, int step) const {
    return operands[tile][step][threadIdx.x % 32];
  }
};

// The part of a split's, a group's or a row's result that one thread keeps: elements thread + i *
// kDecodeThreads of [heads of a tile][dim].
template <int dim>
struct PartialState {
  static constexpr int kElements = kTileHeads * dim / kDecodeThreads;
  Softmax softmax[kElements];
  float o[kElements];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      softmax[i] = {NegativeInfinity(), 0.0f};
      o[i] = 0.0f;
    }
  }
  __device__ void Add(const PartialState& from, int elements) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (Index(i) >= elements) break;
      const FoldWeights weights = Fold</*may_be_empty=*/true>(softmax[i], from.softmax[i]);
      o[i] = Fold(weights, o[i], from.o[i]);
    }
  }
  __device__ const PartialState& Get() const { return *this; }
  __device__ static int Index(int i) { return static_cast<int>(threadIdx.x) + i * kDecodeThreads; }
};

// The partial states of all of a block's threads, in shared memory. A thread reads and writes only
// its own, and a warp those of its lanes, so no barrier of the block is needed. All lanes of a warp
// call a function together.
template <int dim>
struct StoredState {
  using Partial = PartialState<dim>;
  float o[Partial::kElements][kDecodeThreads];
  Softmax softmax[Partial::kElements][kDecodeWarps];  // the lanes' elements i are of one head

  __device__ void Clear() {
    Partial state;
    state.Clear();
    Put(state);
  }
  __device__ void Add(const Partial& from, int elements) {
    Partial state = Get();
    state.Add(from, elements);
    Put(state);
  }
  __device__ Partial Get() const {
    Partial state;
#pragma unroll
    for (int i = 0; i < Partial::kElements; ++i) {
      state.softmax[i] = softmax[i][threadIdx.x / 32];
      state.o[i] = o[i][threadIdx.x];
    }
    return state;
  }

 private:
  __device__ void Put(const Partial& state) {
    __syncwarp();  // every lane has read what lane 0 replaces
#pragma unroll
    for (int i = 0; i < Partial::kElements; ++i) {
      o[i][threadIdx.x] = state.o[i];
      if (threadIdx.x % 32 == 0) softmax[i][threadIdx.x / 32] = state.softmax[i];
    }
    __syncwarp();
  }
};

// The states of a group and of a row, for each tile.
template <int dim, int tiles>
struct KeptStates {
  using State = std::conditional_t<kKeptInShared<dim, tiles>, StoredState<dim>, PartialState<dim>>;
  State group[tiles], row[tiles];

  __device__ void Clear() {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      group[tile].Clear();
      row[tile].Clear();
    }
  }
};

}  // namespace sluice::kernels::cuda
