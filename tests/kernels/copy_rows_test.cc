#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

struct Piece {
  int32_t rows, row_bytes;
  int64_t source_pitch, target_pitch, misalignment;
  bool indexed;
};

// Pieces of every size and alignment. Memory that no piece names must stay as it was.
void TestCopyRows(const KernelTable& table, Random& random) {
  const std::vector<std::vector<Piece>> cases = {
      {},
      {{0, 64, 64, 64, 0, false}},
      {{1, 4, 4, 4, 0, false}, {10, 40, 40, 40, 4, false}},
      {{10, 20480, 28672, 20480, 0, false}, {1, 20480, 0, 0, 0, false}},
      {{10, 20480, 20480, 20480, 0, true}, {10, 160, 160, 160, 0, true}},
      {{3, 5000, 5004, 5000, 8, true}, {7, 2052, 2052, 4096, 12, true}},
      {{1, 4, 4, 4, 0, false},
       {64, 4, 4, 4, 0, false},
       {64, 4, 4, 4, 4, false},
       {64, 2048, 6144, 2048, 0, false},
       {1, 2048, 0, 0, 0, false},
       {1, 262144, 0, 0, 0, false}}};
  for (const std::vector<Piece>& pieces : cases) {
    CopyRowsParams p{};
    std::vector<Guarded<unsigned char>> sources, targets, wants;
    std::vector<Guarded<int32_t>> rows, words;
    for (const Piece& c : pieces) {
      const int64_t rows_there = std::max(2 * c.rows, 1);
      sources.emplace_back(c.misalignment + rows_there * c.source_pitch + c.row_bytes);
      for (unsigned char& byte : sources.back()) byte = static_cast<unsigned char>(random());
      targets.emplace_back(c.misalignment + c.rows * c.target_pitch + c.row_bytes);
      wants.emplace_back(targets.back().size());
      rows.emplace_back(c.rows);
      for (int32_t& row : rows.back()) {
        row = random() % 5 == 0 ? -1 : static_cast<int32_t>(random() % uint64_t(rows_there));
      }
      words.emplace_back(c.rows);
      for (int32_t& of_row : words.back()) {
        of_row = static_cast<int32_t>(random() % static_cast<uint64_t>(c.row_bytes / 4 + 2));
      }
      const bool counts = random() % 2 == 0;
      for (int64_t r = 0; r < c.rows; ++r) {
        const int64_t from = c.indexed ? rows.back()[r] : r;
        if (from < 0) continue;
        std::memcpy(
            wants.back().data() + c.misalignment + r * c.target_pitch,
            sources.back().data() + c.misalignment + from * c.source_pitch,
            static_cast<size_t>(counts ? std::min(c.row_bytes, 4 * words.back()[r]) : c.row_bytes));
      }
      p.pieces[p.count++] = {sources.back().data() + c.misalignment,
                             targets.back().data() + c.misalignment,
                             c.source_pitch,
                             c.target_pitch,
                             c.indexed ? rows.back().data() : nullptr,
                             c.rows,
                             c.row_bytes,
                             counts ? words.back().data() : nullptr};
    }
    RunThreads(table.copy_rows, p, 3);
    for (size_t i = 0; i < pieces.size(); ++i) {
      INFO("piece " << i << " of " << pieces.size() << ": " << pieces[i].rows << " rows of "
                    << pieces[i].row_bytes << " bytes");
      CHECK(targets[i].Damage() == "");
      CHECK(std::memcmp(targets[i].data(), wants[i].data(),
                        static_cast<size_t>(targets[i].size())) == 0);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("copy_rows copies the rows of every piece and nothing else", TestCopyRows)
TEST_CASE("copy_rows copies the rows of every piece and nothing else (reference)", "[kernels]") {
  OnPath("reference", TestCopyRows);
}

}  // namespace
}  // namespace sluice::kernels
