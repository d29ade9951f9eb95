#include "tests/kernels/cuda/cuda_path.h"

#include <cstdio>
#include <cstdlib>
#include <new>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/experts/exchange.h"

namespace sluice::kernels {
namespace {

bool HasGpu(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return true;
  *why = std::string("this machine has no GPU (") + cudaGetErrorString(error) + ")";
  return false;
}

bool HasGpu() {
  static const bool has = [] {
    std::string why;
    return HasGpu(&why);
  }();
  return has;
}

// Ends the program on an error: nothing that follows on a failed GPU means anything.
void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename Params, cudaError_t (*launch)(const Params&, cudaStream_t)>
void Run(const Params& params, Worker worker) {
  if (worker.index != 0) return;
  Check(launch(params, nullptr), "launch");
  Check(cudaDeviceSynchronize(), "kernel");
}

template <typename Params>
void NoSecondPhase(const Params&, Worker) {}

constexpr KernelTable kTable = {"cuda",
                                DType::kBFloat16,
                                WeightLayout::kRowMajor,
                                &Run<EmbeddingParams, cuda::LaunchEmbedding>,
                                &Run<RmsNormParams, cuda::LaunchRmsNorm>,
                                &Run<LinearParams, cuda::LaunchLinear>,
                                &Run<RopeTableParams, cuda::LaunchRopeTable>,
                                &Run<RopeAppendParams, cuda::LaunchRopeAppend>,
                                &Run<AttentionParams, cuda::LaunchAttention>,
                                &NoSecondPhase<AttentionParams>,
                                &Run<MergeParams, cuda::LaunchMerge>,
                                &Run<SiluMulParams, cuda::LaunchSiluMul>,
                                &Run<SampleParams, cuda::LaunchSample>,
                                &Run<TransferParams, cuda::LaunchTransfer>,
                                &Run<DigestParams, cuda::LaunchDigest>,
                                &Run<DigestScoresParams, cuda::LaunchDigestScores>,
                                &Run<RefineScoresParams, cuda::LaunchRefineScores>,
                                &Run<ExactScoresParams, cuda::LaunchExactScores>,
                                &Run<PartialKeysParams, cuda::LaunchPartialKeys>,
                                &Run<PartialScoresParams, cuda::LaunchPartialScores>,
                                &Run<KeyCentresParams, cuda::LaunchKeyCentres>,
                                &Run<HashKeysParams, cuda::LaunchHashKeys>,
                                &Run<HashQueriesParams, cuda::LaunchHashQueries>,
                                &Run<HashScoresParams, cuda::LaunchHashScores>,
                                &Run<LabelLookupParams, cuda::LaunchLabelLookup>,
                                &Run<TopKParams, cuda::LaunchTopK>,
                                &Run<SplitParams, cuda::LaunchSplit>,
                                &Run<RecallDueParams, cuda::LaunchRecallDue>,
                                &Run<RecallParams, cuda::LaunchRecall>,
                                &Run<BringParams, cuda::LaunchBring>,
                                &Run<RetainParams, cuda::LaunchRetain>,
                                &Run<WriteThroughParams, cuda::LaunchWriteThrough>,
                                &Run<SparseAttentionParams, cuda::LaunchSparseAttention>,
                                &Run<MovingAverageParams, cuda::LaunchMovingAverage>,
                                &Run<CopyRowsParams, cuda::LaunchCopyRows>,
                                &Run<TakeRingParams, cuda::LaunchTakeRing>,
                                &Run<LevelDigestsParams, cuda::LaunchLevelDigests>,
                                &Run<AnchorStatisticsParams, cuda::LaunchAnchorStatistics>,
                                &Run<PredictBudgetsParams, cuda::LaunchPredictBudgets>,
                                &Run<PlanRetrievalParams, cuda::LaunchPlanRetrieval>,
                                &Run<LevelScoresParams, cuda::LaunchLevelScores>,
                                &Run<SelectUnionParams, cuda::LaunchSelectUnion>,
                                &Run<SegmentListsParams, cuda::LaunchSegmentLists>,
                                &Run<DivideListsParams, cuda::LaunchDivideLists>,
                                &Run<PullAttentionParams, cuda::LaunchPullAttention>,
                                &Run<MergePartsParams, cuda::LaunchMergeParts>,
                                &Run<LatentAppendParams, cuda::LaunchLatentAppend>,
                                &Run<IndexAppendParams, cuda::LaunchIndexAppend>,
                                &Run<IndexQueryParams, cuda::LaunchIndexQuery>,
                                &Run<IndexLogitsParams, cuda::LaunchIndexLogits>,
                                &Run<MlaQueryParams, cuda::LaunchMlaQuery>,
                                &Run<HeadLinearParams, cuda::LaunchHeadLinear>,
                                &Run<SparseMlaParams, cuda::LaunchSparseMla>,
                                &NoSecondPhase<SparseMlaParams>,
                                &Run<UpdateResidencyParams, cuda::LaunchUpdateResidency>,
                                &Run<TakeBackResidencyParams, cuda::LaunchTakeBackResidency>,
                                &Run<RouteParams, cuda::LaunchRoute>,
                                &NoSecondPhase<RouteParams>,
                                &Run<ExpertLinearParams, cuda::LaunchExpertLinear>,
                                &Run<CombineParams, cuda::LaunchCombine>,
                                &NoSecondPhase<PackRowsParams>,
                                &Run<PackRowsParams, cuda::LaunchPackRows>,
                                &Run<UnpackRowsParams, cuda::LaunchUnpackRows>,
                                &NoSecondPhase<UnpackRowsParams>,
                                &Run<AddPartsParams, cuda::LaunchAddParts>,
                                &Run<SettleDraftsParams, cuda::LaunchSettleDrafts>,
                                &Run<NewestListsParams, cuda::LaunchNewestLists>};

}  // namespace

const KernelTable* CudaPath(std::string* why) { return HasGpu(why) ? &kTable : nullptr; }

void* AllocateForPaths(size_t bytes) {
  if (!HasGpu()) return ::operator new(bytes, std::align_val_t(64));
  void* data = nullptr;
  Check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return data;
}

void FreeForPaths(void* data) {
  if (HasGpu()) {
    cudaFreeHost(data);
  } else {
    ::operator delete(data, std::align_val_t(64));
  }
}

}  // namespace sluice::kernels
