// The operators on an NVIDIA GPU: each function enqueues one operator on a stream and returns at
// once, and can be captured in a graph. Contracts: kernels/params.h and its neighbours; weights are
// row-major bf16, or e4m3 with scales of blocks (kFp8Blocks), activations that feed a product are
// bf16. The result is what the launch said;
// cudaErrorInvalidValue: a shape outside the contract or the limits below. Pointers are device
// addresses (pinned host memory counts).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/latent_params.h"
#include "kernels/params.h"
#include "kernels/sparse_params.h"
#include "kernels/weight_formula.h"

namespace sluice::kernels::cuda {

// Limits of these operators that the contract has not.
inline constexpr int32_t kMaxNormDim = 16384;       // RmsNormParams::dim
inline constexpr int32_t kMaxVocabulary = 390000;   // SampleParams::vocab
inline constexpr int32_t kBlockTokensStep = 16;     // PagedCache::block_tokens is a multiple of it
inline constexpr int32_t kMaxRecallPlaces = 16384;  // ResidencyTable::count - ring, of Recall

// out[i] = element i of the formula, as bf16 or as e4m3, for i in [0, count): the bits of
// FillWeights.
cudaError_t LaunchFillWeights(const WeightFormula& formula, int64_t count, uint16_t* out,
                              cudaStream_t stream);
cudaError_t LaunchFillWeights(const WeightFormula& formula, int64_t count, uint8_t* out,
                              cudaStream_t stream);

// kFp8Blocks to kFp8Pairs (kernels/fp8_pairs.h), in place: `count` weights, whole rows whose k is a
// multiple of 16. cudaErrorInvalidValue: `weights` is no multiple of 16, or `count`.
cudaError_t LaunchPairWeights(int64_t count, uint8_t* weights, cudaStream_t stream);

cudaError_t LaunchEmbedding(const EmbeddingParams& params, cudaStream_t stream);
cudaError_t LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t LaunchLinear(const LinearParams& params, cudaStream_t stream);
// Whether LaunchLinear can compute prompt rows: libcublasLt is there.
bool HasPromptProducts();
cudaError_t LaunchRopeTable(const RopeTableParams& params, cudaStream_t stream);
cudaError_t LaunchRopeAppend(const RopeAppendParams& params, cudaStream_t stream);
cudaError_t LaunchAttention(const AttentionParams& params, cudaStream_t stream);
// Bytes of AttentionParams::partial with which LaunchAttention spreads the contexts of up to
// `max_decode_rows` decode rows, of up to `max_context` tokens, evenly over the current device; a
// multiple of what one of its partial_rows takes. With less, a (row, KV head) stays on one SM: the
// same bits, slower for few or uneven rows.
int64_t AttentionScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t kv_heads,
                              int32_t head_dim, int32_t max_context);
cudaError_t LaunchMerge(const MergeParams& params, cudaStream_t stream);
cudaError_t LaunchSiluMul(const SiluMulParams& params, cudaStream_t stream);
cudaError_t LaunchSample(const SampleParams& params, cudaStream_t stream);
cudaError_t LaunchTransfer(const TransferParams& params, cudaStream_t stream);
cudaError_t LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream);

// Sparse attention (kernels/sparse_params.h). The home is pinned memory, read and written over the
// link; everything else lies in HBM.
cudaError_t LaunchDigest(const DigestParams& params, cudaStream_t stream);
cudaError_t LaunchDigestScores(const DigestScoresParams& params, cudaStream_t stream);
cudaError_t LaunchExactScores(const ExactScoresParams& params, cudaStream_t stream);
cudaError_t LaunchPartialKeys(const PartialKeysParams& params, cudaStream_t stream);
cudaError_t LaunchPartialScores(const PartialScoresParams& params, cudaStream_t stream);
cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream);
cudaError_t LaunchSplit(const SplitParams& params, cudaStream_t stream);
cudaError_t LaunchRecallDue(const RecallDueParams& params, cudaStream_t stream);
cudaError_t LaunchRecall(const RecallParams& params, cudaStream_t stream);
cudaError_t LaunchWriteThrough(const WriteThroughParams& params, cudaStream_t stream);
cudaError_t LaunchSparseAttention(const SparseAttentionParams& params, cudaStream_t stream);
cudaError_t LaunchMovingAverage(const MovingAverageParams& params, cudaStream_t stream);

// Latent attention and experts (kernels/latent_params.h).
cudaError_t LaunchLatentAppend(const LatentAppendParams& params, cudaStream_t stream);
cudaError_t LaunchIndexAppend(const IndexAppendParams& params, cudaStream_t stream);
cudaError_t LaunchIndexQuery(const IndexQueryParams& params, cudaStream_t stream);
cudaError_t LaunchIndexLogits(const IndexLogitsParams& params, cudaStream_t stream);
cudaError_t LaunchMlaQuery(const MlaQueryParams& params, cudaStream_t stream);
cudaError_t LaunchHeadLinear(const HeadLinearParams& params, cudaStream_t stream);
cudaError_t LaunchSparseMla(const SparseMlaParams& params, cudaStream_t stream);
cudaError_t LaunchUpdateResidency(const UpdateResidencyParams& params, cudaStream_t stream);
cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream);
cudaError_t LaunchExpertLinear(const ExpertLinearParams& params, cudaStream_t stream);
cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream);
// Bytes of SparseMlaParams::scratch with which rows of up to `capacity` entries are spread evenly
// over the device; with less, the same bits, slower for few rows. Lists of more than 512 packed
// entries need those of one row at least.
int64_t SparseMlaScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t rank,
                              int64_t capacity);

// One piece of a batch of copies: any sizes and alignments, HBM and pinned memory in any mix.
struct CopyPiece {
  void* target;
  const void* source;
  size_t bytes;
};

// Copies all pieces, in no order among them, by a kernel of at most `max_blocks` thread blocks (one
// to a multiprocessor; 0: the default, which fills the link). For pieces below some 64 KiB: larger
// ones the copy engine moves as fast, and out of everybody's way (cudaMemcpyBatchAsync). `pieces`
// lies in pinned memory: it is read here, for the shape of the launch, and by the kernel, and so
// stays until that is done.
cudaError_t LaunchCopyBatch(const CopyPiece* pieces, int64_t count, int max_blocks,
                            cudaStream_t stream);

// Reads `bytes` (a multiple of 16, from an address that is one) and nothing else: the rate is the
// ceiling of what is bound by memory. `sink`: 4 bytes, hardly ever written.
cudaError_t LaunchReadProbe(const void* data, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
