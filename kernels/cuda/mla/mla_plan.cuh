// The division of the work of latent attention over lists (sparse_mla_packed.cu), which every
// block computes from the lists' lengths.
//
// A list is cut into pieces of whole tiles of 64 entries: pieces of 512 entries, or longer ones
// if there would be more than 8 pieces. One block computes a piece, tile by tile, and the pieces
// of a list are folded in order (Fold). In a row with two lists the first list's pieces come
// first. Their fold is closed (divided by its sum) and merged with the fold of the second list's
// as ResultOf does. That is the whole arithmetic. It knows nothing of blocks, so a row's bits do
// not depend on its batch.
//
// The tiles of all rows are numbered in order, and each piece counts kMlaPieceEnd tiles more for
// its end. Group g takes the pieces that begin in [g * share, (g + 1) * share). A group is one
// block for each 64 heads. Its blocks read the same entries at about the same time, so that the
// second block finds them in L2. If all rows consist of pieces of one size, the share is a whole
// number of pieces, so that rows are cut only where that makes the largest share smaller.
//
// Among the rows of a group, kMlaWindow at a time, first lists come before second ones, which may
// still be on their way (SparseMlaParams::then_arrives). The first list of a row behind one of its
// own slot may be too; a block that meets such a row waits before it.
//
// The group that begins a row folds its pieces into one total for each list. A group that begins
// inside a row leaves each of its pieces apart, for the combining kernel. Both lie in the block's
// slots of the scratch: pieces, the totals of first lists of kMlaWindow rows, the total of the
// only or second list.
#pragma once

#include "kernels/cuda/mla/mla_result.cuh"
#include "kernels/cuda/mla/mla_walk.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaHeads = 64;  // heads of a block

// Latents in shared memory are fp16 and multiplied by this, and queries are divided by it. So the
// scale, amax / 448, keeps its 11 bits if the largest of 128 values is from 0.0034 to 8,188. A
// larger one becomes infinite. (After its norm no value is larger than 22.6 times the norm's
// weight; values that a peer makes up end its own sequence, with logits that are not finite.) The
// error of a smaller one is 2^-28 * 448.
inline constexpr float kMlaUnit = 8.0f;

// Fields that a launch adds to SparseMlaParams.
struct MlaShape {
  int32_t head_tiles;         // blocks of a group
  int32_t slots;              // scratch slots of a block
  uint32_t block_reciprocal;  // 2^32 / block_tokens, rounded up: e / block_tokens by one multiply
};

// Limit on the length of a list that may be the first or second of two: their pieces have
// kMlaPieceTiles.
inline constexpr int64_t kMlaMostOfTwo = int64_t{kMlaMaxPieces} * kMlaPieceTiles * kMlaTileEntries;

// Returns the pieces of a row whose lists have up to `capacity` entries together.
constexpr int MlaPieces(int64_t capacity, bool two) {
  const int64_t piece = kMlaPieceTiles * kMlaTileEntries;
  const int64_t pieces = (capacity + piece - 1) / piece;
  return (pieces < kMlaMaxPieces ? static_cast<int>(pieces) : kMlaMaxPieces) + (two ? 1 : 0);
}
// Returns a block's slots for totals.
constexpr int MlaTotals(bool two) { return two ? kMlaWindow + 1 : 1; }
// Returns a block's slots for such rows: none if all rows are one piece.
constexpr int MlaSlots(int64_t capacity, bool two) {
  const int pieces = MlaPieces(capacity, two);
  return pieces <= 1 ? 0 : pieces - 1 + MlaTotals(two);
}
// Return the slot, among `slots`, of a row's total of the first of two lists, and of the total of
// the only or second list.
__device__ __forceinline__ int MlaFirstTotal(int slots, int row) {
  return slots - 1 - kMlaWindow + row % kMlaWindow;
}
__device__ __forceinline__ int MlaTotal(int slots) { return slots - 1; }

// Prefetches the cache line of the row's length to L1.
__device__ __forceinline__ void FetchRow(const SparseMlaParams& p, int row) {
  for (const int32_t* const of : {p.slots, p.counts, p.then_counts}) {
    if (of != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(of + row));
  }
}

// Starts a new walk at the first piece of `group` of `groups`, in the order of rows, or past the
// end. Whole warps call it. Sums are below 2^31: tiles of a step's rows.
__device__ __forceinline__ void EnterGroup(const SparseMlaParams& p, int group, int groups,
                                           MlaWalk& walk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Prefetches a line for each 32 rows; all are on their way at once.
  for (int row = 32 * lane; row < p.rows; row += 32 * 32) FetchRow(p, row);
  int64_t begin = 0;
  int share = 1, end = 0, row = 0;
  int total = 0, smallest = 1 << 30, largest = 1, before = 0;
  bool whole = true;  // all weights are multiples of the row's piece
  // Visits all rows for the share, then once more up to the group's first one. Both passes are
  // one loop, because code that runs once is fetched from far away.
  bool counts = true, found = false;
#pragma unroll 1
  for (int first = 0; !found; first += 32) {
    const bool in = first + lane < p.rows;
    const MlaCut cut = walk.CutOf(min(first + lane, p.rows - 1));
    const int weight = in ? cut.weight : 0;
    if (counts) {
      total += weight;
      if (in) {
        const int piece = min(cut.weight, cut.stride());
        largest = max(largest, piece);
        smallest = min(smallest, piece);
        whole = whole && (cut.weight == piece || cut.weight % piece == 0);
      }
      if (first + 32 < p.rows) continue;
      total = __reduce_add_sync(0xffffffffu, total);
      largest = __reduce_max_sync(0xffffffffu, largest);
      smallest = __reduce_min_sync(0xffffffffu, smallest);
      // A group that begins inside a row has that row's next piece, if there is one.
      share = max((total + groups - 1) / groups, largest);
      if (smallest == largest && __all_sync(0xffffffffu, whole)) {
        share = (share + largest - 1) / largest * largest;
      }
      begin = int64_t{share} * group;
      if (begin >= total) return;
      end = static_cast<int>(min(begin + share, int64_t{total}));
      counts = false;
      first = -32;
      continue;
    }
    int through = weight;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, through, step);
      if (lane >= step) through += other;
    }
    const unsigned beyond = __ballot_sync(0xffffffffu, before + through > begin);
    found = beyond != 0;
    const int at = found ? __ffs(static_cast<int>(beyond)) - 1 : 32;
    row = first + at;
    // Adds the tiles before that row, or before the next 32.
    before += __shfl_sync(0xffffffffu, through - (found ? weight : 0), min(at, 31));
  }
  walk.Enter(share, static_cast<int>(begin), end, row, before);
}

}  // namespace sluice::kernels::cuda
