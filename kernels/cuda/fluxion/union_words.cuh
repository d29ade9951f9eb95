// Selections of blocks as bits in shared memory, a word for 32 blocks: how a head's cut becomes
// bits, and how the bits of all heads become an ascending list of units.
#pragma once

#include "kernels/cuda/select/select.cuh"

namespace sluice::kernels::cuda {

// Sets the bits of the keys that the cut takes. No two warps touch the same word.
template <int kThreads, typename Keys>
__device__ __forceinline__ void MarkTaken(const Keys& keys, const SelectCut& cut, uint32_t* words,
                                          SelectShared& shared) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // Each warp has a run of the keys.
  const int share = (keys.count + kThreads - 1) / kThreads * 32;
  const int first = min(warp * share, keys.count), last = min(first + share, keys.count);
  uint32_t equals = 0;  // keys at the cut that come before
  if (cut.equals > 0) {
    uint32_t mine = 0;
    for (int i = first + lane; i < last; i += 32) mine += keys.At(i) == cut.below ? 1 : 0;
    mine = __reduce_add_sync(kAll, mine);
    if (lane == 0) shared.counts[warp][0] = mine;
    __syncthreads();
    equals = __reduce_add_sync(kAll, lane < warp ? shared.counts[lane][0] : 0);
  }
  const unsigned before = (1u << lane) - 1;
  for (int at = first; at < last; at += 32) {
    const bool is_key = at + lane < last;
    const uint32_t key = is_key ? keys.At(at + lane) : 0;
    const bool is_equal = is_key && key == cut.below;
    const unsigned all_equal = __ballot_sync(kAll, is_equal);
    const uint32_t number = equals + static_cast<uint32_t>(__popc(all_equal & before));
    const bool is_taken = is_equal ? number < cut.equals : is_key && key < cut.below;
    const unsigned all_taken = __ballot_sync(kAll, is_taken);
    if (lane == 0) words[at / 32] |= all_taken;
    equals += static_cast<uint32_t>(__popc(all_equal));
  }
}

// The blocks of a list's cpu segment, and the units that they have. Bit 0 is the first block.
struct UnionBlocks {
  int first;
  int count;
  int units;       // units of a block
  int sink_units;  // units of the first block that are the sink's
};

// Returns which of the 32 blocks of a word there are.
__device__ __forceinline__ uint32_t BlocksOfWord(const UnionBlocks& blocks, int word) {
  const int left = blocks.count - 32 * word;
  return left >= 32 ? 0xFFFFFFFFu : left > 0 ? (1u << left) - 1 : 0;
}

// Writes the units of the blocks whose bits are set to `out`, in order. numbers[w] is how many
// blocks the words before word w have.
template <int kThreads>
__device__ __forceinline__ void WriteUnits(const UnionBlocks& blocks, const uint32_t* words,
                                           const uint32_t* numbers, int32_t* out) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int skipped = (words[0] & 1) != 0 ? blocks.sink_units : 0;
  for (int w = warp; 32 * w < blocks.count; w += kThreads / 32) {
    const uint32_t word = words[w];
    if ((word >> lane & 1) == 0) continue;
    const int block = 32 * w + lane;
    const int number =
        static_cast<int>(numbers[w]) + __popc(word & ((1u << lane) - 1));  // in the list
    int32_t* const to = out + number * blocks.units - skipped;
    for (int u = block == 0 ? skipped : 0; u < blocks.units; ++u) {
      to[u] = (blocks.first + block) * blocks.units + u;
    }
  }
}

}  // namespace sluice::kernels::cuda
