// WriteThrough: copies each row's K and V to the sequences' home, which is pinned memory.
//
// Bytes: rows x kv_heads x 2 x head_dim x element size over the link: 41 KB for 10 rows of 8
// heads of 128, a microsecond. The targets are looked up before the kernel that makes the rows is
// done.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/move.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;

// One warp copies one (row, KV head). `words` is the number of words of K, and of V.
__global__ void __launch_bounds__(kWarp* kWarps)
    WriteThroughKernel(const __grid_constant__ WriteThroughParams p, int words) {
  LetNextKernelStart();
  const PagedCache& c = p.home;
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t row = item / c.kv_heads;
  const int head = static_cast<int>(item - row * c.kv_heads);
  const int slot = row < p.rows ? p.slots[row] : -1;
  uint4* key = nullptr;
  if (slot >= 0) {
    const int position = p.positions[row];
    const int block = position / c.block_tokens;
    const int64_t page = c.block_table[slot * c.table_stride + block];
    key = reinterpret_cast<uint4*>(static_cast<char*>(c.base) + page * c.page_bytes) +
          (int64_t{2} * head * c.block_tokens + position - block * c.block_tokens) * words;
  }
  WaitForPriorKernels();
  if (slot < 0) return;
  // A kernel, perhaps the one before, wrote these rows, so the loads must not take LoadOnce's
  // read-only path.
  const uint4* const from = static_cast<const uint4*>(p.written) + item * 2 * words;
  uint4* const value = key + int64_t{c.block_tokens} * words;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < 2 * words; i += kWarp) {
    StoreOnce(i < words ? key + i : value + (i - words), from[i]);
  }
}

}  // namespace

cudaError_t LaunchWriteThrough(const WriteThroughParams& p, cudaStream_t stream) {
  const PagedCache& c = p.home;
  const int64_t bytes = c.head_dim * SizeOf(c.type);
  if (p.rows < 0 || c.kv_heads < 1 || c.block_tokens < 1 || c.ring_blocks != 0 || bytes < 16 ||
      bytes % 16 != 0 || c.page_bytes % 16 != 0 || !AreAligned(16, p.written, c.base)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const int64_t items = int64_t{p.rows} * c.kv_heads;
  return LaunchKernel(WriteThroughKernel,
                      dim3(static_cast<unsigned>((items + kWarps - 1) / kWarps)),
                      dim3(kWarp * kWarps), 0, stream, p, static_cast<int>(bytes / 16));
}

}  // namespace sluice::kernels::cuda
