// Work of very uneven rows as tiles of lists, in order: rows, then KV heads, then a list's tiles.
// Blocks take equal runs of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

// `Tiles`: tiles_of(row), for row < rows: how many each of the row's lists has; 0: padded.
template <typename Tiles>
struct TileWalk {
  Tiles tiles_of;
  int rows, kv_heads;
  int row = 0, kv_head = 0, tile = 0;  // where it is
  int tiles = 0;                       // of the list

  __device__ TileWalk(Tiles tiles_of_row, int row_count, int kv_head_count)
      : tiles_of(tiles_of_row), rows(row_count), kv_heads(kv_head_count) {}

  // Called by whole warps. The number of all tiles.
  __device__ int64_t Count() const {
    int64_t sum = 0;
    for (int r = static_cast<int>(threadIdx.x) % 32; r < rows; r += 32) sum += tiles_of(r);
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    return sum * kv_heads;
  }
  // Goes to tile `index` < Count(). Called by whole warps.
  __device__ void Seek(int64_t index) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int64_t before = 0;
    for (int first = 0;; first += 32) {
      const int64_t mine = first + lane < rows ? int64_t{tiles_of(first + lane)} * kv_heads : 0;
      int64_t through = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += other;
      }
      const unsigned beyond = __ballot_sync(0xffffffffu, before + through > index);
      if (beyond == 0) {
        before += __shfl_sync(0xffffffffu, through, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      row = first + found;
      before += __shfl_sync(0xffffffffu, through - mine, found);
      break;
    }
    tiles = tiles_of(row);
    kv_head = static_cast<int>((index - before) / tiles);
    tile = static_cast<int>((index - before) % tiles);
  }
  __device__ void NextList() {
    tile = 0;
    if (++kv_head < kv_heads) return;
    kv_head = 0;
    tiles = 0;
    while (tiles == 0 && ++row < rows) tiles = tiles_of(row);
  }
};

}  // namespace sluice::kernels::cuda
