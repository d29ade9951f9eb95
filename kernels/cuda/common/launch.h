// The operators on an NVIDIA GPU. Each function enqueues one operator on a stream and returns at
// once, and can be captured in a graph. The contracts are in kernels/params.h and its neighbours.
// Weights are row-major bf16, or e4m3 with scales of blocks (kFp8Blocks); activations that feed a
// product are bf16. Each function returns the launch's status, or cudaErrorInvalidValue for a
// shape outside the contract or the limits below. Pointers are device addresses, which include
// pinned host memory.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/bring_params.h"
#include "kernels/draft_params.h"
#include "kernels/fluxion_params.h"
#include "kernels/hash_params.h"
#include "kernels/latent_params.h"
#include "kernels/params.h"
#include "kernels/pull_params.h"
#include "kernels/ring_params.h"
#include "kernels/sparse_params.h"
#include "kernels/weight_formula.h"

namespace sluice::kernels::cuda {

// Limits of these operators beyond those of the contract.
inline constexpr int32_t kMaxNormDim = 16384;      // RmsNormParams::dim
inline constexpr int32_t kMaxVocabulary = 390000;  // SampleParams::vocab
inline constexpr int32_t kBlockTokensStep = 16;    // PagedCache::block_tokens is a multiple of it
// ResidencyTable::count - ring, in Recall and in Bring
inline constexpr int32_t kMaxRecallPlaces = 16384;
inline constexpr int32_t kMaxBringPlaces = 65536;

// Writes out[i] = element i of the formula, as bf16 or as e4m3, for i in [0, count). The bits are
// those of FillWeights.
cudaError_t LaunchFillWeights(const WeightFormula& formula, int64_t count, uint16_t* out,
                              cudaStream_t stream);
cudaError_t LaunchFillWeights(const WeightFormula& formula, int64_t count, uint8_t* out,
                              cudaStream_t stream);

// Reorders `count` weights in place from kFp8Blocks to kFp8Pairs (kernels/fp8_pairs.h). They are
// whole rows whose k is a multiple of 16. Returns cudaErrorInvalidValue if the address `weights`
// or `count` is not a multiple of 16.
cudaError_t LaunchPairWeights(int64_t count, uint8_t* weights, cudaStream_t stream);

cudaError_t LaunchEmbedding(const EmbeddingParams& params, cudaStream_t stream);
cudaError_t LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t LaunchLinear(const LinearParams& params, cudaStream_t stream);
// Returns true if LaunchLinear can compute prompt rows, that is if libcublasLt was found.
bool HasPromptProducts();
cudaError_t LaunchRopeTable(const RopeTableParams& params, cudaStream_t stream);
cudaError_t LaunchRopeAppend(const RopeAppendParams& params, cudaStream_t stream);
cudaError_t LaunchAttention(const AttentionParams& params, cudaStream_t stream);
// Returns the bytes of AttentionParams::partial with which LaunchAttention spreads the contexts
// of up to `max_decode_rows` decode rows, of up to `max_context` tokens each and up to
// `sequence_rows` of one sequence, evenly over the current device. The result is a multiple of the
// bytes of one partial row. With less scratch, each (row, KV head) stays on one SM: the bits are
// the same, but few or uneven rows are slower.
int64_t AttentionScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t kv_heads,
                              int32_t head_dim, int32_t max_context, int32_t sequence_rows);
cudaError_t LaunchMerge(const MergeParams& params, cudaStream_t stream);
cudaError_t LaunchSiluMul(const SiluMulParams& params, cudaStream_t stream);
cudaError_t LaunchSample(const SampleParams& params, cudaStream_t stream);
cudaError_t LaunchTransfer(const TransferParams& params, cudaStream_t stream);
cudaError_t LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream);
cudaError_t LaunchTakeRing(const TakeRingParams& params, cudaStream_t stream);

// Sparse attention (kernels/sparse_params.h, kernels/hash_params.h). The home (host KV cache) is
// pinned memory, read and written over the link; everything else lies in HBM.
cudaError_t LaunchDigest(const DigestParams& params, cudaStream_t stream);
cudaError_t LaunchDigestScores(const DigestScoresParams& params, cudaStream_t stream);
cudaError_t LaunchRefineScores(const RefineScoresParams& params, cudaStream_t stream);
cudaError_t LaunchExactScores(const ExactScoresParams& params, cudaStream_t stream);
cudaError_t LaunchPartialKeys(const PartialKeysParams& params, cudaStream_t stream);
cudaError_t LaunchPartialScores(const PartialScoresParams& params, cudaStream_t stream);
cudaError_t LaunchKeyCentres(const KeyCentresParams& params, cudaStream_t stream);
cudaError_t LaunchHashKeys(const HashKeysParams& params, cudaStream_t stream);
cudaError_t LaunchHashQueries(const HashQueriesParams& params, cudaStream_t stream);
cudaError_t LaunchHashScores(const HashScoresParams& params, cudaStream_t stream);
cudaError_t LaunchLabelLookup(const LabelLookupParams& params, cudaStream_t stream);
cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream);
cudaError_t LaunchSplit(const SplitParams& params, cudaStream_t stream);
cudaError_t LaunchRecallDue(const RecallDueParams& params, cudaStream_t stream);
cudaError_t LaunchRecall(const RecallParams& params, cudaStream_t stream);
cudaError_t LaunchBring(const BringParams& params, cudaStream_t stream);
cudaError_t LaunchRetain(const RetainParams& params, cudaStream_t stream);
cudaError_t LaunchWriteThrough(const WriteThroughParams& params, cudaStream_t stream);
cudaError_t LaunchSparseAttention(const SparseAttentionParams& params, cudaStream_t stream);
cudaError_t LaunchMovingAverage(const MovingAverageParams& params, cudaStream_t stream);

// Latent attention and experts (kernels/latent_params.h).
cudaError_t LaunchLevelDigests(const LevelDigestsParams& params, cudaStream_t stream);
cudaError_t LaunchAnchorStatistics(const AnchorStatisticsParams& params, cudaStream_t stream);
cudaError_t LaunchPredictBudgets(const PredictBudgetsParams& params, cudaStream_t stream);
cudaError_t LaunchPlanRetrieval(const PlanRetrievalParams& params, cudaStream_t stream);
cudaError_t LaunchLevelScores(const LevelScoresParams& params, cudaStream_t stream);
cudaError_t LaunchSelectUnion(const SelectUnionParams& params, cudaStream_t stream);
cudaError_t LaunchSegmentLists(const SegmentListsParams& params, cudaStream_t stream);
cudaError_t LaunchDivideLists(const DivideListsParams& params, cudaStream_t stream);
cudaError_t LaunchPullAttention(const PullAttentionParams& params, cudaStream_t stream);
cudaError_t LaunchMergeParts(const MergePartsParams& params, cudaStream_t stream);
cudaError_t LaunchLatentAppend(const LatentAppendParams& params, cudaStream_t stream);
cudaError_t LaunchIndexAppend(const IndexAppendParams& params, cudaStream_t stream);
cudaError_t LaunchIndexQuery(const IndexQueryParams& params, cudaStream_t stream);
cudaError_t LaunchIndexLogits(const IndexLogitsParams& params, cudaStream_t stream);
cudaError_t LaunchMlaQuery(const MlaQueryParams& params, cudaStream_t stream);
cudaError_t LaunchHeadLinear(const HeadLinearParams& params, cudaStream_t stream);
cudaError_t LaunchSparseMla(const SparseMlaParams& params, cudaStream_t stream);
cudaError_t LaunchUpdateResidency(const UpdateResidencyParams& params, cudaStream_t stream);
cudaError_t LaunchTakeBackResidency(const TakeBackResidencyParams& params, cudaStream_t stream);
cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream);
cudaError_t LaunchExpertLinear(const ExpertLinearParams& params, cudaStream_t stream);
cudaError_t LaunchCombine(const CombineParams& params, cudaStream_t stream);
// Speculation on the device (kernels/draft_params.h).
cudaError_t LaunchSettleDrafts(const SettleDraftsParams& params, cudaStream_t stream);
cudaError_t LaunchNewestLists(const NewestListsParams& params, cudaStream_t stream);
// Returns the bytes of SparseMlaParams::scratch with which rows of up to `capacity` entries are
// spread evenly over the device. With less, the bits are the same, but few rows are slower. Lists
// of more than 512 packed entries need at least the scratch of one row.
int64_t SparseMlaScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t rank,
                              int64_t capacity);

// One piece of a batch of copies. Sizes and alignments are arbitrary, and HBM and pinned memory
// may be mixed.
struct CopyPiece {
  void* target;
  const void* source;
  size_t bytes;
};

// Copies all pieces, in no order among them, by a kernel of at most `max_blocks` thread blocks,
// one to a multiprocessor. If max_blocks is 0, the default applies, which fills the link. Use
// this for pieces below some 64 KiB: the copy engine moves larger ones as fast without taking
// multiprocessors (cudaMemcpyBatchAsync). `pieces` lies in pinned memory. It is read during this
// call, for the shape of the launch, and again by the kernel, so it must stay valid until the
// kernel is done.
cudaError_t LaunchCopyBatch(const CopyPiece* pieces, int64_t count, int max_blocks,
                            cudaStream_t stream);

// Reads `bytes` (a multiple of 16, from an address that is a multiple of 16) and does nothing
// else. Its rate is the ceiling for everything that is bound by memory. `sink` is 4 bytes, hardly
// ever written.
cudaError_t LaunchReadProbe(const void* data, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
