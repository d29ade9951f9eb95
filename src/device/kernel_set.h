// The operators as models and policies see them. Each call enqueues its operator on a stream and
// returns at once. The contracts are in kernels/params.h. Pointers must stay valid until the stream
// has passed the operator.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/bring_params.h"
#include "kernels/draft_params.h"
#include "kernels/exchange_params.h"
#include "kernels/fluxion_params.h"
#include "kernels/hash_params.h"
#include "kernels/latent_params.h"
#include "kernels/params.h"
#include "kernels/pull_params.h"
#include "kernels/ring_params.h"
#include "kernels/sparse_params.h"
#include "kernels/weight_formula.h"
#include "src/base/dtype.h"
#include "src/device/device.h"

namespace sluice {

// Rows of a matrix of weights as a checkpoint has them, row-major: bf16, or float32, or e4m3 with a
// scale for each block of 128 x 128 that begins at the part's first row; or made by a formula.
struct MatrixPart {
  const uint16_t* data;  // bf16; null: one of the other forms
  int32_t rows;
  kernels::WeightFormula formula{};  // element i of the rows is element i of the formula
  const float* values = nullptr;     // float32
  const uint8_t* fp8 = nullptr;      // e4m3
  const float* scales = nullptr;     // [ceil(rows / 128)][ceil(k / 128)], scales of `fp8`
  // Only with the formula: the weights are its e4m3 values with one scale
  // (kernels/weight_formula.h).
  bool fp8_formula = false;
};

// The shape that decides how much scratch attention needs.
struct AttentionShape {
  int32_t decode_rows;  // most decode rows of a step
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t max_context;
  int32_t sequence_rows = 1;  // as in AttentionParams
};

// Weights in the form in which the kernels read them.
struct Weight {
  Buffer storage;  // empty where `matrix` points to the checkpoint's own bytes
  kernels::WeightMatrix matrix{};
};

// The part of a model's shape that decides whether the operators can compute it at all.
struct ModelShape {
  int32_t hidden_size = 0;
  int32_t vocab_size = 0;
  int32_t block_tokens = 0;
  int32_t head_dim = 0;
};

class KernelSet {
 public:
  virtual ~KernelSet() = default;
  virtual const std::string& name() const = 0;
  // Returns the element type that Linear reads.
  virtual DType activation_type() const = 0;
  // Returns INVALID_ARGUMENT where an operator would refuse such a model; the message names the
  // field and the remedy.
  virtual absl::Status Check(const ModelShape&) const { return absl::OkStatus(); }
  // Puts matrices of `k` columns one below the other. The result may refer to a single part's data
  // where no copy is needed (then storage is empty, and the part must stay).
  virtual absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) = 0;
  // Returns the bytes of a matrix of bf16 weights in the form in which the kernels read it.
  virtual int64_t WeightBytes(int32_t n, int32_t k) const = 0;
  // Returns the bytes of the result of Prepare for these parts.
  virtual int64_t PreparedBytes(absl::Span<const MatrixPart> parts, int32_t k) const;
  // Returns the bytes of scratch that Sample needs for a vocabulary; may be 0.
  virtual int64_t SampleScratchBytes(int32_t vocab) const = 0;
  // Returns the bytes of AttentionParams::partial that are enough for every row.
  virtual int64_t AttentionScratchBytes(const AttentionShape& shape) const = 0;

  virtual void Embedding(Stream& stream, const kernels::EmbeddingParams& params) = 0;
  virtual void RmsNorm(Stream& stream, const kernels::RmsNormParams& params) = 0;
  virtual void Linear(Stream& stream, const kernels::LinearParams& params) = 0;
  virtual void RopeTable(Stream& stream, const kernels::RopeTableParams& params) = 0;
  virtual void RopeAppend(Stream& stream, const kernels::RopeAppendParams& params) = 0;
  virtual void Attention(Stream& stream, const kernels::AttentionParams& params) = 0;
  virtual void Merge(Stream& stream, const kernels::MergeParams& params) = 0;
  virtual void SiluMul(Stream& stream, const kernels::SiluMulParams& params) = 0;
  virtual void Sample(Stream& stream, const kernels::SampleParams& params) = 0;
  virtual void Transfer(Stream& stream, const kernels::TransferParams& params) = 0;

  // Sparse attention (kernels/sparse_params.h, kernels/bring_params.h, kernels/hash_params.h).
  //
  // Return how many places of a ResidencyTable, beside the ring, Recall and Bring take.
  virtual int32_t MaxRecallPlaces() const { return std::numeric_limits<int32_t>::max(); }
  virtual int32_t MaxBringPlaces() const { return std::numeric_limits<int32_t>::max(); }
  virtual void Digest(Stream& stream, const kernels::DigestParams& params) = 0;
  virtual void DigestScores(Stream& stream, const kernels::DigestScoresParams& params) = 0;
  virtual void RefineScores(Stream& stream, const kernels::RefineScoresParams& params) = 0;
  virtual void ExactScores(Stream& stream, const kernels::ExactScoresParams& params) = 0;
  virtual void PartialKeys(Stream& stream, const kernels::PartialKeysParams& params) = 0;
  virtual void PartialScores(Stream& stream, const kernels::PartialScoresParams& params) = 0;
  virtual void KeyCentres(Stream& stream, const kernels::KeyCentresParams& params) = 0;
  virtual void HashKeys(Stream& stream, const kernels::HashKeysParams& params) = 0;
  virtual void HashQueries(Stream& stream, const kernels::HashQueriesParams& params) = 0;
  virtual void HashScores(Stream& stream, const kernels::HashScoresParams& params) = 0;
  virtual void LabelLookup(Stream& stream, const kernels::LabelLookupParams& params) = 0;
  virtual void TopK(Stream& stream, const kernels::TopKParams& params) = 0;
  virtual void Split(Stream& stream, const kernels::SplitParams& params) = 0;
  virtual void RecallDue(Stream& stream, const kernels::RecallDueParams& params) = 0;
  virtual void Recall(Stream& stream, const kernels::RecallParams& params) = 0;
  virtual void Bring(Stream& stream, const kernels::BringParams& params) = 0;
  virtual void Retain(Stream& stream, const kernels::RetainParams& params) = 0;
  virtual void WriteThrough(Stream& stream, const kernels::WriteThroughParams& params) = 0;
  virtual void SparseAttention(Stream& stream, const kernels::SparseAttentionParams& params) = 0;
  virtual void MovingAverage(Stream& stream, const kernels::MovingAverageParams& params) = 0;
  virtual void CopyRows(Stream& stream, const kernels::CopyRowsParams& params) = 0;
  virtual void TakeRing(Stream& stream, const kernels::TakeRingParams& params) = 0;

  // Fluxion (kernels/fluxion_params.h).
  virtual void LevelDigests(Stream& stream, const kernels::LevelDigestsParams& params) = 0;
  virtual void AnchorStatistics(Stream& stream, const kernels::AnchorStatisticsParams& params) = 0;
  virtual void PredictBudgets(Stream& stream, const kernels::PredictBudgetsParams& params) = 0;
  virtual void PlanRetrieval(Stream& stream, const kernels::PlanRetrievalParams& params) = 0;
  virtual void LevelScores(Stream& stream, const kernels::LevelScoresParams& params) = 0;
  virtual void SelectUnion(Stream& stream, const kernels::SelectUnionParams& params) = 0;
  virtual void SegmentLists(Stream& stream, const kernels::SegmentListsParams& params) = 0;
  virtual void DivideLists(Stream& stream, const kernels::DivideListsParams& params) = 0;
  // Parts of lists that the device pulls (kernels/pull_params.h).
  virtual void PullAttention(Stream& stream, const kernels::PullAttentionParams& params) = 0;
  virtual void MergeParts(Stream& stream, const kernels::MergePartsParams& params) = 0;

  // Latent attention and experts (kernels/latent_params.h).
  //
  // Returns the bytes of SparseMlaParams::scratch for `decode_rows` decode rows and lists of
  // `capacity`.
  virtual int64_t SparseMlaScratchBytes(int32_t decode_rows, int32_t heads, int32_t rank,
                                        int64_t capacity) const = 0;
  virtual void LatentAppend(Stream& stream, const kernels::LatentAppendParams& params) = 0;
  virtual void IndexAppend(Stream& stream, const kernels::IndexAppendParams& params) = 0;
  virtual void IndexQuery(Stream& stream, const kernels::IndexQueryParams& params) = 0;
  virtual void IndexLogits(Stream& stream, const kernels::IndexLogitsParams& params) = 0;
  virtual void MlaQuery(Stream& stream, const kernels::MlaQueryParams& params) = 0;
  virtual void HeadLinear(Stream& stream, const kernels::HeadLinearParams& params) = 0;
  virtual void SparseMla(Stream& stream, const kernels::SparseMlaParams& params) = 0;
  virtual void UpdateResidency(Stream& stream, const kernels::UpdateResidencyParams& params) = 0;
  virtual void TakeBackResidency(Stream& stream,
                                 const kernels::TakeBackResidencyParams& params) = 0;
  virtual void Route(Stream& stream, const kernels::RouteParams& params) = 0;
  virtual void ExpertLinear(Stream& stream, const kernels::ExpertLinearParams& params) = 0;
  virtual void Combine(Stream& stream, const kernels::CombineParams& params) = 0;

  // Rows to the experts of other ranks and back (kernels/exchange_params.h).
  virtual void PackRows(Stream& stream, const kernels::PackRowsParams& params) = 0;
  virtual void UnpackRows(Stream& stream, const kernels::UnpackRowsParams& params) = 0;
  virtual void AddParts(Stream& stream, const kernels::AddPartsParams& params) = 0;

  // Speculation on the device (kernels/draft_params.h).
  virtual void SettleDrafts(Stream& stream, const kernels::SettleDraftsParams& params) = 0;
  virtual void NewestLists(Stream& stream, const kernels::NewestListsParams& params) = 0;
};

}  // namespace sluice
