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

// Two neighbouring elements of an item's result. `other`: of the first of two lists; else read
// here.
__device__ __forceinline__ void WritePair(const SparseMlaParams& p, const MlaResult& result,
                                          int64_t at, float x, float y, float2 other) {
  if (result.other != 0.0f && p.then_counts == nullptr) {
    other = *reinterpret_cast<const float2*>(p.other_o + at);
  }
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
  bool folds;     // that slot has a total, of the list's pieces before it
  bool closes;    // the first of two lists, all of it in this group
  bool finishes;  // the row: its result is written
  bool follows;   // a closed first list, whose total is in slot shape.slots - 2
  bool ends_row;  // in this group
};

// Closes a list's sums: they become its result, and the softmax its lse, in `m`.
__device__ __forceinline__ float Close(Softmax& state) {
  const MlaResult result = ResultOf(state, NegativeInfinity());
  state = {result.lse, 0.0f};
  return result.own;
}

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
  if (piece.closes) {
    const float own[2] = {Close(state[0]), Close(state[1])};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= own[i / 2 % 2];
  }
  if (!piece.finishes) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      slot[i * kMlaAdders] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    }
    slot[32 * kMlaAdders] = {state[0].m, state[0].l, state[1].m, state[1].l};
    return;
  }
  // What the first of two lists comes to: of this piece, or left in its slot.
  const float4* const first = MlaSlot(p, shape, group, head_tile, shape.slots - 2) + me.thread;
  float first_lse[2] = {NegativeInfinity(), NegativeInfinity()};
  if (piece.closes) {
    first_lse[0] = state[0].m;
    first_lse[1] = state[1].m;
    state[0] = state[1] = {NegativeInfinity(), 0.0f};
  } else if (piece.follows) {
    const float4 of = first[32 * kMlaAdders];
    first_lse[0] = of.x;
    first_lse[1] = of.z;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{piece.row} * p.heads + head;
    MlaResult result = {0.0f, 0.0f, NegativeInfinity()};
    if (piece.slot >= 0) {
      result =
          p.then_counts == nullptr ? ResultOf(p, item, state[h]) : ResultOf(state[h], first_lse[h]);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 sums = {o[4 * i + 2 * h], o[4 * i + 2 * h + 1]};
      float2 other = {0, 0};
      if (piece.follows) {
        const float4 of = first[i * kMlaAdders];
        other = h == 0 ? float2{of.x, of.y} : float2{of.z, of.w};
      }
      const int64_t at = item * kPackedRank + me.Column(i);
      if (piece.closes) {
        WritePair(p, result, at, 0, 0, sums);
      } else {
        WritePair(p, result, at, sums.x, sums.y, other);
      }
    }
    if (me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr)
      p.lse[item] = result.lse;
  }
}

// Some vectors of a list's sums, as its pieces are folded.
template <int kVectors>
struct MlaFold {
  Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
  float4 sums[kVectors];
  bool empty = true;

  // Those of a slot, from vector `begin` on.
  __device__ __forceinline__ void Take(const float4* slot, int begin) {
    const float4 of = slot[32 * kMlaAdders];
    float4 from[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) from[i] = slot[(begin + i) * kMlaAdders];
    const Softmax other[2] = {{of.x, of.y}, {of.z, of.w}};
    if (empty) {
      state[0] = other[0];
      state[1] = other[1];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) sums[i] = from[i];
      empty = false;
      return;
    }
    const FoldWeights folds[2] = {Fold(state[0], other[0]), Fold(state[1], other[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sums[i] = {Fold(folds[0], sums[i].x, from[i].x), Fold(folds[0], sums[i].y, from[i].y),
                 Fold(folds[1], sums[i].z, from[i].z), Fold(folds[1], sums[i].w, from[i].w)};
    }
  }
  __device__ __forceinline__ void CloseList() {
    const float own[2] = {Close(state[0]), Close(state[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sums[i] = {sums[i].x * own[0], sums[i].y * own[0], sums[i].z * own[1], sums[i].w * own[1]};
    }
  }
};

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
  // What group - 1 folded, then the pieces that begin in later groups.
  const int begun = walk.piece(), first_pieces = walk.first_pieces(), pieces = walk.pieces();
  const auto slot = [&](int of, int index) {
    return MlaSlot(p, shape, of, head_tile, index) + me.thread;
  };
  const auto take_pieces = [&](MlaFold<kVectors>& fold, int from, int end) {
    for (int piece = from; piece < end; ++piece) {
      const int of = walk.GroupOf(piece);
      fold.Take(slot(of, piece - walk.FirstPieceIn(of)), begin);
    }
  };
  MlaFold<kVectors> first, last;
  if (first_pieces > 0) {
    first.Take(slot(group - 1, shape.slots - 2), begin);
    if (begun < first_pieces) {  // Else it is closed.
      take_pieces(first, begun, first_pieces);
      first.CloseList();
    }
  }
  if (begun > first_pieces) last.Take(slot(group - 1, shape.slots - 1), begin);
  take_pieces(last, max(begun, first_pieces), pieces);
  if (last.empty) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) last.sums[i] = {0, 0, 0, 0};
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{walk.row()} * p.heads + head;
    const float first_lse = first.empty ? NegativeInfinity() : first.state[h].m;
    const MlaResult result = p.then_counts == nullptr ? ResultOf(p, item, last.state[h])
                                                      : ResultOf(last.state[h], first_lse);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 of = last.sums[i], other = first.sums[i];
      WritePair(p, result, item * kPackedRank + me.Column(begin + i), h == 0 ? of.x : of.z,
                h == 0 ? of.y : of.w, h == 0 ? float2{other.x, other.y} : float2{other.z, other.w});
    }
    if (begin == 0 && me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr) {
      p.lse[item] = result.lse;
    }
  }
}

}  // namespace sluice::kernels::cuda
