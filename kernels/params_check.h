// The facts on which every compiler that sees params.h must agree: the structs are plain data, and
// their fields lie where the others expect them. One C++ file and one CUDA file include this.
#pragma once

#include <cstddef>
#include <type_traits>

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

namespace sluice::kernels {

#define SLUICE_PLAIN_PARAMS(type, bytes)                                               \
  static_assert(std::is_standard_layout<type>::value, #type " is standard layout");    \
  static_assert(std::is_trivially_copyable<type>::value, #type " is copied as bytes"); \
  static_assert(sizeof(type) == (bytes), #type " has the same size everywhere")

SLUICE_PLAIN_PARAMS(WeightMatrix, 32);
SLUICE_PLAIN_PARAMS(EmbeddingParams, 80);
SLUICE_PLAIN_PARAMS(AheadNormParams, 72);
SLUICE_PLAIN_PARAMS(RmsNormParams, 128);
SLUICE_PLAIN_PARAMS(LinearParams, 72);
SLUICE_PLAIN_PARAMS(RopeTableParams, 40);
SLUICE_PLAIN_PARAMS(PagedCache, 64);
SLUICE_PLAIN_PARAMS(RopeAppendParams, 136);
SLUICE_PLAIN_PARAMS(AttentionParams, 152);
SLUICE_PLAIN_PARAMS(MergeParams, 56);
SLUICE_PLAIN_PARAMS(SiluMulParams, 32);
SLUICE_PLAIN_PARAMS(TransferParams, 120);
SLUICE_PLAIN_PARAMS(CopyRowsParams, 344);
SLUICE_PLAIN_PARAMS(RingWord, 64);
SLUICE_PLAIN_PARAMS(TakeRingParams, 96);
SLUICE_PLAIN_PARAMS(SamplingSlot, 64);
SLUICE_PLAIN_PARAMS(SampleParams, 128);
SLUICE_PLAIN_PARAMS(PagedRows, 56);
SLUICE_PLAIN_PARAMS(UnitLists, 24);
SLUICE_PLAIN_PARAMS(DigestParams, 208);
SLUICE_PLAIN_PARAMS(DigestScoresParams, 128);
SLUICE_PLAIN_PARAMS(RefineScoresParams, 208);
SLUICE_PLAIN_PARAMS(ExactScoresParams, 136);
SLUICE_PLAIN_PARAMS(PartialKeysParams, 160);
SLUICE_PLAIN_PARAMS(PartialScoresParams, 136);
SLUICE_PLAIN_PARAMS(TopKParams, 128);
SLUICE_PLAIN_PARAMS(ResidencyTable, 128);
SLUICE_PLAIN_PARAMS(SplitParams, 240);
SLUICE_PLAIN_PARAMS(SparseCounters, 72);
SLUICE_PLAIN_PARAMS(RecallDueParams, 104);
SLUICE_PLAIN_PARAMS(RecallParams, 352);
SLUICE_PLAIN_PARAMS(BringParams, 464);
SLUICE_PLAIN_PARAMS(RetainParams, 224);
SLUICE_PLAIN_PARAMS(WriteThroughParams, 96);
SLUICE_PLAIN_PARAMS(SparseAttentionParams, 176);
SLUICE_PLAIN_PARAMS(MovingAverageParams, 216);
SLUICE_PLAIN_PARAMS(KeyCentresParams, 96);
SLUICE_PLAIN_PARAMS(HashKeysParams, 224);
SLUICE_PLAIN_PARAMS(HashQueriesParams, 64);
SLUICE_PLAIN_PARAMS(HashScoresParams, 176);
SLUICE_PLAIN_PARAMS(LabelLookupParams, 128);
SLUICE_PLAIN_PARAMS(FluxionAnchors, 24);
SLUICE_PLAIN_PARAMS(FluxionNetwork, 56);
SLUICE_PLAIN_PARAMS(LevelDigestsParams, 328);
SLUICE_PLAIN_PARAMS(AnchorStatisticsParams, 368);
SLUICE_PLAIN_PARAMS(PredictBudgetsParams, 192);
SLUICE_PLAIN_PARAMS(PlanRetrievalParams, 80);
SLUICE_PLAIN_PARAMS(LevelScoresParams, 304);
SLUICE_PLAIN_PARAMS(SelectUnionParams, 96);
SLUICE_PLAIN_PARAMS(SegmentListsParams, 224);
SLUICE_PLAIN_PARAMS(DivideListsParams, 112);
SLUICE_PLAIN_PARAMS(PullAsk, 64);
SLUICE_PLAIN_PARAMS(PullGrant, 64);
SLUICE_PLAIN_PARAMS(PullAttentionParams, 256);
SLUICE_PLAIN_PARAMS(MergePartsParams, 72);
SLUICE_PLAIN_PARAMS(PagedLatents, 48);
SLUICE_PLAIN_PARAMS(PagedIndexKeys, 40);
SLUICE_PLAIN_PARAMS(LatentAppendParams, 176);
SLUICE_PLAIN_PARAMS(IndexAppendParams, 120);
SLUICE_PLAIN_PARAMS(IndexQueryParams, 72);
SLUICE_PLAIN_PARAMS(IndexLogitsParams, 104);
SLUICE_PLAIN_PARAMS(MlaQueryParams, 56);
SLUICE_PLAIN_PARAMS(HeadLinearParams, 104);
SLUICE_PLAIN_PARAMS(SparseMlaParams, 184);
SLUICE_PLAIN_PARAMS(UpdateResidencyParams, 400);
SLUICE_PLAIN_PARAMS(TakeBackResidencyParams, 296);
SLUICE_PLAIN_PARAMS(RouteParams, 88);
SLUICE_PLAIN_PARAMS(ExpertLinearParams, 88);
SLUICE_PLAIN_PARAMS(CombineParams, 48);
SLUICE_PLAIN_PARAMS(PackRowsParams, 96);
SLUICE_PLAIN_PARAMS(UnpackRowsParams, 96);
SLUICE_PLAIN_PARAMS(AddPartsParams, 40);
SLUICE_PLAIN_PARAMS(SettleDraftsParams, 88);
SLUICE_PLAIN_PARAMS(NewestListsParams, 56);

#undef SLUICE_PLAIN_PARAMS

static_assert(offsetof(EmbeddingParams, table) == 32, "EmbeddingParams::table");
static_assert(offsetof(RmsNormParams, out_type) == 52, "RmsNormParams::out_type");
static_assert(offsetof(RmsNormParams, ahead) == 56, "RmsNormParams::ahead");
static_assert(offsetof(LinearParams, bias) == 40, "LinearParams::bias");
static_assert(offsetof(LinearParams, accumulate) == 68, "LinearParams::accumulate");
static_assert(offsetof(PagedCache, block_tokens) == 32, "PagedCache::block_tokens");
static_assert(offsetof(RopeAppendParams, cache) == 48, "RopeAppendParams::cache");
static_assert(offsetof(AttentionParams, cache) == 32, "AttentionParams::cache");
static_assert(offsetof(AttentionParams, partial_rows) == 120, "AttentionParams::partial_rows");
static_assert(offsetof(TransferParams, counts) == 80, "TransferParams::counts");
static_assert(offsetof(TransferParams, max_workers) == 100, "TransferParams::max_workers");
static_assert(offsetof(SamplingSlot, top_k) == 32, "SamplingSlot::top_k");
static_assert(offsetof(SampleParams, vocab) == 116, "SampleParams::vocab");
static_assert(offsetof(SampleParams, stores) == 120, "SampleParams::stores");

static_assert(SizeOf(DType::kBFloat16) == 2 && SizeOf(DType::kFloat32) == 4, "element sizes");
static_assert(kAttentionSplitTokens % 32 == 0, "a split is a whole number of chunks");
static_assert(UniformFromSeed(1, 0) != UniformFromSeed(1, 1), "draws differ by index");

}  // namespace sluice::kernels
