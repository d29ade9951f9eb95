#include "src/device/cpu/cpu_kernel_set.h"

#include <algorithm>
#include <vector>

#include "absl/functional/function_ref.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/host_stream.h"
#include "src/device/weight_rows.h"

namespace sluice {
namespace {

using kernels::KernelTable;
using kernels::Worker;

// Below this many elements an operator is done before a helper would have woken up. The number of
// workers never changes a result (kernels/params.h).
constexpr int64_t kElementsPerWorker = 16 * 1024;

// The size of an operator whose work depends on values that only the device knows: any row may have
// a long context.
constexpr int64_t kAnyLength = int64_t{1} << 40;

int WorkersFor(int64_t elements, const CpuTeam& team) {
  return static_cast<int>(
      std::clamp<int64_t>(elements / kElementsPerWorker, 1, static_cast<int64_t>(team.threads())));
}

class CpuKernelSet : public KernelSet {
 public:
  CpuKernelSet(const KernelTable& table, CpuTeam* team, Device* device)
      : table_(table), name_(table.name), team_(team), device_(device) {}

  const std::string& name() const override { return name_; }
  DType activation_type() const override { return table_.activation_type; }

  absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) override;

  int64_t WeightBytes(int32_t n, int32_t k) const override {
    const bool panels = table_.weight_layout == kernels::WeightLayout::kPanel16;
    return 2 * (panels ? kernels::PanelElements(n, k) : int64_t{n} * k);
  }
  int64_t SampleScratchBytes(int32_t vocab) const override {
    return kernels::SampleScratchBytes(vocab) * team_->threads();
  }

  int64_t AttentionScratchBytes(const AttentionShape& shape) const override {
    // This is enough for every worker of a large host, and small beside weights. One row always has
    // room.
    constexpr int64_t kEnough = int64_t{16} << 20;
    const int64_t entry = int64_t{shape.heads} * (shape.head_dim + 1) * 4;
    const int64_t splits = (int64_t{shape.max_context} + kernels::kAttentionSplitTokens - 1) /
                           kernels::kAttentionSplitTokens;
    return std::min(shape.decode_rows * splits, std::max(kEnough / entry, splits)) * entry;
  }

  void Embedding(Stream& s, const kernels::EmbeddingParams& p) override {
    Launch(s, "embedding", table_.embedding, p, int64_t{p.rows} * p.table.k);
  }
  void RmsNorm(Stream& s, const kernels::RmsNormParams& p) override {
    Launch(s, "rms_norm", table_.rms_norm, p, int64_t{p.rows} * p.dim);
  }
  void Linear(Stream& s, const kernels::LinearParams& p) override {
    Launch(s, "linear", table_.linear, p, int64_t{p.w.n} * p.w.k);
  }
  void RopeTable(Stream& s, const kernels::RopeTableParams& p) override {
    Launch(s, "rope_table", table_.rope_table, p, int64_t{p.rows} * p.half_dim * 16);
  }
  void RopeAppend(Stream& s, const kernels::RopeAppendParams& p) override {
    Launch(s, "rope_append", table_.rope_append, p,
           int64_t{p.rows} * (p.heads + 2 * p.cache.kv_heads) * p.cache.head_dim);
  }
  void Attention(Stream& s, const kernels::AttentionParams& p) override {
    Launch(s, "attention", table_.attention, p, kAnyLength);
    Launch(s, "attention_merge", table_.attention_merge, p,
           int64_t{p.rows} * p.heads * p.cache.head_dim);
  }
  void Merge(Stream& s, const kernels::MergeParams& p) override {
    Launch(s, "merge", table_.merge, p, int64_t{p.parts} * p.rows * p.heads * p.head_dim);
  }
  void SiluMul(Stream& s, const kernels::SiluMulParams& p) override {
    Launch(s, "silu_mul", table_.silu_mul, p, int64_t{p.rows} * p.dim);
  }
  void Sample(Stream& s, const kernels::SampleParams& p) override {
    // Work is divided by rows.
    Launch(s, "sample", table_.sample, p, int64_t{p.rows} * kElementsPerWorker);
  }
  void Transfer(Stream& s, const kernels::TransferParams& p) override {
    // Counts are not known here: any list may be full.
    const int64_t words = int64_t{p.lists} * p.capacity * p.unit_bytes / 4;
    const int64_t allowed = p.max_workers > 0 ? p.max_workers : team_->threads();
    Launch(s, "transfer", table_.transfer, p, std::min(words, allowed * kElementsPerWorker));
  }

  void Digest(Stream& s, const kernels::DigestParams& p) override {
    Launch(s, "digest", table_.digest, p, kAnyLength);
  }
  void DigestScores(Stream& s, const kernels::DigestScoresParams& p) override {
    Launch(s, "digest_scores", table_.digest_scores, p, kAnyLength);
  }
  void RefineScores(Stream& s, const kernels::RefineScoresParams& p) override {
    Launch(s, "refine_scores", table_.refine_scores, p, kAnyLength);
  }
  void ExactScores(Stream& s, const kernels::ExactScoresParams& p) override {
    Launch(s, "exact_scores", table_.exact_scores, p, kAnyLength);
  }
  void PartialKeys(Stream& s, const kernels::PartialKeysParams& p) override {
    Launch(s, "partial_keys", table_.partial_keys, p, kAnyLength);
  }
  void PartialScores(Stream& s, const kernels::PartialScoresParams& p) override {
    Launch(s, "partial_scores", table_.partial_scores, p, kAnyLength);
  }
  void KeyCentres(Stream& s, const kernels::KeyCentresParams& p) override {
    Launch(s, "key_centres", table_.key_centres, p, kAnyLength);
  }
  void HashKeys(Stream& s, const kernels::HashKeysParams& p) override {
    Launch(s, "hash_keys", table_.hash_keys, p, kAnyLength);
  }
  void HashQueries(Stream& s, const kernels::HashQueriesParams& p) override {
    Launch(s, "hash_queries", table_.hash_queries, p, kAnyLength);
  }
  void HashScores(Stream& s, const kernels::HashScoresParams& p) override {
    Launch(s, "hash_scores", table_.hash_scores, p, kAnyLength);
  }
  void LabelLookup(Stream& s, const kernels::LabelLookupParams& p) override {
    Launch(s, "label_lookup", table_.label_lookup, p, kAnyLength);
  }
  void TopK(Stream& s, const kernels::TopKParams& p) override {
    Launch(s, "top_k", table_.top_k, p, kAnyLength);
  }
  void Split(Stream& s, const kernels::SplitParams& p) override {
    Launch(s, "split", table_.split, p, kAnyLength);
  }
  void RecallDue(Stream& s, const kernels::RecallDueParams& p) override {
    Launch(s, "recall_due", table_.recall_due, p, kAnyLength);
  }
  void Recall(Stream& s, const kernels::RecallParams& p) override {
    Launch(s, "recall", table_.recall, p, kAnyLength);
  }
  void Bring(Stream& s, const kernels::BringParams& p) override {
    Launch(s, "bring", table_.bring, p, kAnyLength);
  }
  void Retain(Stream& s, const kernels::RetainParams& p) override {
    Launch(s, "retain", table_.retain, p, kAnyLength);
  }
  void WriteThrough(Stream& s, const kernels::WriteThroughParams& p) override {
    Launch(s, "write_through", table_.write_through, p, kAnyLength);
  }
  void SparseAttention(Stream& s, const kernels::SparseAttentionParams& p) override {
    Launch(s, "sparse_attention", table_.sparse_attention, p, kAnyLength);
  }
  void MovingAverage(Stream& s, const kernels::MovingAverageParams& p) override {
    Launch(s, "moving_average", table_.moving_average, p, kAnyLength);
  }
  void LevelDigests(Stream& s, const kernels::LevelDigestsParams& p) override {
    Launch(s, "level_digests", table_.level_digests, p, kAnyLength);
  }
  void AnchorStatistics(Stream& s, const kernels::AnchorStatisticsParams& p) override {
    Launch(s, "anchor_statistics", table_.anchor_statistics, p, kAnyLength);
  }
  void PredictBudgets(Stream& s, const kernels::PredictBudgetsParams& p) override {
    Launch(s, "predict_budgets", table_.predict_budgets, p, kAnyLength);
  }
  void PlanRetrieval(Stream& s, const kernels::PlanRetrievalParams& p) override {
    Launch(s, "plan_retrieval", table_.plan_retrieval, p, kAnyLength);
  }
  void LevelScores(Stream& s, const kernels::LevelScoresParams& p) override {
    Launch(s, "level_scores", table_.level_scores, p, kAnyLength);
  }
  void SelectUnion(Stream& s, const kernels::SelectUnionParams& p) override {
    Launch(s, "select_union", table_.select_union, p, kAnyLength);
  }
  void SegmentLists(Stream& s, const kernels::SegmentListsParams& p) override {
    Launch(s, "segment_lists", table_.segment_lists, p, kAnyLength);
  }
  void DivideLists(Stream& s, const kernels::DivideListsParams& p) override {
    Launch(s, "divide_lists", table_.divide_lists, p, kAnyLength);
  }
  void PullAttention(Stream& s, const kernels::PullAttentionParams& p) override {
    Launch(s, "pull_attention", table_.pull_attention, p, 0);  // one worker does it all
  }
  void MergeParts(Stream& s, const kernels::MergePartsParams& p) override {
    Launch(s, "merge_parts", table_.merge_parts, p, kAnyLength);
  }
  void CopyRows(Stream& s, const kernels::CopyRowsParams& p) override {
    int64_t words = 0;
    for (int32_t i = 0; i < p.count; ++i) {
      words += int64_t{p.pieces[i].rows} * p.pieces[i].row_bytes / 4;
    }
    Launch(s, "copy_rows", table_.copy_rows, p, words);
  }
  void TakeRing(Stream& s, const kernels::TakeRingParams& p) override {
    Launch(s, "take_ring", table_.take_ring, p, 0);  // one worker does it all
  }

  int64_t SparseMlaScratchBytes(int32_t decode_rows, int32_t heads, int32_t rank,
                                int64_t capacity) const override {
    // The room is for every piece of every row, or enough for the workers of a large host.
    constexpr int64_t kEnough = int64_t{16} << 20;
    const int64_t pieces = (capacity + kernels::kMlaSplitEntries - 1) / kernels::kMlaSplitEntries;
    const int64_t row = pieces * heads * (rank + 1) * 4;
    return std::min(decode_rows * row, std::max(kEnough, row));
  }
  void LatentAppend(Stream& s, const kernels::LatentAppendParams& p) override {
    Launch(s, "latent_append", table_.latent_append, p,
           int64_t{p.rows} * (p.cache.rank + p.cache.rope));
  }
  void IndexAppend(Stream& s, const kernels::IndexAppendParams& p) override {
    Launch(s, "index_append", table_.index_append, p, int64_t{p.rows} * kernels::kIndexDim * 8);
  }
  void IndexQuery(Stream& s, const kernels::IndexQueryParams& p) override {
    Launch(s, "index_query", table_.index_query, p,
           int64_t{p.rows} * p.heads * kernels::kIndexDim * 8);
  }
  void IndexLogits(Stream& s, const kernels::IndexLogitsParams& p) override {
    Launch(s, "index_logits", table_.index_logits, p, kAnyLength);
  }
  void MlaQuery(Stream& s, const kernels::MlaQueryParams& p) override {
    Launch(s, "mla_query", table_.mla_query, p, int64_t{p.rows} * p.heads * (p.nope_dim + p.rope));
  }
  void HeadLinear(Stream& s, const kernels::HeadLinearParams& p) override {
    Launch(s, "head_linear", table_.head_linear, p, int64_t{p.w.n} * p.w.k);
  }
  void SparseMla(Stream& s, const kernels::SparseMlaParams& p) override {
    if (p.then_counts != nullptr) {
      SparseMla(s, kernels::FirstOfTwo(p));
      SparseMla(s, kernels::SecondOfTwo(p));
      return;
    }
    Launch(s, "sparse_mla", table_.sparse_mla, p, kAnyLength);
    Launch(s, "sparse_mla_merge", table_.sparse_mla_merge, p,
           int64_t{p.rows} * p.heads * p.cache.rank);
  }
  void UpdateResidency(Stream& s, const kernels::UpdateResidencyParams& p) override {
    Launch(s, "update_residency", table_.update_residency, p, kAnyLength);
  }
  void TakeBackResidency(Stream& s, const kernels::TakeBackResidencyParams& p) override {
    Launch(s, "take_back_residency", table_.take_back_residency, p, kAnyLength);
  }
  void Route(Stream& s, const kernels::RouteParams& p) override {
    Launch(s, "route", table_.route, p, int64_t{p.rows} * p.experts * 16);
    Launch(s, "route_pairs", table_.route_pairs, p, int64_t{p.rows} * p.k);
  }
  void ExpertLinear(Stream& s, const kernels::ExpertLinearParams& p) override {
    Launch(s, "expert_linear", table_.expert_linear, p, int64_t{p.w.n} * p.w.k);
  }
  void Combine(Stream& s, const kernels::CombineParams& p) override {
    Launch(s, "combine", table_.combine, p, int64_t{p.rows} * p.k * p.dim);
  }
  void PackRows(Stream& s, const kernels::PackRowsParams& p) override {
    Launch(s, "pack_places", table_.pack_places, p, 0);  // one worker does it all
    Launch(s, "pack_rows", table_.pack_rows, p, int64_t{p.rows} * p.dim);
  }
  void UnpackRows(Stream& s, const kernels::UnpackRowsParams& p) override {
    Launch(s, "unpack_rows", table_.unpack_rows, p, int64_t{p.ranks} * p.capacity * p.dim);
    Launch(s, "unpack_pairs", table_.unpack_pairs, p, 0);  // one worker does it all
  }
  void AddParts(Stream& s, const kernels::AddPartsParams& p) override {
    Launch(s, "add_parts", table_.add_parts, p, int64_t{p.rows} * p.dim * p.ranks);
  }
  void SettleDrafts(Stream& s, const kernels::SettleDraftsParams& p) override {
    Launch(s, "settle_drafts", table_.settle_drafts, p, 0);  // one worker does it all
  }
  void NewestLists(Stream& s, const kernels::NewestListsParams& p) override {
    Launch(s, "newest_lists", table_.newest_lists, p, int64_t{p.rows} * p.lists.capacity);
  }

 private:
  template <typename Params>
  struct Work {
    void (*run)(const Params&, Worker);
    int workers;
    Params params;
  };
  template <typename Params>
  void Launch(Stream& stream, const char* name, void (*run)(const Params&, Worker),
              const Params& params, int64_t elements) {
    static_cast<HostStream&>(stream).Enqueue<Work<Params>>(
        [](const Work<Params>& work, CpuTeam* team) {
          team->Run(
              [](const void* erased, Worker worker) {
                const auto& w = *static_cast<const Work<Params>*>(erased);
                w.run(w.params, worker);
              },
              &work, work.workers);
        },
        {run, WorkersFor(elements, *team_), params}, {name});
  }

  // Calls fill(begin, end) for shares of a part's rows, on the team's threads.
  void ForRows(int32_t rows, int32_t k, absl::FunctionRef<void(int32_t begin, int32_t end)> fill);

  const KernelTable& table_;
  const std::string name_;
  CpuTeam* const team_;
  Device* const device_;
};

void CpuKernelSet::ForRows(int32_t rows, int32_t k,
                           absl::FunctionRef<void(int32_t begin, int32_t end)> fill) {
  struct Rows {
    absl::FunctionRef<void(int32_t, int32_t)> fill;
    int64_t count;
  } work{fill, rows};
  team_->Run(
      [](const void* erased, Worker worker) {
        const auto& w = *static_cast<const Rows*>(erased);
        w.fill(static_cast<int32_t>(w.count * worker.index / worker.count),
               static_cast<int32_t>(w.count * (worker.index + 1) / worker.count));
      },
      &work, WorkersFor(int64_t{rows} * k, *team_));
}

// Converts rows [begin, end) of a part, whose first row is row `first` of the matrix.
void PackMatrixRows(const MatrixPart& part, int32_t begin, int32_t end, int32_t k, int32_t first,
                    uint16_t* out) {
  if (part.data != nullptr) {
    kernels::PackPanels(part.data + int64_t{begin} * k, end - begin, k, first + begin, out);
    return;
  }
  // It converts a panel's rows at a time.
  std::vector<uint16_t> made(static_cast<size_t>(kernels::kPanelColumns) * static_cast<size_t>(k));
  for (int32_t row = begin, next; row < end; row = next) {
    next = std::min(end, row + kernels::kPanelColumns - (first + row) % kernels::kPanelColumns);
    for (int32_t i = row; i < next; ++i) {
      BFloat16Row(part, i, k, made.data() + int64_t{i - row} * k);
    }
    kernels::PackPanels(made.data(), next - row, k, first + row, out);
  }
}

absl::StatusOr<Weight> CpuKernelSet::Prepare(absl::Span<const MatrixPart> parts, int32_t k) {
  int32_t n = 0;
  bool bf16 = true;
  for (const MatrixPart& part : parts) {
    n += part.rows;
    bf16 = bf16 && IsBFloat16(part);
  }
  Weight weight;
  weight.matrix = {nullptr, n, k, table_.weight_layout};
  const bool panels = table_.weight_layout == kernels::WeightLayout::kPanel16;
  const bool exact = !panels && !bf16;
  if (exact) weight.matrix.layout = kernels::WeightLayout::kFloat32;
  if (!panels && parts.size() == 1 && parts[0].data != nullptr) {
    weight.matrix.data = parts[0].data;
    return weight;
  }
  const int64_t bytes = exact ? int64_t{n} * k * 4 : WeightBytes(n, k);
  SLUICE_ASSIGN_OR_RETURN(weight.storage,
                          device_->Allocate(MemoryKind::kDevice, static_cast<size_t>(bytes),
                                            absl::StrCat("a matrix of weights, ", n, " x ", k)));
  weight.matrix.data = weight.storage.as<uint16_t>();
  int32_t first = 0;
  for (const MatrixPart& part : parts) {
    ForRows(part.rows, k, [&](int32_t begin, int32_t end) {
      if (panels) return PackMatrixRows(part, begin, end, k, first, weight.storage.as<uint16_t>());
      for (int32_t row = begin; row < end; ++row) {
        const int64_t at = (int64_t{first} + row) * k;
        if (exact) {
          FloatRow(part, row, k, weight.storage.as<float>() + at);
        } else {
          BFloat16Row(part, row, k, weight.storage.as<uint16_t>() + at);
        }
      }
    });
    first += part.rows;
  }
  return weight;
}

}  // namespace

std::unique_ptr<KernelSet> NewCpuKernelSet(const KernelTable& table, CpuTeam* team,
                                           Device* device) {
  return std::make_unique<CpuKernelSet>(table, team, device);
}

}  // namespace sluice
