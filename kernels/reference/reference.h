// The oracle: every operator written as plainly as its contract, in float64. It is slow and may
// allocate. It takes any weight layout, caches of bf16, float32 or the packed form, and activations
// of float32.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::kernels::reference {

void Embedding(const EmbeddingParams& p, Worker worker);
void RmsNorm(const RmsNormParams& p, Worker worker);
void Linear(const LinearParams& p, Worker worker);
void RopeTable(const RopeTableParams& p, Worker worker);
void RopeAppend(const RopeAppendParams& p, Worker worker);
void Attention(const AttentionParams& p, Worker worker);
void AttentionMerge(const AttentionParams& p, Worker worker);
void Merge(const MergeParams& p, Worker worker);
void SiluMul(const SiluMulParams& p, Worker worker);
void Sample(const SampleParams& p, Worker worker);
void Transfer(const TransferParams& p, Worker worker);
void PartialKeys(const PartialKeysParams& p, Worker worker);
void PartialScores(const PartialScoresParams& p, Worker worker);
void KeyCentres(const KeyCentresParams& p, Worker worker);
void HashKeys(const HashKeysParams& p, Worker worker);
void HashQueries(const HashQueriesParams& p, Worker worker);
void HashScores(const HashScoresParams& p, Worker worker);
void LabelLookup(const LabelLookupParams& p, Worker worker);
void SparseAttention(const SparseAttentionParams& p, Worker worker);
void CopyRows(const CopyRowsParams& p, Worker worker);
void MovingAverage(const MovingAverageParams& p, Worker worker);
void Digest(const DigestParams& p, Worker worker);
void DigestScores(const DigestScoresParams& p, Worker worker);
void RefineScores(const RefineScoresParams& p, Worker worker);
void ExactScores(const ExactScoresParams& p, Worker worker);
void TopK(const TopKParams& p, Worker worker);
void Split(const SplitParams& p, Worker worker);
void RecallDue(const RecallDueParams& p, Worker worker);
void Recall(const RecallParams& p, Worker worker);
void Bring(const BringParams& p, Worker worker);
void Retain(const RetainParams& p, Worker worker);
void WriteThrough(const WriteThroughParams& p, Worker worker);
void LevelDigests(const LevelDigestsParams& p, Worker worker);
void AnchorStatistics(const AnchorStatisticsParams& p, Worker worker);
void PredictBudgets(const PredictBudgetsParams& p, Worker worker);
void PlanRetrieval(const PlanRetrievalParams& p, Worker worker);
void LevelScores(const LevelScoresParams& p, Worker worker);
void SelectUnion(const SelectUnionParams& p, Worker worker);
void SegmentLists(const SegmentListsParams& p, Worker worker);
void DivideLists(const DivideListsParams& p, Worker worker);
void MergeParts(const MergePartsParams& p, Worker worker);
void LatentAppend(const LatentAppendParams& p, Worker worker);
void IndexAppend(const IndexAppendParams& p, Worker worker);
void IndexQuery(const IndexQueryParams& p, Worker worker);
void IndexLogits(const IndexLogitsParams& p, Worker worker);
void MlaQuery(const MlaQueryParams& p, Worker worker);
void HeadLinear(const HeadLinearParams& p, Worker worker);
void SparseMla(const SparseMlaParams& p, Worker worker);
// the first phase leaves nothing to do
void SparseMlaMerge(const SparseMlaParams& p, Worker worker);
void UpdateResidency(const UpdateResidencyParams& p, Worker worker);
void TakeBackResidency(const TakeBackResidencyParams& p, Worker worker);
void Route(const RouteParams& p, Worker worker);
void RoutePairs(const RouteParams& p, Worker worker);
void PackPlaces(const PackRowsParams& p, Worker worker);
void PackRows(const PackRowsParams& p, Worker worker);
void UnpackRows(const UnpackRowsParams& p, Worker worker);
void UnpackPairs(const UnpackRowsParams& p, Worker worker);
void AddParts(const AddPartsParams& p, Worker worker);
void ExpertLinear(const ExpertLinearParams& p, Worker worker);
void Combine(const CombineParams& p, Worker worker);

const KernelTable& Table();

}  // namespace sluice::kernels::reference
