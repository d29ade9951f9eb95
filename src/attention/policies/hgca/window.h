// The arithmetic of HGCA's window and of its selection (HGCA, section 3.2, algorithm 1): which
// blocks have left HBM, and which of their tokens the CPU goes on attending to. All functions are
// pure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace sluice {

struct HgcaWindow {
  int64_t block_tokens = 0;  // blk_size
  int64_t blocks = 0;        // blk_num

  int64_t tokens() const { return blocks * block_tokens; }  // l_max

  // Returns the number of (oldest) blocks that leave a window of `size` tokens once `added` tokens
  // have joined it: ceil((l_cur - l_max + 1) / blk_size) (line 11, which prints l_max - l_cur).
  int64_t Evicted(int64_t size, int64_t added) const {
    const int64_t over = size + added - tokens();
    return over < 0 ? 0 : over / block_tokens + 1;
  }
  // Returns the number of blocks outside the window when the row at `position` attends: blocks [0,
  // BlocksOutside). It is the same whether the tokens before it came one by one or at once.
  int64_t BlocksOutside(int64_t position) const { return Evicted(0, position); }
};

// Returns whether a token is salient among `size` entries (lines 20 and 23). beta = 0 takes every
// token, also one whose weight is too small for a float32.
inline bool IsSalient(float average, float beta, int64_t size) {
  return beta == 0 || double{average} > double{beta} / static_cast<double>(size);
}

// Returns the factor for the average of a token whose attention began at 0, `rows` rows ago: 1 / (1
// - (1 - alpha)^rows). No row here had attended to a handed-over token, so its first rows would
// count for too little.
inline float StartCorrection(float alpha, int64_t rows) {
  return static_cast<float>(1 / (1 - std::pow(1 - double{alpha}, static_cast<double>(rows))));
}

}  // namespace sluice
