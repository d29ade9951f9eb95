// The sums of latent attention over lists (sparse_mla_packed.cu): how threads hold them, what
// becomes of them at a piece's end, and the kernel that folds the pieces of rows that groups share.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mla_plan.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaAdders = 256;  // threads that hold a block's sums

// A slot holds a piece or a total as its threads do: float4 [33][kMlaAdders], the last of them
// {m, l} of the thread's two rows of the tile of heads.
inline constexpr int kMlaSlotVectors = 33;
inline constexpr int64_t kMlaSlotBytes = int64_t{kMlaSlotVectors} * kMlaAdders * 16;

// Slot `index` of the block for heads [64 * head_tile, ..) of a group.
__device__ __forceinline__ float4* MlaSlot(const SparseMlaParams& p, const MlaShape& shape,
                                           int group, int head_tile, int index) {
  const int64_t slot = int64_t{group * shape.head_tiles + head_tile} * shape.slots + index;
  return reinterpret_cast<float4*>(static_cast<char*>(p.scratch) + slot * kMlaSlotBytes);
}

// What an adder thread holds: of the two rows of its tile of heads, their softmax; of each, pairs
// of neighbouring columns of the result.
struct MlaThread {
  int thread;  // of kMlaAdders

  // Row h of {0, 1}.
  __device__ int Head(int h) const { return thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * h; }
  // Of vector i: {row 0: two columns, row 1: the same columns}.
  __device__ int Column(int i) const { return thread / 128 * 256 + 8 * i + thread % 4 * 2; }
};

// The result of a list whose sums are of latents times kMlaUnit.
__device__ __forceinline__ MlaResult PackedResultOf(const SparseMlaParams& p, int64_t item,
                                                    const Softmax& state) {
  MlaResult result = ResultOf(p, item, state);
  result.own *= 1.0f / kMlaUnit;
  return result;
}

// Two neighbouring elements of an item's result.
__device__ __forceinline__ void WritePair(const SparseMlaParams& p, const MlaResult& result,
                                          int64_t at, float x, float y) {
  float2 other = {0, 0};
  if (result.other != 0.0f) other = *reinterpret_cast<const float2*>(p.other_o + at);
  const float2 v = {ElementOf(result, x, other.x), ElementOf(result, y, other.y)};
  if (p.out_type == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = v;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) = PackBf16(v.x, v.y);
  }
}

// A piece as those who compute it see it.
struct MlaPiece {
  int row;  // -1: there are no more pieces
  int slot;
  int entries;
  int index;      // of the slot for its sums
  bool folds;     // that slot has a total, of the pieces before it
  bool finishes;  // the row: its result is written
  bool ends_row;  // in this group
};

// The end of a piece: to the result, or to a slot of the scratch.
__device__ __forceinline__ void FinishPiece(const SparseMlaParams& p, const MlaShape& shape,
                                            const MlaPiece& piece, float (&o)[128],
                                            Softmax (&state)[2]) {
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int group = static_cast<int>(blockIdx.x) / shape.head_tiles;
  const int head_tile = static_cast<int>(blockIdx.x) % shape.head_tiles;
  float4* const slot = MlaSlot(p, shape, group, head_tile, piece.index) + me.thread;
  if (piece.folds) {
    const float4 of = slot[32 * kMlaAdders];
    Softmax total[2] = {{of.x, of.y}, {of.z, of.w}};
    const FoldWeights folds[2] = {Fold(total[0], state[0]), Fold(total[1], state[1])};
    state[0] = total[0];
    state[1] = total[1];
#pragma unroll
    for (int first = 0; first < 32; first += 4) {
      float4 sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = slot[(first + i) * kMlaAdders];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* const at = o + 4 * (first + i);
        at[0] = Fold(folds[0], sums[i].x, at[0]);
        at[1] = Fold(folds[0], sums[i].y, at[1]);
        at[2] = Fold(folds[1], sums[i].z, at[2]);
        at[3] = Fold(folds[1], sums[i].w, at[3]);
      }
    }
  }
  if (!piece.finishes) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      slot[i * kMlaAdders] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    }
    slot[32 * kMlaAdders] = {state[0].m, state[0].l, state[1].m, state[1].l};
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{piece.row} * p.heads + head;
    MlaResult result = {0.0f, 0.0f, NegativeInfinity()};
    if (piece.slot >= 0) result = PackedResultOf(p, item, state[h]);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      WritePair(p, result, item * kPackedRank + me.Column(i), o[4 * i + 2 * h],
                o[4 * i + 2 * h + 1]);
    }
    if (me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr)
      p.lse[item] = result.lse;
  }
}

// Folds rows that groups share, in the order of their pieces. Block (g - 1, head tile, part): the
// row that group g begins inside of, if its first piece is of group g - 1; `part` of kMlaParts of
// the vectors of each slot.
inline constexpr int kMlaParts = 8;
static __global__ void __launch_bounds__(kMlaAdders)
    CombineMlaKernel(const __grid_constant__ SparseMlaParams p, MlaShape shape, int groups) {
  constexpr int kVectors = 32 / kMlaParts;
  const int group = static_cast<int>(blockIdx.x) + 1, head_tile = static_cast<int>(blockIdx.y);
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int begin = static_cast<int>(blockIdx.z) * kVectors;
  LetNextKernelStart();
  WaitForPriorKernels();
  MlaWalk walk(p);
  walk.Start(group, groups);
  if (walk.done() || walk.piece() == 0 || walk.GroupOf(0) != group - 1) return;
  const int pieces = walk.pieces();
  // Of a piece, or of the pieces of the first group in one: asked for one ahead.
  struct Part {
    float4 state;
    float4 sums[kVectors];
  };
  const auto load = [&](int piece) {
    const int of = walk.GroupOf(piece);
    const int index = of == group - 1 ? shape.slots - 1 : piece - walk.FirstPieceIn(of);
    const float4* const slot = MlaSlot(p, shape, of, head_tile, index) + me.thread;
    Part part;
    part.state = slot[32 * kMlaAdders];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part.sums[i] = slot[(begin + i) * kMlaAdders];
    return part;
  };
  int piece = walk.piece();
  Part total = load(piece - 1), next = load(piece);
  Softmax state[2] = {{total.state.x, total.state.y}, {total.state.z, total.state.w}};
  float4(&sums)[kVectors] = total.sums;
  while (piece < pieces) {
    const Part part = next;
    if (++piece < pieces) next = load(piece);
    const Softmax other[2] = {{part.state.x, part.state.y}, {part.state.z, part.state.w}};
    const FoldWeights folds[2] = {Fold(state[0], other[0]), Fold(state[1], other[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 from = part.sums[i];
      sums[i] = {Fold(folds[0], sums[i].x, from.x), Fold(folds[0], sums[i].y, from.y),
                 Fold(folds[1], sums[i].z, from.z), Fold(folds[1], sums[i].w, from.w)};
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{walk.row()} * p.heads + head;
    const MlaResult result = PackedResultOf(p, item, state[h]);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      WritePair(p, result, item * kPackedRank + me.Column(begin + i),
                h == 0 ? sums[i].x : sums[i].z, h == 0 ? sums[i].y : sums[i].w);
    }
    if (begin == 0 && me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr) {
      p.lse[item] = result.lse;
    }
  }
}

}  // namespace sluice::kernels::cuda
