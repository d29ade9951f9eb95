// Scores of units from all of their keys, for the oracle. The kernel reads every key of a row
// once (twice for sums of softmax), over the link if the cache is the home. The oracle has no
// floor to hold it against.
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {
namespace {

// A head's score of a unit: the log-sum-exp of its tokens' scores, in their order.
template <typename T>
struct KeysOfUnits {
  using Params = ExactScoresParams;
  const Params& p;
  int row, kv_head, slot, tokens;

  static __host__ __device__ int RowDim(const Params& p) { return p.cache.head_dim; }
  static __host__ __device__ int KvHeads(const Params& p) { return p.cache.kv_heads; }
  __device__ KeysOfUnits(const Params& params, int of_row, int head)
      : p(params),
        row(of_row),
        kv_head(head),
        slot(p.slots[row]),
        tokens(slot < 0 ? 0 : p.positions[row] + 1) {}

  __device__ int Units() const {
    return slot < 0 ? -1 : (tokens + p.unit_tokens - 1) / p.unit_tokens;
  }
  __device__ static int UnitAt(int i) { return i; }
  __device__ void PutQuery(int head, float* to) const {
    const int dim = p.cache.head_dim, group = p.heads / p.cache.kv_heads;
    const float* q = p.q + row * p.q_stride + (kv_head * group + head) * dim;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32 * kScoreWarps) {
      to[d] = q[d] * p.scale;
    }
  }
  __device__ float Score(const float* queries, int count, int unit) const {
    const PagedCache& c = p.cache;
    RunningSum sum = RunningSum::Empty();
    const int end = min((unit + 1) * p.unit_tokens, tokens);
    for (int token = unit * p.unit_tokens; token < end; ++token) {
      const int block = token / c.block_tokens;
      const T* key = BlockKeys<T>(c, slot, block, kv_head) +
                     int64_t{token - block * c.block_tokens} * c.head_dim;
      sum.Add(Dots(queries, count, key, c.head_dim));
    }
    return sum.LogSumExp();
  }
  __device__ void Finish(float*) const {}
};

}  // namespace

cudaError_t LaunchExactScores(const ExactScoresParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (!HasAlignedKeys(p.cache) || p.cache.ring_blocks > 0) return cudaErrorInvalidValue;
  return p.cache.type == DType::kFloat32 ? LaunchGroupScores<KeysOfUnits<float>>(p, stream)
                                         : LaunchGroupScores<KeysOfUnits<__nv_bfloat16>>(p, stream);
}

}  // namespace sluice::kernels::cuda
