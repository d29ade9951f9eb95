// The order in which a group of blocks computes its pieces of lists (mla_plan.cuh defines them):
// plain arithmetic, for the device and for tests on the host.
#pragma once

#include <cuda_runtime.h>

#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

inline constexpr int kMlaTileEntries = 64;
inline constexpr int kMlaMaxPieces = 8;
inline constexpr int kMlaPieceTiles = 2 * kMlaSplitEntries / kMlaTileEntries;
// Number of rows whose first lists' totals a group keeps before it begins their second lists.
inline constexpr int kMlaWindow = 3;

__host__ __device__ constexpr int Larger(int a, int b) { return a > b ? a : b; }

// Returns the entries of a list whose count is `count`.
__host__ __device__ inline int ListLength(const SparseMlaParams& p, int count) {
  if (count <= 0) return 0;
  return count < p.capacity ? count : static_cast<int>(p.capacity);
}

// Cost of a piece's end, in tiles. Shares are computed with it.
inline constexpr int kMlaPieceEnd = 2;

// A row in tiles and pieces: those of its first list, if it has two, then those of the other one.
struct MlaCut {
  int piece_tiles;   // tiles of each piece but a list's last
  int first_pieces;  // pieces of the first of two lists
  int pieces;        // pieces of both lists, at least 1
  // in tiles; all pieces but the last count as whole ones, and the ends of pieces are included
  int weight;

  __host__ __device__ MlaCut(int first_count, int count) {
    const int first = TilesOf(first_count), tiles = TilesOf(count);
    piece_tiles = Larger(kMlaPieceTiles, (tiles + kMlaMaxPieces - 1) / kMlaMaxPieces);
    first_pieces = (first + piece_tiles - 1) / piece_tiles;
    pieces = Larger(1, first_pieces + (tiles + piece_tiles - 1) / piece_tiles);
    const int last = tiles > 0 ? tiles - (pieces - first_pieces - 1) * piece_tiles
                               : first - Larger(first_pieces - 1, 0) * piece_tiles;
    weight = (pieces - 1) * stride() + last + kMlaPieceEnd;
  }
  __host__ __device__ int stride() const { return piece_tiles + kMlaPieceEnd; }

 private:
  static __host__ __device__ int TilesOf(int entries) {
    return (entries + kMlaTileEntries - 1) / kMlaTileEntries;
  }
};

// The position of a walk.
struct MlaPosition {
  int share = 1;
  int row = 0, slot = -1;
  int first_count = 0, count = 0;  // entries of the first of two lists, and of the other
  int first_pieces = 0, pieces = 1, piece_tiles = 0;  // pieces of the row
  int piece = 0, first_piece = 0;
  int row_begin = 0, row_end = 0;  // first and past-the-last tile of the row
  int at = 0, end = 0;             // tiles at which the piece begins and the group ends
  int next_slot = -1, next_first_count = 0, next_count = 0;
  // State for rows of two lists: the window's first row, its first tile and its first piece in
  // this group; and whether the walk is at second lists.
  int window = 0, window_begin = 0, window_piece = 0;
  bool then = false;
};

// The pieces of a group, in order.
class MlaWalk {
 public:
  // REQUIRES: p has rows.
  __host__ __device__ explicit MlaWalk(const SparseMlaParams& p) : p_(p) {}
  __host__ __device__ MlaWalk(const SparseMlaParams& p, const MlaPosition& at) : p_(p), at_(at) {}
  __host__ __device__ const MlaPosition& position() const { return at_; }

  // Moves to the first piece that begins at tile `begin` of all rows or behind it, in the order
  // of rows, for a group that has `share` tiles up to `end`. `row` is the row that has that tile,
  // and `row_begin` its first tile.
  __host__ __device__ void Enter(int share, int begin, int end, int row, int row_begin) {
    at_.share = share;
    at_.end = end;
    at_.row = row;
    at_.row_begin = row_begin;
    LoadNext(row);
    EnterRow();
    at_.piece = at_.first_piece = (begin - row_begin + stride() - 1) / stride();
    at_.at = row_begin + at_.piece * stride();
    if (at_.piece == at_.pieces) NextRow();
  }
  // Moves from there to the first piece of the group in the order in which it computes them,
  // which is Next()'s.
  __host__ __device__ void Settle() {
    if (p_.then_counts == nullptr || done()) return;
    BeginWindow();
    FindPiece();
  }

  __host__ __device__ bool done() const { return at_.at >= at_.end; }
  // REQUIRES for all methods below: !done().
  __host__ __device__ int row() const { return at_.row; }
  __host__ __device__ int slot() const { return at_.slot; }
  __host__ __device__ int piece() const { return at_.piece; }
  // Returns the first piece of the row in this group.
  __host__ __device__ int first_piece() const { return at_.first_piece; }
  __host__ __device__ bool IsLast() const { return at_.piece + 1 == at_.pieces; }
  // Returns true if the piece is of the first list; false if it is of the second of two.
  __host__ __device__ bool IsOfFirst() const { return at_.piece < at_.first_pieces; }
  __host__ __device__ bool IsOfSecond() const { return p_.then_counts != nullptr && !IsOfFirst(); }
  // Return the range of the piece's entries in its list.
  __host__ __device__ int begin_entry() const {
    const int before = IsOfFirst() ? 0 : at_.first_pieces;
    return (at_.piece - before) * at_.piece_tiles * kMlaTileEntries;
  }
  __host__ __device__ int entries() const {
    const int count = IsOfFirst() ? at_.first_count : at_.count;
    const int most = at_.piece_tiles * kMlaTileEntries, left = count - begin_entry();
    return left < most ? left : most;
  }
  __host__ __device__ int first_pieces() const { return at_.first_pieces; }
  __host__ __device__ int pieces() const { return at_.pieces; }

  __host__ __device__ void Next() {
    at_.at += stride();
    ++at_.piece;
    if (p_.then_counts != nullptr) {
      FindPiece();
    } else if (at_.piece == at_.pieces) {
      NextRow();
    }
  }
  // Moves to the next piece that has entries.
  __host__ __device__ void NextFull() {
    do Next();
    while (!done() && entries() == 0);
  }

  // Returns how a row is cut.
  __host__ __device__ MlaCut CutOf(int row) const {
    const bool two = p_.then_counts != nullptr;
    const int slot = p_.slots[row], loaded = p_.counts[row], then = two ? p_.then_counts[row] : 0;
    const int count = slot < 0 ? 0 : ListLength(p_, loaded);
    return two ? MlaCut(count, slot < 0 ? 0 : ListLength(p_, then)) : MlaCut(0, count);
  }

  // Return, for the row, the group of piece `piece`, and the first piece of the row that begins
  // in a group.
  __host__ __device__ int GroupOf(int piece) const {
    return (at_.row_begin + piece * stride()) / at_.share;
  }
  __host__ __device__ int FirstPieceIn(int group) const {
    return Larger(0, (group * at_.share - at_.row_begin + stride() - 1) / stride());
  }

 private:
  __host__ __device__ int stride() const { return at_.piece_tiles + kMlaPieceEnd; }
  // Loads the length of the next row one row ahead, so that nobody waits for a length between two
  // rows.
  __host__ __device__ void LoadNext(int row) {
    const bool in = row < p_.rows;
    at_.next_slot = in ? p_.slots[row] : -1;
    at_.next_count = in ? p_.counts[row] : 0;
    if (p_.then_counts == nullptr) return;
    at_.next_first_count = at_.next_count;
    at_.next_count = in ? p_.then_counts[row] : 0;
  }
  __host__ __device__ void EnterRow() {
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
  __host__ __device__ void NextRow() {
    at_.at = at_.row_begin = at_.row_end;
    ++at_.row;
    at_.piece = at_.first_piece = 0;
    EnterRow();
  }
  __host__ __device__ void BeginWindow() {
    at_.window = at_.row;
    at_.window_begin = at_.row_begin;
    at_.window_piece = at_.piece;
    at_.then = false;
  }
  // Used with two lists. Moves to the next piece from here on whose turn it is, or past the end.
  __host__ __device__ void FindPiece() {
    while (true) {
      if (at_.then && at_.piece < at_.first_pieces) {
        at_.piece = at_.first_pieces;
        at_.at = at_.row_begin + at_.piece * stride();
      }
      const int end = at_.then ? at_.pieces : at_.first_pieces;
      if (at_.piece < end && at_.at < at_.end) return;
      // The row's pieces in this turn are done.
      const bool more = at_.row_end < at_.end;  // the next row belongs to the group too
      if (more && at_.row + 1 < at_.window + kMlaWindow) {
        NextRow();
      } else if (!at_.then) {
        at_.row = at_.window;
        at_.row_begin = at_.window_begin;
        LoadNext(at_.row);
        EnterRow();
        at_.piece = at_.first_piece = at_.window_piece;
        at_.at = at_.row_begin + at_.piece * stride();
        at_.then = true;
      } else if (more) {
        NextRow();
        BeginWindow();
      } else {
        at_.at = at_.end;
        return;
      }
    }
  }

  const SparseMlaParams& p_;
  MlaPosition at_;
};

}  // namespace sluice::kernels::cuda
