// The sums of latent attention over lists (sparse_mla_packed.cu): how threads hold them, what
// happens to them at a piece's end, and the kernel that folds the pieces of rows that groups
// share.
#pragma once

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/mla/mla_plan.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaAdders = 256;  // threads that hold a block's sums

// A slot holds a piece or a total in its threads' layout: float4 [33][kMlaAdders], of which the
// last vector is {m, l} of the thread's two rows of the tile of heads.
inline constexpr int kMlaSlotVectors = 33;
inline constexpr int64_t kMlaSlotBytes = int64_t{kMlaSlotVectors} * kMlaAdders * 16;

// Sums of open lists lie in slots multiplied by kMlaUnit, those of closed lists unscaled.
//
// Returns slot `index` of the block for heads [64 * head_tile, ..) of a group.
__device__ __forceinline__ float4* MlaSlot(const SparseMlaParams& p, const MlaShape& shape,
                                           int group, int head_tile, int index) {
  const int64_t slot = int64_t{group * shape.head_tiles + head_tile} * shape.slots + index;
  return reinterpret_cast<float4*>(static_cast<char*>(p.scratch) + slot * kMlaSlotBytes);
}

// The sums that an adder thread holds: the softmax of its two rows of the tile of heads, and for
// each row pairs of neighbouring columns of the result.
struct MlaThread {
  int thread;  // index among kMlaAdders

  // Returns the head of row h, 0 or 1.
  __device__ int Head(int h) const { return thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * h; }
  // Returns the first column of vector i, which is {row 0: two columns, row 1: the same columns}.
  __device__ int Column(int i) const { return thread / 128 * 256 + 8 * i + thread % 4 * 2; }
};

// A piece as the threads that compute it see it.
struct MlaPiece {
  int row;  // -1 if there are no more pieces
  int slot;
  int entries;
  int index;      // index of the slot for its sums
  bool folds;     // that slot has a total of the list's pieces before this one
  bool closes;    // the piece ends the first of two lists, all of which is in this group
  bool finishes;  // the piece ends the row: its result is written
  bool follows;   // the piece follows a closed first list, whose total is in slot MlaFirstTotal
};

// Closes a list: its softmax becomes its lse, in `m`. Returns the factor for its sums.
__device__ __forceinline__ float Close(Softmax& state) {
  const MlaResult result = ResultOf(state, NegativeInfinity());
  state = {result.lse, 0.0f};
  return result.own * (1.0f / kMlaUnit);
}

// Returns the part of the first list's result that is added to the other's, or nothing if it does
// not count, whatever its value. x * y - 0 is x * y, also where that is -0.
__device__ __forceinline__ float OtherPart(float other, float x) {
  return other == 0.0f ? -0.0f : x * other;
}

// Calls begin(), then use(i, load(i)) for i in [0, 32), of float4 each. Two chunks of loads are
// under way. Left to itself, the compiler would begin with the code that waits for the first of
// them.
template <typename Load, typename Begin, typename Use>
__device__ __forceinline__ void ForVectors(Load load, Begin begin, Use use) {
  constexpr int kChunk = 4, kChunks = (32 + kChunk - 1) / kChunk;
  float4 v[32];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] = load(i);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = (chunk + 1) * kChunk; i < 32 && i < (chunk + 2) * kChunk; ++i) v[i] = load(i);
    __syncwarp();  // no load moves down
    if (chunk == 0) begin();
#pragma unroll
    for (int i = chunk * kChunk; i < 32 && i < (chunk + 1) * kChunk; ++i) use(i, v[i]);
  }
}

__device__ __forceinline__ void WritePair(const SparseMlaParams& p, int64_t at, float2 v) {
  if (p.out_type == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = v;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) = PackBf16(v.x, v.y);
  }
}

// Exchanges halves between neighbouring lanes: two neighbouring columns each of two vectors, of
// one row, become four neighbouring columns of one of them, at WideColumn() from the first, and
// the other way round. Loads and stores of 8 bytes touch as many lines as those of 16, and beside
// this much shared memory L1 has few.
__device__ __forceinline__ float4 ExchangePairs(float4 v) {
  const bool odd = threadIdx.x % 2 != 0;
  const float x = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.z, 1);
  const float y = __shfl_xor_sync(0xffffffffu, odd ? v.y : v.w, 1);
  return odd ? float4{x, y, v.z, v.w} : float4{v.x, v.y, x, y};
}
__device__ __forceinline__ int WideColumn() {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  return lane % 2 * 8 + lane / 2 * 4 - lane * 2;
}

// Transposes among four neighbouring lanes that each have a word of four rows: lane i gets row i.
// Four bytes at a time from as many lanes are half a sector, which takes the cache several times
// as long.
__device__ __forceinline__ uint4 TransposeQuad(const uint32_t (&words)[4], int lane) {
  const bool odd = lane % 2 != 0, high = lane / 2 != 0;
  const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  const uint2 low_row = odd ? uint2{x, words[1]} : uint2{words[0], x};
  const uint2 high_row = odd ? uint2{y, words[3]} : uint2{words[2], y};
  const uint32_t z = __shfl_xor_sync(0xffffffffu, high ? low_row.x : high_row.x, 2);
  const uint32_t w = __shfl_xor_sync(0xffffffffu, high ? low_row.y : high_row.y, 2);
  return high ? uint4{z, w, high_row.x, high_row.y} : uint4{low_row.x, low_row.y, z, w};
}

// Writes a thread's part of two rows of the result, 8 heads apart. `at` is the index of its first
// element.
__device__ __forceinline__ void WriteResult(const SparseMlaParams& p, int64_t at,
                                            const float (&o)[128]) {
  if (p.out_type == DType::kFloat32) {
    float* const to = static_cast<float*>(p.out) + at + WideColumn();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float* const pairs = o + i / 2 * 8 + i % 2 * 2;
      *reinterpret_cast<float4*>(to + i % 2 * 8 * kPackedRank + i / 2 * 16) =
          ExchangePairs({pairs[0], pairs[1], pairs[4], pairs[5]});
    }
  } else {
    const int lane = static_cast<int>(threadIdx.x) % 4;
    uint16_t* const to = static_cast<uint16_t*>(p.out) + at + lane * 6;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int h = i % 2, first = i / 2 * 4;
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = PackBf16(o[4 * (first + j) + 2 * h], o[4 * (first + j) + 2 * h + 1]);
      }
      *reinterpret_cast<uint4*>(to + h * 8 * kPackedRank + first * 8) = TransposeQuad(words, lane);
    }
  }
}

// Ends a piece: its sums go to the result, or to a slot of the scratch. The code runs once a
// piece, but is long, so every kind of end has one straight run of vectors, for which few
// instructions have to be fetched.
__device__ __forceinline__ void FinishPiece(const SparseMlaParams& p, const MlaShape& shape,
                                            const MlaPiece& piece, float (&o)[128],
                                            Softmax (&state)[2]) {
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int group = static_cast<int>(blockIdx.x) / shape.head_tiles;
  const int head_tile = static_cast<int>(blockIdx.x) % shape.head_tiles;
  float4* const slot = MlaSlot(p, shape, group, head_tile, piece.index) + me.thread;
  if (piece.folds) {
    const float4 of = __ldcg(slot + 32 * kMlaAdders);
    FoldWeights folds[2];
    ForVectors([&](int i) { return __ldcg(slot + i * kMlaAdders); },
               [&] {
                 Softmax total[2] = {{of.x, of.y}, {of.z, of.w}};
                 for (int h = 0; h < 2; ++h) {
                   folds[h] = Fold(total[h], state[h]);
                   state[h] = total[h];
                 }
               },
               [&](int i, const float4& sums) {
                 float* const at = o + 4 * i;
                 at[0] = Fold(folds[0], sums.x, at[0]);
                 at[1] = Fold(folds[0], sums.y, at[1]);
                 at[2] = Fold(folds[1], sums.z, at[2]);
                 at[3] = Fold(folds[1], sums.w, at[3]);
               });
  }
  if (piece.closes) {
    const float own[2] = {Close(state[0]), Close(state[1])};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= own[i / 2 % 2];
  }
  if (!piece.finishes) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      __stcg(slot + i * kMlaAdders, float4{o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]});
    }
    __stcg(slot + 32 * kMlaAdders, float4{state[0].m, state[0].l, state[1].m, state[1].l});
    return;
  }
  // The result of the first of two lists: that of this piece, left in its slot, or the caller's.
  const float4* const first =
      MlaSlot(p, shape, group, head_tile, MlaFirstTotal(shape.slots, piece.row)) + me.thread;
  const bool is_two = p.then_counts != nullptr;
  float first_lse[2] = {NegativeInfinity(), NegativeInfinity()};
  if (piece.closes) {
    first_lse[0] = state[0].m;
    first_lse[1] = state[1].m;
    state[0] = state[1] = {NegativeInfinity(), 0.0f};
  } else if (piece.follows) {
    const float4 of = __ldcg(first + 32 * kMlaAdders);
    first_lse[0] = of.x;
    first_lse[1] = of.z;
  }
  const int head = head_tile * kMlaHeads + me.Head(0);
  const int64_t item = int64_t{piece.row} * p.heads + head;
  float own[2] = {0, 0}, other[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    MlaResult result = {0.0f, 0.0f, NegativeInfinity()};
    if (piece.slot >= 0) {
      result = is_two ? ResultOf(state[h], first_lse[h]) : ResultOf(p, item + 8 * h, state[h]);
    }
    own[h] = result.own * (1.0f / kMlaUnit);
    other[h] = result.other;
    if (me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr) {
      p.lse[item + 8 * h] = result.lse;
    }
  }
  const int64_t at = item * kPackedRank + me.Column(0);
  const auto add = [&](int i, const float4& x) {
    float* const to = o + 4 * i;
    to[0] = fmaf(to[0], own[0], OtherPart(other[0], x.x));
    to[1] = fmaf(to[1], own[0], OtherPart(other[0], x.y));
    to[2] = fmaf(to[2], own[1], OtherPart(other[1], x.z));
    to[3] = fmaf(to[3], own[1], OtherPart(other[1], x.w));
  };
  if (piece.follows) {
    ForVectors([&](int i) { return __ldcg(first + i * kMlaAdders); }, [] {}, add);
  } else if (!is_two && p.other_o != nullptr) {
    const float* const from = p.other_o + at + WideColumn();
    float4 upper;
    ForVectors(
        [&](int i) {
          return __ldcg(
              reinterpret_cast<const float4*>(from + i % 2 * 8 * kPackedRank + i / 2 * 16));
        },
        [] {},
        [&](int i, const float4& x) {
          if (i % 2 == 0) {
            upper = ExchangePairs(x);
          } else {
            const float4 lower = ExchangePairs(x);
            add(i - 1, {upper.x, upper.y, lower.x, lower.y});
            add(i, {upper.z, upper.w, lower.z, lower.w});
          }
        });
  } else {
    // A closed list already has its factor, and its -0 becomes 0 as a sum with the other list's.
    const float from[2] = {piece.closes ? other[0] : own[0], piece.closes ? other[1] : own[1]};
    const float nothing = piece.closes ? 0.0f : -0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = fmaf(o[i], from[i / 2 % 2], nothing);
  }
  WriteResult(p, at, o);
}

// Some vectors of a list's sums, as its pieces are folded.
template <int kVectors>
struct MlaFold {
  Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
  float4 sums[kVectors];
  bool empty = true;

  // Folds the vectors of a slot, from vector `begin` on.
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

// Folds rows that groups share, in the order of their pieces. Block (g - 1, head tile, part)
// folds the row that group g begins inside of, if the row's first piece belongs to group g - 1;
// `part` is one of kMlaParts parts of the vectors of each slot.
inline constexpr int kMlaParts = 8;
static __global__ void __launch_bounds__(kMlaAdders)
    CombineMlaKernel(const __grid_constant__ SparseMlaParams p, MlaShape shape, int groups) {
  constexpr int kVectors = 32 / kMlaParts;
  const int group = static_cast<int>(blockIdx.x) + 1, head_tile = static_cast<int>(blockIdx.y);
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int begin = static_cast<int>(blockIdx.z) * kVectors;
  LetNextKernelStart();
  // The kernel before this one lets it start once the kernels before that one, which wrote the
  // lists, are done.
  __shared__ MlaPosition position;
  if (threadIdx.x < 32) {
    MlaWalk first(p);
    EnterGroup(p, group, groups, first);
    if (threadIdx.x == 0) position = first.position();
  }
  __syncthreads();
  const MlaWalk walk(p, position);
  WaitForPriorKernels();
  if (walk.done() || walk.piece() == 0 || walk.GroupOf(0) != group - 1) return;
  // Folds the total of group - 1, then the pieces that begin in later groups.
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
    first.Take(slot(group - 1, MlaFirstTotal(shape.slots, walk.row())), begin);
    if (begun < first_pieces) {  // otherwise it is closed
      take_pieces(first, begun, first_pieces);
      first.CloseList();
    }
  }
  if (begun > first_pieces) last.Take(slot(group - 1, MlaTotal(shape.slots)), begin);
  take_pieces(last, max(begun, first_pieces), pieces);
  if (last.empty) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) last.sums[i] = {0, 0, 0, 0};
  }
  const bool is_two = p.then_counts != nullptr;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{walk.row()} * p.heads + head;
    const float first_lse = first.empty ? NegativeInfinity() : first.state[h].m;
    const MlaResult result =
        is_two ? ResultOf(last.state[h], first_lse) : ResultOf(p, item, last.state[h]);
    const float own = result.own * (1.0f / kMlaUnit);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 sums = last.sums[i], closed = first.sums[i];
      const float2 of = h == 0 ? float2{sums.x, sums.y} : float2{sums.z, sums.w};
      float2 other = h == 0 ? float2{closed.x, closed.y} : float2{closed.z, closed.w};
      const int64_t at = item * kPackedRank + me.Column(begin + i);
      if (!is_two && result.other != 0.0f) {
        other = *reinterpret_cast<const float2*>(p.other_o + at);
      }
      WritePair(p, at,
                {fmaf(of.x, own, OtherPart(result.other, other.x)),
                 fmaf(of.y, own, OtherPart(result.other, other.y))});
    }
    if (begin == 0 && me.thread < kMlaAdders / 2 && me.thread % 4 == 0 && p.lse != nullptr) {
      p.lse[item] = result.lse;
    }
  }
}

}  // namespace sluice::kernels::cuda
