// The order in which groups of blocks compute pieces of two lists, on the host: no GPU is needed.
#include "kernels/cuda/mla/mla_walk.cuh"

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels::cuda {
namespace {

using Piece = std::pair<int, int>;  // row and number

// Lengths of the lists of random rows, many alike, many empty.
struct Rows {
  explicit Rows(Random& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    const int rows = 1 + below(below(3) == 0 ? 200 : 12), kind = below(4);
    for (int r = 0; r < rows; ++r) {
      slots.push_back(below(9) == 0 ? -1 : r);
      first.push_back(kind == 0 ? 1800 : below(4) == 0 ? 0 : below(1500));
      then.push_back(kind == 0 ? 200 : below(3) == 0 ? 0 : below(2049 - first.back()));
      if (kind == 1) first.back() /= 30, then.back() /= 30;
    }
    params.slots = slots.data();
    params.counts = first.data();
    params.then_counts = then.data();
    params.capacity = 2048;
    params.rows = rows;
    const MlaWalk walk(params);
    begins = {0};
    for (int r = 0; r < rows; ++r) {
      cuts.push_back(walk.CutOf(r));
      begins.push_back(begins.back() + cuts.back().weight);
      largest = std::max(largest, std::min(cuts.back().weight, cuts.back().stride()));
    }
  }

  bool IsOfFirst(Piece piece) const {
    return piece.second < cuts[static_cast<size_t>(piece.first)].first_pieces;
  }

  std::vector<int32_t> slots, first, then;
  std::vector<MlaCut> cuts;
  std::vector<int> begins;  // first tile of each row, and the end of all
  int largest = 1;          // largest piece, in tiles
  SparseMlaParams params{};
};

// Returns the pieces that a group with `share` tiles from `begin` on computes, in its order.
std::vector<Piece> PiecesOf(const Rows& rows, int share, int begin) {
  int row = 0;
  while (rows.begins[static_cast<size_t>(row) + 1] <= begin) ++row;
  MlaWalk walk(rows.params);
  walk.Enter(share, begin, std::min(begin + share, rows.begins.back()), row,
             rows.begins[static_cast<size_t>(row)]);
  walk.Settle();
  std::vector<Piece> pieces;
  for (; !walk.done(); walk.Next()) {
    const Piece piece = {walk.row(), walk.piece()};
    const auto r = static_cast<size_t>(walk.row());
    const int length = rows.slots[r] < 0 ? 0 : walk.IsOfFirst() ? rows.first[r] : rows.then[r];
    pieces.push_back(piece);
    const bool is_right = walk.IsOfFirst() == rows.IsOfFirst(piece) &&
                          walk.slot() == rows.slots[r] && walk.entries() >= 0 &&
                          walk.begin_entry() + walk.entries() <= length && pieces.size() < 10000;
    if (!is_right) REQUIRE(is_right);
  }
  return pieces;
}

TEST_CASE("groups of latent attention compute each piece once, first lists first", "[kernels]") {
  Random random(TestSeed());
  for (int round = 0; round < 3000; ++round) {
    const Rows rows(random);
    const int groups = 1 + static_cast<int>(random() % 66);
    const int total = rows.begins.back();
    const int share = std::max((total + groups - 1) / groups, rows.largest);
    for (int begin = 0; begin < total; begin += share) {
      const std::vector<Piece> got = PiecesOf(rows, share, begin);
      std::vector<Piece> want;
      for (size_t r = 0; r < rows.cuts.size(); ++r) {
        for (int piece = 0; piece < rows.cuts[r].pieces; ++piece) {
          const int at = rows.begins[r] + piece * rows.cuts[r].stride();
          if (at >= begin && at < begin + share) want.emplace_back(r, piece);
        }
      }
      std::vector<Piece> sorted = got;
      std::sort(sorted.begin(), sorted.end());
      REQUIRE(sorted == want);
      // In the first window's rows no first list waits for a second one, and the pieces of each
      // row are in order.
      std::vector<int> newest(rows.cuts.size(), -1);
      bool are_second = false, waits = false, in_order = true;
      for (const Piece& piece : got) {
        are_second = are_second || !rows.IsOfFirst(piece);
        const bool in_window = piece.first < want[0].first + kMlaWindow;
        waits = waits || (are_second && in_window && rows.IsOfFirst(piece));
        int& before = newest[static_cast<size_t>(piece.first)];
        in_order = in_order && before < piece.second;
        before = piece.second;
      }
      REQUIRE_FALSE(waits);
      REQUIRE(in_order);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cuda
