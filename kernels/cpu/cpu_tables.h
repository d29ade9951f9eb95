// The CPU paths' tables and the operators that they share, some of them with the reference, where
// there is nothing to compute. Only dispatch.cc and the tables include this.
#pragma once

#include "kernels/cpu/pull.h"
#include "kernels/cpu/ring.h"
#include "kernels/kernel_table.h"

namespace sluice::kernels::cpu {

// Operators for which no instruction set is worth a second version. Weights are kPanel16.
void Embedding(const EmbeddingParams& p, Worker worker);
void RopeTable(const RopeTableParams& p, Worker worker);
void Sample(const SampleParams& p, Worker worker);
void Transfer(const TransferParams& p, Worker worker);
void CopyRows(const CopyRowsParams& p, Worker worker);
void TopK(const TopKParams& p, Worker worker);
// Does TopK for one list.
void TopKList(const TopKParams& p, int64_t list);
void Split(const SplitParams& p, Worker worker);
void RecallDue(const RecallDueParams& p, Worker worker);
void Recall(const RecallParams& p, Worker worker);
void Bring(const BringParams& p, Worker worker);
void Retain(const RetainParams& p, Worker worker);
void WriteThrough(const WriteThroughParams& p, Worker worker);
void PlanRetrieval(const PlanRetrievalParams& p, Worker worker);
void SelectUnion(const SelectUnionParams& p, Worker worker);
void SegmentLists(const SegmentListsParams& p, Worker worker);
void DivideLists(const DivideListsParams& p, Worker worker);
void UpdateResidency(const UpdateResidencyParams& p, Worker worker);
void TakeBackResidency(const TakeBackResidencyParams& p, Worker worker);
void Route(const RouteParams& p, Worker worker);
void RoutePairs(const RouteParams& p, Worker worker);
void PackPlaces(const PackRowsParams& p, Worker worker);
void PackRows(const PackRowsParams& p, Worker worker);
void UnpackRows(const UnpackRowsParams& p, Worker worker);
void UnpackPairs(const UnpackRowsParams& p, Worker worker);
void AddParts(const AddPartsParams& p, Worker worker);
void SettleDrafts(const SettleDraftsParams& p, Worker worker);
void NewestLists(const NewestListsParams& p, Worker worker);

// One table per path. Calling a function of a table on a processor without its instructions is an
// illegal instruction; only dispatch.cc hands tables out.
const KernelTable& PortableTable();
#if defined(SLUICE_KERNELS_X86)
const KernelTable& Avx2Table();
const KernelTable& Avx512Bf16Table();

// The operators that the path "amx" has of its own; its others are those of "avx512bf16". REQUIRES:
// the process has been granted tile data (AmxPermitted()).
void LinearAmx(const LinearParams& p, Worker worker);
void AttentionAmx(const AttentionParams& p, Worker worker);
void SparseAttentionAmx(const SparseAttentionParams& p, Worker worker);
void HeadLinearAmx(const HeadLinearParams& p, Worker worker);
void ExpertLinearAmx(const ExpertLinearParams& p, Worker worker);
void SparseMlaAmx(const SparseMlaParams& p, Worker worker);
void IndexLogitsAmx(const IndexLogitsParams& p, Worker worker);
void LevelScoresAmx(const LevelScoresParams& p, Worker worker);
#endif

}  // namespace sluice::kernels::cpu
