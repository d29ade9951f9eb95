#include "src/device/cuda/cuda_kernel_set.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/experts/exchange.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/weight_maker.h"

namespace sluice {
namespace {

namespace cuda = kernels::cuda;

// A limit of attention's heads (kernels/cuda/attention/attention.cu).
constexpr int32_t kHeadDimStep = 16;
constexpr int32_t kMaxHeadDim = 256;

absl::Status AtMost(const char* field, int32_t most, int32_t found) {
  if (found <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": the GPU's operators take at most ", most,
                                                 ", found ", found, ": run with --device cpu"));
}

class CudaKernelSet : public KernelSet {
 public:
  explicit CudaKernelSet(DeviceHealth* health) : weight_maker_(health) {}

  const std::string& name() const override { return name_; }
  DType activation_type() const override { return DType::kBFloat16; }
  absl::Status Check(const ModelShape& shape) const override {
    if (shape.block_tokens % cuda::kBlockTokensStep != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("block_tokens: expected a multiple of ", cuda::kBlockTokensStep,
                       " with --device cuda, found ", shape.block_tokens));
    }
    if (shape.head_dim % kHeadDimStep != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("head_dim: the GPU's attention takes multiples of ", kHeadDimStep,
                       ", found ", shape.head_dim, ": run with --device cpu"));
    }
    SLUICE_RETURN_IF_ERROR(AtMost("head_dim", kMaxHeadDim, shape.head_dim));
    SLUICE_RETURN_IF_ERROR(AtMost("hidden_size", cuda::kMaxNormDim, shape.hidden_size));
    return AtMost("vocab_size", cuda::kMaxVocabulary, shape.vocab_size);
  }
  absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) override {
    return weight_maker_.Make(parts, k);
  }
  int64_t WeightBytes(int32_t n, int32_t k) const override { return int64_t{n} * k * 2; }
  int64_t PreparedBytes(absl::Span<const MatrixPart> parts, int32_t k) const override {
    return WeightMaker::Bytes(parts, k);
  }
  int64_t SampleScratchBytes(int32_t) const override { return 0; }
  int64_t AttentionScratchBytes(const AttentionShape& shape) const override {
    return cuda::AttentionScratchBytes(shape.decode_rows, shape.heads, shape.kv_heads,
                                       shape.head_dim, shape.max_context, shape.sequence_rows);
  }

  void Embedding(Stream& s, const kernels::EmbeddingParams& p) override {
    Launch(s, cuda::LaunchEmbedding, p, "embedding");
  }
  void RmsNorm(Stream& s, const kernels::RmsNormParams& p) override {
    Launch(s, cuda::LaunchRmsNorm, p, "RMSNorm");
  }
  void Linear(Stream& s, const kernels::LinearParams& p) override {
    Launch(s, cuda::LaunchLinear, p, "a product");
  }
  void RopeTable(Stream& s, const kernels::RopeTableParams& p) override {
    Launch(s, cuda::LaunchRopeTable, p, "RoPE's table");
  }
  void RopeAppend(Stream& s, const kernels::RopeAppendParams& p) override {
    Launch(s, cuda::LaunchRopeAppend, p, "RoPE and append");
  }
  void Attention(Stream& s, const kernels::AttentionParams& p) override {
    Launch(s, cuda::LaunchAttention, p, "attention");
  }
  void Merge(Stream& s, const kernels::MergeParams& p) override {
    Launch(s, cuda::LaunchMerge, p, "merge");
  }
  void SiluMul(Stream& s, const kernels::SiluMulParams& p) override {
    Launch(s, cuda::LaunchSiluMul, p, "SiLU");
  }
  void Sample(Stream& s, const kernels::SampleParams& p) override {
    Launch(s, cuda::LaunchSample, p, "sampling");
  }
  void Transfer(Stream& s, const kernels::TransferParams& p) override {
    Launch(s, cuda::LaunchTransfer, p, "transfer");
  }

  int32_t MaxRecallPlaces() const override { return cuda::kMaxRecallPlaces; }
  int32_t MaxBringPlaces() const override { return cuda::kMaxBringPlaces; }
  void Digest(Stream& s, const kernels::DigestParams& p) override {
    Launch(s, cuda::LaunchDigest, p, "digests");
  }
  void DigestScores(Stream& s, const kernels::DigestScoresParams& p) override {
    Launch(s, cuda::LaunchDigestScores, p, "scores of digests");
  }
  void RefineScores(Stream& s, const kernels::RefineScoresParams& p) override {
    Launch(s, cuda::LaunchRefineScores, p, "scores of key codes");
  }
  void ExactScores(Stream& s, const kernels::ExactScoresParams& p) override {
    Launch(s, cuda::LaunchExactScores, p, "exact scores");
  }
  void PartialKeys(Stream& s, const kernels::PartialKeysParams& p) override {
    Launch(s, cuda::LaunchPartialKeys, p, "partial keys");
  }
  void PartialScores(Stream& s, const kernels::PartialScoresParams& p) override {
    Launch(s, cuda::LaunchPartialScores, p, "scores of partial keys");
  }
  void KeyCentres(Stream& s, const kernels::KeyCentresParams& p) override {
    Launch(s, cuda::LaunchKeyCentres, p, "centres of keys");
  }
  void HashKeys(Stream& s, const kernels::HashKeysParams& p) override {
    Launch(s, cuda::LaunchHashKeys, p, "codes of keys");
  }
  void HashQueries(Stream& s, const kernels::HashQueriesParams& p) override {
    Launch(s, cuda::LaunchHashQueries, p, "codes of queries");
  }
  void HashScores(Stream& s, const kernels::HashScoresParams& p) override {
    Launch(s, cuda::LaunchHashScores, p, "scores of codes");
  }
  void LabelLookup(Stream& s, const kernels::LabelLookupParams& p) override {
    Launch(s, cuda::LaunchLabelLookup, p, "a lookup of labels");
  }
  void TopK(Stream& s, const kernels::TopKParams& p) override {
    Launch(s, cuda::LaunchTopK, p, "top-k");
  }
  void Split(Stream& s, const kernels::SplitParams& p) override {
    Launch(s, cuda::LaunchSplit, p, "a split by residency");
  }
  void RecallDue(Stream& s, const kernels::RecallDueParams& p) override {
    Launch(s, cuda::LaunchRecallDue, p, "a recall's decision");
  }
  void Recall(Stream& s, const kernels::RecallParams& p) override {
    Launch(s, cuda::LaunchRecall, p, "a recall");
  }
  void Bring(Stream& s, const kernels::BringParams& p) override {
    Launch(s, cuda::LaunchBring, p, "selecting tokens and giving them places");
  }
  void Retain(Stream& s, const kernels::RetainParams& p) override {
    Launch(s, cuda::LaunchRetain, p, "keeping what leaves the ring");
  }
  void WriteThrough(Stream& s, const kernels::WriteThroughParams& p) override {
    Launch(s, cuda::LaunchWriteThrough, p, "write-through");
  }
  void SparseAttention(Stream& s, const kernels::SparseAttentionParams& p) override {
    Launch(s, cuda::LaunchSparseAttention, p, "sparse attention");
  }
  void MovingAverage(Stream& s, const kernels::MovingAverageParams& p) override {
    Launch(s, cuda::LaunchMovingAverage, p, "moving averages");
  }
  void CopyRows(Stream& s, const kernels::CopyRowsParams& p) override {
    Launch(s, cuda::LaunchCopyRows, p, "copies of rows");
  }
  void TakeRing(Stream& s, const kernels::TakeRingParams& p) override {
    Launch(s, cuda::LaunchTakeRing, p, "units out of a ring");
  }
  void LevelDigests(Stream& s, const kernels::LevelDigestsParams& p) override {
    Launch(s, cuda::LaunchLevelDigests, p, "digests of levels");
  }
  void AnchorStatistics(Stream& s, const kernels::AnchorStatisticsParams& p) override {
    Launch(s, cuda::LaunchAnchorStatistics, p, "statistics of anchors");
  }
  void PredictBudgets(Stream& s, const kernels::PredictBudgetsParams& p) override {
    Launch(s, cuda::LaunchPredictBudgets, p, "a prediction of budgets");
  }
  void PlanRetrieval(Stream& s, const kernels::PlanRetrievalParams& p) override {
    Launch(s, cuda::LaunchPlanRetrieval, p, "a plan of retrieval");
  }
  void LevelScores(Stream& s, const kernels::LevelScoresParams& p) override {
    Launch(s, cuda::LaunchLevelScores, p, "scores of levels");
  }
  void SelectUnion(Stream& s, const kernels::SelectUnionParams& p) override {
    Launch(s, cuda::LaunchSelectUnion, p, "a selection of unions");
  }
  void SegmentLists(Stream& s, const kernels::SegmentListsParams& p) override {
    Launch(s, cuda::LaunchSegmentLists, p, "lists of segments");
  }
  void DivideLists(Stream& s, const kernels::DivideListsParams& p) override {
    Launch(s, cuda::LaunchDivideLists, p, "a division of lists");
  }
  void PullAttention(Stream& s, const kernels::PullAttentionParams& p) override {
    Launch(s, cuda::LaunchPullAttention, p, "attention over parts that are pulled");
  }
  void MergeParts(Stream& s, const kernels::MergePartsParams& p) override {
    Launch(s, cuda::LaunchMergeParts, p, "a merge of parts");
  }

  int64_t SparseMlaScratchBytes(int32_t decode_rows, int32_t heads, int32_t rank,
                                int64_t capacity) const override {
    return cuda::SparseMlaScratchBytes(decode_rows, heads, rank, capacity);
  }
  void LatentAppend(Stream& s, const kernels::LatentAppendParams& p) override {
    Launch(s, cuda::LaunchLatentAppend, p, "entries of a latent cache");
  }
  void IndexAppend(Stream& s, const kernels::IndexAppendParams& p) override {
    Launch(s, cuda::LaunchIndexAppend, p, "index keys");
  }
  void IndexQuery(Stream& s, const kernels::IndexQueryParams& p) override {
    Launch(s, cuda::LaunchIndexQuery, p, "index queries");
  }
  void IndexLogits(Stream& s, const kernels::IndexLogitsParams& p) override {
    Launch(s, cuda::LaunchIndexLogits, p, "index logits");
  }
  void MlaQuery(Stream& s, const kernels::MlaQueryParams& p) override {
    Launch(s, cuda::LaunchMlaQuery, p, "queries of MLA");
  }
  void HeadLinear(Stream& s, const kernels::HeadLinearParams& p) override {
    Launch(s, cuda::LaunchHeadLinear, p, "a product by heads");
  }
  void SparseMla(Stream& s, const kernels::SparseMlaParams& p) override {
    Launch(s, cuda::LaunchSparseMla, p, "sparse MLA");
  }
  void UpdateResidency(Stream& s, const kernels::UpdateResidencyParams& p) override {
    Launch(s, cuda::LaunchUpdateResidency, p, "residency");
  }
  void TakeBackResidency(Stream& s, const kernels::TakeBackResidencyParams& p) override {
    Launch(s, cuda::LaunchTakeBackResidency, p, "taking back residency");
  }
  void Route(Stream& s, const kernels::RouteParams& p) override {
    Launch(s, cuda::LaunchRoute, p, "routing");
  }
  void ExpertLinear(Stream& s, const kernels::ExpertLinearParams& p) override {
    Launch(s, cuda::LaunchExpertLinear, p, "a product of experts");
  }
  void Combine(Stream& s, const kernels::CombineParams& p) override {
    Launch(s, cuda::LaunchCombine, p, "a sum over experts");
  }
  void PackRows(Stream& s, const kernels::PackRowsParams& p) override {
    Launch(s, cuda::LaunchPackRows, p, "the packing of rows");
  }
  void UnpackRows(Stream& s, const kernels::UnpackRowsParams& p) override {
    Launch(s, cuda::LaunchUnpackRows, p, "the unpacking of rows");
  }
  void AddParts(Stream& s, const kernels::AddPartsParams& p) override {
    Launch(s, cuda::LaunchAddParts, p, "a sum over ranks");
  }
  void SettleDrafts(Stream& s, const kernels::SettleDraftsParams& p) override {
    Launch(s, cuda::LaunchSettleDrafts, p, "the settling of drafts");
  }
  void NewestLists(Stream& s, const kernels::NewestListsParams& p) override {
    Launch(s, cuda::LaunchNewestLists, p, "lists of the newest tokens");
  }

 private:
  template <typename Params>
  static void Launch(Stream& stream, cudaError_t (*launch)(const Params&, cudaStream_t),
                     const Params& params, const char* what) {
    auto& s = static_cast<CudaStream&>(stream);
    if (s.usable()) s.Check(launch(params, s.handle()), what);
  }

  const std::string name_ = "cuda";
  WeightMaker weight_maker_;
};

}  // namespace

std::unique_ptr<KernelSet> NewCudaKernelSet(DeviceHealth* health) {
  return std::make_unique<CudaKernelSet>(health);
}

}  // namespace sluice
