// Who computes what in latent attention over lists (sparse_mla_packed.cu), worked out by every
// block from the lists' lengths.
//
// A list is cut into pieces of whole tiles of 64 entries: of 512 entries, longer ones where more
// than 8 pieces would come of it. A piece is computed by one block, tile by tile; the pieces of a
// list are folded in order (Fold). Of a row with two lists the first one's pieces come first; what
// they fold to is closed (divided by its sum), and merged with the second one's as ResultOf does.
// That is the whole arithmetic: it knows nothing of blocks, so the bits are a row's own.
//
// The tiles of all rows are numbered in order, each piece with kMlaPieceEnd more for its end; group
// g takes the pieces that begin in [g * share, (g + 1) * share). A group is one block for each 64
// heads: the same entries at about the same time, so that the second block finds them in L2. Where
// all rows are of pieces of one size the share is whole pieces, so that rows are cut only where
// that makes the largest share smaller.
//
// Whoever begins a row folds its pieces into one total for each list; a group that begins inside a
// row leaves each of its pieces apart, for the combining kernel. Both lie in the block's slots of
// the scratch: pieces, the total of a first of two lists, the total of the only or second list.
#pragma once

#include "kernels/cuda/mla_result.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaHeads = 64;  // of a block
inline constexpr int kMlaTileEntries = 64;
inline constexpr int kMlaMaxPieces = 8;
inline constexpr int kMlaPieceTiles = 2 * kMlaSplitEntries / kMlaTileEntries;

// Latents in shared memory are fp16 and this many times what they are, queries the inverse: so the
// scale, amax / 448, keeps its 11 bits where the largest of 128 values is from 0.0034 to 8,188. A
// larger one is infinite (after its norm no value is larger than 22.6 times the norm's weight; what
// a sender makes up ends its own sequence, with logits that are not finite), a smaller one's error
// is 2^-28 * 448.
inline constexpr float kMlaUnit = 8.0f;

// What a launch adds to SparseMlaParams.
struct MlaShape {
  int32_t head_tiles;         // blocks of a group
  int32_t slots;              // of a block
  uint32_t block_reciprocal;  // 2^32 / block_tokens, rounded up: e / block_tokens by one multiply
};

// Lists that may be the first or second of two: their pieces have kMlaPieceTiles.
inline constexpr int64_t kMlaMostOfTwo = int64_t{kMlaMaxPieces} * kMlaPieceTiles * kMlaTileEntries;

// Pieces of a row whose lists have up to `capacity` entries together.
constexpr int MlaPieces(int64_t capacity, bool two) {
  const int64_t piece = kMlaPieceTiles * kMlaTileEntries;
  const int64_t pieces = (capacity + piece - 1) / piece;
  return (pieces < kMlaMaxPieces ? static_cast<int>(pieces) : kMlaMaxPieces) + (two ? 1 : 0);
}
// Slots of a block for such rows: none where all are one piece.
constexpr int MlaSlots(int64_t capacity, bool two) {
  const int pieces = MlaPieces(capacity, two);
  return pieces <= 1 ? 0 : pieces - 1 + (two ? 2 : 1);
}

// What the end of a piece takes, in tiles; shares are worked out with it.
inline constexpr int kMlaPieceEnd = 2;

// A row in tiles and pieces: those of its first list, if it has two, then those of the other one.
struct MlaCut {
  int piece_tiles;   // of each piece but a list's last
  int first_pieces;  // of the first of two lists
  int pieces;        // of both, at least 1
  int weight;        // in tiles, pieces but the last as whole ones, ends of pieces included

  __device__ MlaCut(int first_count, int count) {
    const int first = TilesOf(first_count), tiles = TilesOf(count);
    piece_tiles = max(kMlaPieceTiles, (tiles + kMlaMaxPieces - 1) / kMlaMaxPieces);
    first_pieces = (first + piece_tiles - 1) / piece_tiles;
    pieces = max(1, first_pieces + (tiles + piece_tiles - 1) / piece_tiles);
    const int last = tiles > 0 ? tiles - (pieces - first_pieces - 1) * piece_tiles
                               : first - max(first_pieces - 1, 0) * piece_tiles;
    weight = (pieces - 1) * stride() + last + kMlaPieceEnd;
  }
  __device__ int stride() const { return piece_tiles + kMlaPieceEnd; }

 private:
  static __device__ int TilesOf(int entries) {
    return (entries + kMlaTileEntries - 1) / kMlaTileEntries;
  }
};

// Where a walk is.
struct MlaPosition {
  int share = 1;
  int row = 0, slot = -1;
  int first_count = 0, count = 0;  // entries of the first of two lists, and of the other
  int first_pieces = 0, pieces = 1, piece_tiles = 0;  // of the row
  int piece = 0, first_piece = 0;
  int row_begin = 0, row_end = 0;  // tiles
  int at = 0, end = 0;             // tiles: where the piece begins, where the group ends
  int next_slot = -1, next_first_count = 0, next_count = 0;
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
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // A line of 32 rows each, all on their way at once.
    for (int row = 32 * lane; row < p_.rows; row += 32 * 32) FetchRow(row);
    int64_t begin = 0;
    int total = 0, smallest = 1 << 30, largest = 1, before = 0;
    bool whole = true;  // All weights are multiples of the row's piece.
    // All rows for the share, then once more up to the group's first one: one loop, as code that
    // runs once is fetched from far away.
    bool counts = true, found = false;
#pragma unroll 1
    for (int first = 0; !found; first += 32) {
      const bool in = first + lane < p_.rows;
      const MlaCut cut = CutOf(min(first + lane, p_.rows - 1));
      const int weight = in ? cut.weight : 0;
      if (counts) {
        total += weight;
        if (in) {
          const int piece = min(cut.weight, cut.stride());
          largest = max(largest, piece);
          smallest = min(smallest, piece);
          whole = whole && (cut.weight == piece || cut.weight % piece == 0);
        }
        if (first + 32 < p_.rows) continue;
        total = __reduce_add_sync(0xffffffffu, total);
        largest = __reduce_max_sync(0xffffffffu, largest);
        smallest = __reduce_min_sync(0xffffffffu, smallest);
        // A group that begins inside a row has that row's next piece, if there is one.
        at_.share = max((total + groups - 1) / groups, largest);
        if (smallest == largest && __all_sync(0xffffffffu, whole)) {
          at_.share = (at_.share + largest - 1) / largest * largest;
        }
        begin = int64_t{at_.share} * group;
        if (begin >= total) {
          at_.at = at_.end = 0;
          return;
        }
        at_.end = static_cast<int>(min(begin + at_.share, int64_t{total}));
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
      at_.row = first + at;
      // What lies before that row, or before the next 32.
      before += __shfl_sync(0xffffffffu, through - (found ? weight : 0), min(at, 31));
    }
    at_.row_begin = before;
    LoadNext(at_.row);
    EnterRow();
    at_.piece = at_.first_piece = (static_cast<int>(begin) - before + stride() - 1) / stride();
    at_.at = before + at_.piece * stride();
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
  __device__ bool EndsRow() const { return IsLast() || at_.at + stride() >= at_.end; }
  // Whether the piece is of the first, or of the second of two lists.
  __device__ bool IsOfFirst() const { return at_.piece < at_.first_pieces; }
  __device__ bool IsOfSecond() const { return p_.then_counts != nullptr && !IsOfFirst(); }
  // The piece's entries of its list.
  __device__ int begin_entry() const {
    const int before = IsOfFirst() ? 0 : at_.first_pieces;
    return (at_.piece - before) * at_.piece_tiles * kMlaTileEntries;
  }
  __device__ int entries() const {
    const int count = IsOfFirst() ? at_.first_count : at_.count;
    return min(count - begin_entry(), at_.piece_tiles * kMlaTileEntries);
  }
  __device__ int first_pieces() const { return at_.first_pieces; }
  __device__ int pieces() const { return at_.pieces; }

  __device__ void Next() {
    at_.at += stride();
    if (++at_.piece == at_.pieces) NextRow();
  }
  // To the next piece that has entries.
  __device__ void NextFull() {
    do Next();
    while (!done() && entries() == 0);
  }

  // Of the row: the group of piece `piece`, and the first piece of the row that begins in a group.
  __device__ int GroupOf(int piece) const { return (at_.row_begin + piece * stride()) / at_.share; }
  __device__ int FirstPieceIn(int group) const {
    return max(0, (group * at_.share - at_.row_begin + stride() - 1) / stride());
  }

 private:
  __device__ int stride() const { return at_.piece_tiles + kMlaPieceEnd; }
  __device__ MlaCut CutOf(int row) const {
    const bool two = p_.then_counts != nullptr;
    const int slot = p_.slots[row], loaded = p_.counts[row], then = two ? p_.then_counts[row] : 0;
    const int count = slot < 0 ? 0 : ListLength(p_, loaded);
    return two ? MlaCut(count, slot < 0 ? 0 : ListLength(p_, then)) : MlaCut(0, count);
  }
  __device__ void FetchRow(int row) const {
    for (const int32_t* const of : {p_.slots, p_.counts, p_.then_counts}) {
      if (of != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(of + row));
    }
  }
  // One row ahead, so that nobody waits for a length between two rows.
  __device__ void LoadNext(int row) {
    const bool in = row < p_.rows;
    at_.next_slot = in ? p_.slots[row] : -1;
    at_.next_count = in ? p_.counts[row] : 0;
    if (p_.then_counts == nullptr) return;
    at_.next_first_count = at_.next_count;
    at_.next_count = in ? p_.then_counts[row] : 0;
  }
  __device__ void EnterRow() {
    at_.slot = at_.next_slot;
    at_.first_count = at_.slot < 0 ? 0 : ListLength(p_, at_.next_first_count);
    at_.count = at_.slot < 0 ? 0 : ListLength(p_, at_.next_count);
    const MlaCut cut(at_.first_count, at_.count);
    at_.first_pieces = cut.first_pieces;
    at_.pieces = cut.pieces;
    at_.piece_tiles = cut.piece_tiles;
    at_.row_end = at_.row_begin + cut.weight;
    LoadNext(at_.row + 1);
  }
  __device__ void NextRow() {
    at_.at = at_.row_begin = at_.row_end;
    ++at_.row;
    at_.piece = at_.first_piece = 0;
    EnterRow();
  }

  const SparseMlaParams& p_;
  MlaPosition at_;
};

}  // namespace sluice::kernels::cuda
