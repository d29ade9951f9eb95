#include "src/attention/policies/oracle/oracle_policy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/decode_attention.h"
#include "src/attention/offload/offload_policy.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

using Selector = PolicyOptions::Oracle::Selector;

constexpr size_t kDigests = 0;  // the one array, used by selector kDigest
// Offset at which a layer's random scores begin in those of the layer before.
constexpr int64_t kRandomShift = 61;

struct Scratch {
  Buffer scores;   // float32 [rows][kv_heads][stride]
  Buffer units;    // int32 [rows][kv_heads][budget_blocks]
  Buffer counts;   // int32 [rows][kv_heads]
  Buffer results;  // float32 [rows][heads][head_dim]
  Buffer lse;      // float32 [rows][heads]
};

class OraclePolicy : public OffloadPolicy {
 public:
  OraclePolicy(const PolicyOptions& options, int budget_blocks, std::unique_ptr<OffloadTier> tier,
               Buffer written, Scratch scratch)
      : OffloadPolicy(options, std::move(tier), std::move(written)),
        selector_(options.oracle.selector),
        budget_blocks_(budget_blocks),
        score_stride_(ScoreStride(options)),
        scratch_(std::move(scratch)) {}

  static int64_t ScoreStride(const PolicyOptions& options) {
    return options.hbm->layout().kinds[0].BlocksFor(options.max_context);
  }

 private:
  void BuildArrays(Stream& stream, int /*slot*/, int64_t /*tokens*/,
                   const OffloadTier::BulkRow& row) override {
    if (selector_ != Selector::kDigest) return;
    for (int layer = options().dense_layers; layer < options().hbm->layout().layers; ++layer) {
      kernels().Digest(stream, {tier().Home(layer), tier().Array(layer, kDigests), row.slots,
                                row.first_positions, row.positions, 1});
    }
  }

  bool attends_at_home() const override { return true; }
  int64_t SparseExactTokens() const override {
    return int64_t{budget_blocks_} * tier().block_tokens();
  }
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    const kernels::PagedCache home = tier().Home(layer);
    const float* scores = Scores(stream, layer, queries, home);
    const kernels::UnitLists selected{scratch_.units.as<int32_t>(), scratch_.counts.as<int32_t>(),
                                      budget_blocks_};
    kernels::TopKParams top{};
    top.scores = scores;
    top.score_stride = score_stride_;
    top.slots = queries.slots;
    top.positions = queries.positions;
    top.selected = selected;
    top.rows = queries.rows;
    top.kv_heads = home.kv_heads;
    top.unit_tokens = home.block_tokens;
    top.k = budget_blocks_;
    top.first_units = 1;
    top.last_units = selector_ == Selector::kEnds ? budget_blocks_ - 1 : 1;
    top.margin = std::numeric_limits<float>::infinity();
    kernels().TopK(stream, top);

    auto* const o = scratch_.results.as<float>();
    auto* const lse = scratch_.lse.as<float>();
    kernels().SparseAttention(stream, SparseAttentionOf(queries, home, selected, /*places=*/nullptr,
                                                        home.block_tokens, o, lse));
    kernels().Merge(stream, MergeOf(queries, home.head_dim, 1, o, lse, out, out_type));
  }

  // [rows][kv_heads][score_stride_]
  const float* Scores(Stream& stream, int layer, const Queries& queries,
                      const kernels::PagedCache& home) {
    auto* const scores = scratch_.scores.as<float>();
    if (selector_ == Selector::kRandom) return scores + layer * kRandomShift;
    if (selector_ == Selector::kExact) {
      kernels::ExactScoresParams exact{};
      exact.q = queries.q;
      exact.q_stride = queries.stride;
      exact.slots = queries.slots;
      exact.positions = queries.positions;
      exact.cache = home;
      exact.scores = scores;
      exact.score_stride = score_stride_;
      exact.rows = queries.rows;
      exact.heads = queries.heads;
      exact.unit_tokens = home.block_tokens;
      exact.scale = queries.scale;
      exact.reduction = options().reduction;
      kernels().ExactScores(stream, exact);
    }
    if (selector_ == Selector::kDigest) {
      const kernels::PagedRows digests = tier().Array(layer, kDigests);
      // This makes the newest block's digest, which is forced now and will be whole when another
      // block is the newest.
      kernels().Digest(stream,
                       {home, digests, queries.slots, nullptr, queries.positions, queries.rows});
      kernels().DigestScores(stream, {queries.q, queries.stride, queries.slots, queries.positions,
                                      digests, scores, score_stride_, queries.rows, queries.heads,
                                      home.block_tokens, queries.scale, options().reduction});
    }
    return scores;
  }

  const Selector selector_;
  const int32_t budget_blocks_;
  const int64_t score_stride_;
  const Scratch scratch_;
};

// Returns fixed random scores of (layer, KV head, block), the same for every row, so that the
// blocks of a sequence do not depend on its slot or its neighbours. Rows repeat, so that a layer
// may begin anywhere.
std::vector<float> RandomScores(int64_t count, int64_t period, uint64_t seed) {
  std::vector<float> scores;
  SplitMix64 random(seed);
  for (int64_t i = 0; i < count; ++i) {
    scores.push_back(i < period ? static_cast<float>(random.Uniform())
                                : scores[static_cast<size_t>(i - period)]);
  }
  return scores;
}

absl::StatusOr<Scratch> AllocateScratch(const PolicyOptions& options, int rows, int budget_blocks) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kind = layout.kinds[0];
  const int64_t head_dim = kind.part_bytes[0] / SizeOf(kind.element_type);
  const int64_t lists = int64_t{rows} * kind.heads;
  const int64_t stride = OraclePolicy::ScoreStride(options);
  const BufferAllocator allocator(options.device, "selection");
  const int64_t scores = lists * stride + layout.layers * kRandomShift;
  Scratch scratch;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, scores, &scratch.scores));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, lists * budget_blocks, &scratch.units));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists, &scratch.counts));
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, int64_t{rows} * options.heads * head_dim, &scratch.results));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, int64_t{rows} * options.heads, &scratch.lse));
  if (options.oracle.selector == Selector::kRandom) {
    Buffer host;
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, scores, &host));
    const std::vector<float> values =
        RandomScores(scores, kind.heads * stride, options.oracle.seed);
    std::memcpy(host.data(), values.data(), host.bytes());
    const std::unique_ptr<Event> copied = options.device->NewEvent();
    const std::unique_ptr<Stream> stream = options.device->NewStream(Device::StreamKind::kCopy);
    stream->Copy(scratch.scores.data(), host.data(), host.bytes());
    stream->Record(*copied);
    copied->Wait();
  }
  return scratch;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewOraclePolicy(const PolicyOptions& options) {
  const int block_tokens = options.hbm->layout().kinds[0].block_tokens;
  if (options.budget_tokens < 2 * block_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget_tokens: expected at least ", 2 * block_tokens,
                     ", the first and the newest block, found ", options.budget_tokens));
  }
  // A sequence cannot select more blocks than it has.
  const auto budget_blocks = static_cast<int>(std::max<int64_t>(
      std::min<int64_t>(options.budget_tokens / block_tokens, OraclePolicy::ScoreStride(options)),
      2));
  OffloadTierOptions tier;
  tier.device = options.device;
  tier.hbm = options.hbm;
  tier.dram = options.dram;
  tier.slots = options.slots;
  tier.max_context = options.max_context;
  tier.dense_layers = options.dense_layers;
  tier.ring_blocks = 1;
  tier.unit_tokens = block_tokens;
  if (options.oracle.selector == Selector::kDigest) {
    const CacheKind& kind = options.hbm->layout().kinds[0];
    const auto elements = static_cast<int32_t>(kind.bytes_per_token / SizeOf(kind.element_type));
    tier.arrays = {{"digests", block_tokens, elements,
                    kind.element_type == DType::kFloat32 ? kernels::DType::kFloat32
                                                         : kernels::DType::kBFloat16}};
  }
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> made, OffloadTier::Create(tier));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, OffloadPolicy::AllocateWritten(options));
  SLUICE_ASSIGN_OR_RETURN(
      Scratch scratch,
      AllocateScratch(options, OffloadPolicy::MaxDecodeRows(options), budget_blocks));
  return std::make_unique<OraclePolicy>(options, budget_blocks, std::move(made), std::move(written),
                                        std::move(scratch));
}

}  // namespace sluice
