// Who computes what in latent attention over lists (sparse_mla_packed.cu), worked out by every
// block from the lists' lengths.
//
// A list is cut into pieces of whole tiles of 64 entries: of 512 entries, longer ones where more
// than 8 pieces would come of it. A piece is computed by one block, tile by tile; the pieces of a
// row are folded in order (Fold). That is the whole arithmetic: it knows nothing of blocks, so the
// bits are a row's own.
//
// The tiles of all rows are numbered in order, an empty list counting as one; group g takes the
// pieces that begin in [g * share, (g + 1) * share). A group is one block for each 64 heads: the
// same entries at about the same time, so that the second block finds them in L2. The share is
// rounded up to whole pieces, so that rows are cut only where that makes the largest share smaller.
//
// Whoever begins a row folds its pieces into one total; a group that begins inside a row leaves
// each of its pieces apart, for the combining kernel. Both lie in the block's slots of the scratch.
#pragma once

#include "kernels/cuda/mla_result.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaHeads = 64;  // of a block
inline constexpr int kMlaTileEntries = 64;
inline constexpr int kMlaMaxPieces = 8;
#ifndef MLA_PIECE
#define MLA_PIECE 8
#endif
inline constexpr int kMlaPieceTiles = MLA_PIECE;

// Latents in shared memory are fp16 and this many times what they are, queries the inverse: so the
// scale, amax / 448, keeps its 11 bits where the largest of 128 values is from 0.0034 to 8,188. A
// larger one is infinite (after its norm no value is larger than 22.6 times the norm's weight; what
// a sender makes up ends its own sequence, with logits that are not finite), a smaller one's error
// is 2^-28 * 448.
inline constexpr float kMlaUnit = 8.0f;

// What a launch adds to SparseMlaParams.
struct MlaShape {
  int32_t head_tiles;         // blocks of a group
  int32_t slots;              // of a block: the pieces that it leaves apart, then the total
  uint32_t block_reciprocal;  // 2^32 / block_tokens, rounded up: e / block_tokens by one multiply
};

// Slots of a block for lists of up to `capacity` entries: none where all are one piece.
constexpr int MlaSlots(int64_t capacity) {
  const int64_t piece = kMlaPieceTiles * kMlaTileEntries;
  const int64_t pieces = (capacity + piece - 1) / piece;
  return pieces <= 1 ? 0 : static_cast<int>(pieces < kMlaMaxPieces ? pieces : kMlaMaxPieces);
}

// A list in tiles and pieces.
struct MlaCut {
  int tiles;        // 0: an empty list
  int piece_tiles;  // of each piece but the last
  int pieces;       // at least 1

  __device__ explicit MlaCut(int count)
      : tiles((count + kMlaTileEntries - 1) / kMlaTileEntries),
        piece_tiles(max(kMlaPieceTiles, (tiles + kMlaMaxPieces - 1) / kMlaMaxPieces)),
        pieces(max(1, (tiles + piece_tiles - 1) / piece_tiles)) {}
  __device__ int weight() const { return max(tiles, 1); }
};

// Where a walk is.
struct MlaPosition {
  int share = 1;
  int row = 0, slot = -1, count = 0;
  int pieces = 1, piece_tiles = 0;  // of the row
  int piece = 0, first_piece = 0;
  int row_begin = 0;    // tiles before the row
  int at = 0, end = 0;  // tiles: where the piece begins, where the group ends
  int next_slot = -1, next_count = 0;
};

// The pieces of a group, in order.
class MlaWalk {
 public:
  // REQUIRES: p has rows.
  __device__ explicit MlaWalk(const SparseMlaParams& p) : p_(p) {}
  __device__ MlaWalk(const SparseMlaParams& p, const MlaPosition& at) : p_(p), at_(at) {}
  __device__ const MlaPosition& position() const { return at_; }

  // To the first piece of `group` of `groups`, or past the end. Called by whole warps. Sums are
  // below 2^31: tiles of a step's rows.
  __device__ void Start(int group, int groups) {
    int total = 0, largest = 1;
    for (int first = 0; first < p_.rows; first += kChunk) {
      int lengths[kChunk / 32];
      LoadLengths(first, lengths);
#pragma unroll
      for (const int length : lengths) {
        const MlaCut cut(max(length, 0));
        total += length < 0 ? 0 : cut.weight();
        largest = max(largest, min(cut.weight(), cut.piece_tiles));
      }
    }
    total = __reduce_add_sync(0xffffffffu, total);
    largest = __reduce_max_sync(0xffffffffu, largest);
    at_.share = ((total + groups - 1) / groups + largest - 1) / largest * largest;
    const int64_t begin = int64_t{at_.share} * group;
    if (begin >= total) {
      at_.at = at_.end = 0;
      return;
    }
    at_.end = static_cast<int>(min(begin + at_.share, int64_t{total}));
    FindRow(static_cast<int>(begin));
    LoadNext(at_.row);
    EnterRow();
    at_.piece = at_.first_piece =
        (static_cast<int>(begin) - at_.row_begin + at_.piece_tiles - 1) / at_.piece_tiles;
    at_.at = at_.row_begin + at_.piece * at_.piece_tiles;
    if (at_.piece == at_.pieces) NextRow();
  }

  __device__ bool done() const { return at_.at >= at_.end; }
  // REQUIRES, of all below: !done().
  __device__ int row() const { return at_.row; }
  __device__ int slot() const { return at_.slot; }
  __device__ int piece() const { return at_.piece; }
  __device__ int first_piece() const { return at_.first_piece; }  // of the row, in this group
  __device__ bool IsLast() const { return at_.piece + 1 == at_.pieces; }
  // Whether the next piece, if there is one, is of another row.
  __device__ bool EndsRow() const { return IsLast() || at_.at + at_.piece_tiles >= at_.end; }
  // The piece's entries of the list.
  __device__ int begin_entry() const { return at_.piece * at_.piece_tiles * kMlaTileEntries; }
  __device__ int entries() const {
    return min(at_.count - begin_entry(), at_.piece_tiles * kMlaTileEntries);
  }
  __device__ int pieces() const { return at_.pieces; }

  __device__ void Next() {
    at_.at += at_.piece_tiles;
    if (++at_.piece == at_.pieces) NextRow();
  }
  // To the next piece that has entries.
  __device__ void NextFull() {
    do Next();
    while (!done() && entries() == 0);
  }

  // Of the row: the group of piece `piece`, and the first piece of the row that begins in a group.
  __device__ int GroupOf(int piece) const {
    return (at_.row_begin + piece * at_.piece_tiles) / at_.share;
  }
  __device__ int FirstPieceIn(int group) const {
    const int tiles = at_.piece_tiles;
    return max(0, (group * at_.share - at_.row_begin + tiles - 1) / tiles);
  }

 private:
  static constexpr int kChunk = 128;  // rows whose lengths are asked for at a time

  // Of rows first + 32 * i + lane: the list's length, or -1 behind the last row.
  __device__ void LoadLengths(int first, int (&lengths)[kChunk / 32]) const {
    int slots[kChunk / 32];
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      const int row = min(first + 32 * i + static_cast<int>(threadIdx.x) % 32, p_.rows - 1);
      slots[i] = p_.slots[row];
      lengths[i] = p_.counts[row];
    }
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      const bool in = first + 32 * i + static_cast<int>(threadIdx.x) % 32 < p_.rows;
      const int64_t count = slots[i] < 0 ? 0 : max(lengths[i], 0);
      lengths[i] = in ? static_cast<int>(min(count, p_.capacity)) : -1;
    }
  }
  // The row that tile `tile` of all is of. REQUIRES: there is one.
  __device__ void FindRow(int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int before = 0;
    for (int first = 0;; first += kChunk) {
      int lengths[kChunk / 32];
      LoadLengths(first, lengths);
#pragma unroll
      for (int i = 0; i < kChunk / 32; ++i) {
        const int mine = lengths[i] < 0 ? 0 : MlaCut(lengths[i]).weight();
        int through = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, through, step);
          if (lane >= step) through += other;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, before + through > tile);
        if (beyond != 0) {
          const int found = __ffs(static_cast<int>(beyond)) - 1;
          at_.row = first + 32 * i + found;
          at_.row_begin = before + __shfl_sync(0xffffffffu, through - mine, found);
          return;
        }
        before += __shfl_sync(0xffffffffu, through, 31);
      }
    }
  }
  // One row ahead, so that nobody waits for a length between two rows.
  __device__ void LoadNext(int row) {
    at_.next_slot = row < p_.rows ? p_.slots[row] : -1;
    at_.next_count = row < p_.rows ? p_.counts[row] : 0;
  }
  __device__ void EnterRow() {
    at_.slot = at_.next_slot;
    const int64_t most = p_.capacity;
    const int count = at_.slot < 0 ? 0 : max(at_.next_count, 0);
    at_.count = count < most ? count : static_cast<int>(most);
    const MlaCut cut(at_.count);
    at_.pieces = cut.pieces;
    at_.piece_tiles = cut.piece_tiles;
    LoadNext(at_.row + 1);
  }
  __device__ void NextRow() {
    at_.row_begin += max(1, (at_.count + kMlaTileEntries - 1) / kMlaTileEntries);
    at_.at = at_.row_begin;
    ++at_.row;
    at_.piece = at_.first_piece = 0;
    EnterRow();
  }

  const SparseMlaParams& p_;
  MlaPosition at_;
};

}  // namespace sluice::kernels::cuda
