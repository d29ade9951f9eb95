// A walk over the work of uneven rows as tiles of their lists, in the order rows, then KV heads,
// then the tiles of a list. Blocks take equal runs of tiles, so that long contexts keep the whole
// device busy. Rows may be taken in bundles (row_runs.cuh), which have the tiles of their last row.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/row_runs.cuh"

namespace sluice::kernels::cuda {

// `Tiles` has a method tiles_at(position) that returns how many tiles each list of a row at that
// position has, perhaps none. Padded rows have none. All methods are called by whole warps.
template <typename Tiles, int kBundleRows = 1>
struct TileWalk {
  Tiles tiles_at;
  const int32_t* slots;
  const int32_t* positions;
  int rows, kv_heads;
  int row = 0, kv_head = 0;    // current row and KV head
  int bundle = 1;              // rows of the bundle that begins with `row`
  int slot = 0, position = 0;  // slot of the row, position of its bundle's last row
  int tile = 0, left = 0;  // current tile of the list; tiles left to this block, including this one
  int tiles = 0;           // tiles in the list

  template <typename Params>
  __device__ TileWalk(const Params& p, int of_heads, Tiles tiles)
      : tiles_at(tiles), slots(p.slots), positions(p.positions), rows(p.rows), kv_heads(of_heads) {}

  // Returns one past the last tile of the list that belongs to this block.
  __device__ int Last() const { return min(tiles, tile + left); }

  // Moves to the tile at which this block's share begins.
  __device__ void Start() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t total = 0;  // below 2^32: tiles of a bucket's rows
    for (int first = 0; first < rows; first += 32) {
      total += __reduce_add_sync(0xffffffffu, TilesOfRow(first + lane));
    }
    const auto begin = static_cast<uint32_t>(uint64_t{total} * blockIdx.x / gridDim.x);
    const auto end = static_cast<uint32_t>(uint64_t{total} * (blockIdx.x + 1) / gridDim.x);
    left = static_cast<int>(end - begin);
    if (left == 0) return;
    uint32_t before = 0;
    for (int first = 0;; first += 32) {
      const uint32_t mine = TilesOfRow(first + lane);
      uint32_t through = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += other;
      }
      const unsigned beyond = __ballot_sync(0xffffffffu, before + through > begin);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        row = first + found;
        before += __shfl_sync(0xffffffffu, through - mine, found);
        break;
      }
      before += __shfl_sync(0xffffffffu, through, 31);
    }
    EnterRow();
    kv_head = static_cast<int>(begin - before) / tiles;
    tile = static_cast<int>(begin - before) - kv_head * tiles;
  }
  // Moves to the next list that has tiles. The tiles of this list up to Last() are done.
  // REQUIRES: some tiles are left.
  __device__ void NextList() {
    left -= Last() - tile;
    tile = 0;
    if (++kv_head < kv_heads) return;
    kv_head = 0;
    do {
      ++row;
      EnterRow();
    } while (tiles == 0);
  }

 private:
  __device__ uint32_t TilesOfRow(int r) const {
    if (r >= rows) return 0;
    const int count = BundleAt(r);
    return count == 0 ? 0 : static_cast<uint32_t>(tiles_at(positions[r + count - 1]) * kv_heads);
  }
  __device__ void EnterRow() {
    bundle = BundleAt(row);
    slot = slots[row];
    position = positions[row + max(bundle - 1, 0)];
    tiles = bundle == 0 ? 0 : tiles_at(position);
  }
  __device__ int BundleAt(int r) const {
    if constexpr (kBundleRows == 1) return slots[r] < 0 ? 0 : 1;
    return RowsOfBundle(slots, positions, rows, r, kBundleRows);
  }
};

}  // namespace sluice::kernels::cuda
