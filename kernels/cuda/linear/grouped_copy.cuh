// The threads of a grouped product that fill the rings of W and of x.
#pragma once

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/linear/grouped_tile.cuh"

namespace sluice::kernels::cuda {
namespace {

// The thread that copies W.
template <typename Weights, typename P>
struct WeightCopier {
  Rings<P> rings;
  const CUtensorMap* map;
  TileWork work;
  int row;  // row of the stack
  Place<P::kWeightStages> place{};

  __device__ void Copy(int step) {
    ArriveExpecting(rings.WeightsFull(place.stage), P::kWeightBytes);
    CopyTile(rings.Weights(place.stage), map, (work.first_step + step) * Weights::kDepth, row,
             rings.WeightsFull(place.stage), kEvictFirst);
    place.Advance();
  }

  // Starts the copies that fit in the ring while the kernels before this one still run: W is
  // constant.
  __device__ int CopyEarly() {
    const int early = min(P::kWeightStages, work.steps);
    for (int step = 0; step < early; ++step) Copy(step);
    return early;
  }

  // Copies the rest of a round of all steps. A stage is free at first, and later when its
  // consumers have released it.
  __device__ void CopyFrom(int step) {
    for (; step < work.steps; ++step) {
      WaitBarrier(rings.WeightsEmpty(place.stage), place.parity ^ 1);
      Copy(step);
    }
  }

  // Waits for the early copies: no block ends before its copies.
  __device__ void AwaitEarly(int early) const {
    for (int stage = 0; stage < early; ++stage) WaitBarrier(rings.WeightsFull(stage), 0);
  }
};

// The thread that copies tiles of x if its rows lie in order.
template <typename Weights, typename P, int kRows>
struct RowCopier {
  Rings<P> rings;
  const CUtensorMap* map;
  int first_column;
  Place<P::kRowStages> place{};

  __device__ void Copy(int first_row, int steps) {
    for (int step = 0; step < steps; ++step) {
      WaitBarrier(rings.RowsEmpty(place.stage), place.parity ^ 1);
      const uint32_t full = rings.RowsFull(place.stage);
      ArriveExpecting(full, P::kRowBytes);
#pragma unroll
      for (int tile = 0; tile < P::kRowTiles; ++tile) {
        CopyTile(rings.Rows(place.stage) + tile * P::kRowTileBytes, map,
                 first_column + step * Weights::kDepth + tile * 64, first_row, full, kEvictLast);
      }
      place.Advance();
    }
  }
};

// One of the threads that gather rows of x, 16 bytes at a time: it copies the same piece of every
// kRowsAtOnce-th row. It keeps the start of each of its rows in a register: three warps hardly
// keep up with the products otherwise.
template <typename Weights, typename P, int kRows>
struct RowGatherer {
  static constexpr int kRowsAtOnce = kGatherers / 8;
  static constexpr int kMine = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;

  const GroupedProduct& p;
  Rings<P> rings;
  int32_t* rows;  // rows of y, in shared memory, for the threads that empty the rings
  int first_k;
  int thread;
  Place<P::kRowStages> place{};
  const uint16_t* column = nullptr;  // this thread's piece of the first row of the group
  int32_t starts[kMine];             // start of each row, in pieces from `column` on; -1 for none

  // Takes the rows of a tile from entry `first` of the range on.
  __device__ void Take(const TileWork& work, RowRange range, int first) {
    column = p.x + work.group * p.x_group_stride + first_k + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = thread / 8 + i * kRowsAtOnce;
      const bool exists = row < kRows && first + row < range.count;
      const int y_row = exists ? RowAt(p, range, first + row) : 0;
      starts[i] = exists ? static_cast<int32_t>(y_row / p.pairs_per_row * (p.x_stride / 8)) : -1;
      if (exists && thread % 8 == 0) rows[row] = y_row;
    }
  }

  __device__ void Copy(int steps) {
    // Steps whose copies are not waited for. They are so few that consumers never wait for a
    // stage whose rows have arrived while this thread waits for them to leave another.
    constexpr int kUnderWay = P::kRowStages - 2;
    // index among the 8 pieces of a row of a tile, swizzled over its 128 bytes
    const int piece = thread % 8;
    const int first_row = thread / 8;
    // kRowsAtOnce is an odd multiple of 4, so the swizzle of rows that follow each other changes
    // by 4.
    const uint32_t even = first_row * 128 + (piece ^ (first_row % 8)) * 16;
    const uint32_t odd = even ^ 64;
    Place<P::kRowStages> arrived = place;
    for (int step = 0; step < steps; ++step) {
      WaitBarrier(rings.RowsEmpty(place.stage), place.parity ^ 1);
      const uint32_t stage = rings.Rows(place.stage);
      const int left = p.w.k - (first_k + step * Weights::kDepth + piece * 8);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (starts[i] < 0) continue;
        const uint16_t* const source = column + step * Weights::kDepth + int64_t{starts[i]} * 8;
        const uint32_t target = stage + (i % 2 == 0 ? even : odd) + i * kRowsAtOnce * 128;
#pragma unroll
        for (int tile = 0; tile < P::kRowTiles; ++tile) {
          CopyPiece(target + tile * P::kRowTileBytes, source + tile * 64,
                    tile * 64 < left ? 16 : 0);
        }
      }
      CommitCopies();
      place.Advance();
      if (step >= kUnderWay) {
        AwaitCopies<kUnderWay>();
        Publish(arrived);
      }
    }
    AwaitCopies<0>();
    for (int step = max(steps - kUnderWay, 0); step < steps; ++step) Publish(arrived);
  }

  // Announces that this thread's copies of the stage have arrived, for wgmma too.
  __device__ void Publish(Place<P::kRowStages>& arrived) const {
    PublishToAsyncProxy();
    Arrive(rings.RowsFull(arrived.stage));
    arrived.Advance();
  }
  // Copies 16 bytes, or writes as many zeros without reading `source`.
  __device__ static void CopyPiece(uint32_t target, const uint16_t* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(bytes)
                 : "memory");
  }
  __device__ static void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Returns once at most kPending of this thread's groups of copies are under way.
  template <int kPending>
  __device__ static void AwaitCopies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }
};

}  // namespace
}  // namespace sluice::kernels::cuda
