// Evaluation: the new selection of a contextual cache after an append (section 3.2.3:
// re-evaluation).
#include <algorithm>
#include <array>
#include <cstdint>

#include "src/attention/policies/hgca/contextual_cache.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr kernels::Worker kAlone{0, 1};

// Tokens that are processed between two checks that the sequence is still there.
constexpr int64_t kChunkTokens = 2048;

// Pairs of a row and a token outside the window that one KV head is judged by. One row of 64K
// tokens is as many.
constexpr int64_t kJudgedPairs = 65536;

}  // namespace

int64_t ContextualCache::ChunkBlocks() const {
  return std::max<int64_t>(1, kChunkTokens / kind_.block_tokens);
}

int ContextualCache::JudgingRows(int64_t tokens) {
  return static_cast<int>(
      std::clamp<int64_t>(kJudgedPairs / std::max<int64_t>(tokens, 1), 1, kMostJudgingRows));
}

void ContextualCache::KeepRow(const CoAttention::Task& task, uint64_t sequence) {
  const int64_t row = (int64_t{task.slot} * layers_ + task.channel) * options_.heads;
  const bool outside = options_.window.BlocksOutside(task.position) > 0;
  for (int head = task.head_begin; head < task.head_end; ++head) {
    Entry& entry = EntryOf(task.slot, task.channel, head);
    Claim(entry);
    if (Has(task.slot, sequence)) {
      const int64_t first = int64_t{head} * group_;
      std::copy_n(task.q + first * head_dim_, group_ * head_dim_,
                  row_queries_.begin() + (row + first) * head_dim_);
      std::copy_n(task.lse + first, group_, row_lse_.begin() + row + first);
      scale_.store(task.scale, std::memory_order_relaxed);
      if (!outside) entry.judged.store(0, std::memory_order_release);
      entry.evaluated_at.store(task.position, std::memory_order_release);
    }
    entry.busy.store(false, std::memory_order_release);
  }
  if (outside) Wake();
}

void ContextualCache::Evaluate(int slot, int32_t first_row, int rows, const Event* queries_there) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(Evaluated(slot), "one append at a time");
  scale_.store(options_.queries->scale(), std::memory_order_relaxed);
  s.first_row.store(first_row, std::memory_order_relaxed);
  s.rows.store(rows, std::memory_order_relaxed);
  s.queries_there.store(queries_there, std::memory_order_release);
  Wake();
}

bool ContextualCache::Evaluated(int slot) const {
  return slots_[static_cast<size_t>(slot)].queries_there.load(std::memory_order_acquire) == nullptr;
}

void ContextualCache::WaitEvaluated(int slot) const {
  const std::atomic<const Event*>& there = slots_[static_cast<size_t>(slot)].queries_there;
  while (const Event* const event = there.load(std::memory_order_acquire)) {
    there.wait(event, std::memory_order_acquire);
  }
}

bool ContextualCache::EvaluateNow(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (!s.queries_there.load(std::memory_order_acquire)->Ready()) return false;
  const uint64_t sequence = s.sequence.load(std::memory_order_acquire);
  Scratch& scratch = scratch_.back();
  for (int layer = options_.first_layer; layer < layers_; ++layer) {
    for (int head = 0; head < kind_.heads; ++head) {
      EvaluateAppended(slot, layer, head, sequence, scratch);
    }
  }
  s.queries_there.store(nullptr, std::memory_order_release);
  s.queries_there.notify_all();
  return true;
}

// Algorithm 2, line 4, only for the weights: the rows' attention results are not needed.
void ContextualCache::EvaluateAppended(int slot, int layer, int head, uint64_t sequence,
                                       Scratch& scratch) {
  const Slot& s = slots_[static_cast<size_t>(slot)];
  const int32_t first_row = s.first_row.load(std::memory_order_relaxed);
  const int64_t blocks = options_.window.BlocksOutside(first_row);
  const int64_t tokens = blocks * kind_.block_tokens;
  // A row judges no tokens that come after it.
  const auto count = static_cast<int>(
      std::min<int64_t>(std::min(s.rows.load(std::memory_order_relaxed), JudgingRows(tokens)),
                        first_row - tokens + 1));
  Entry& entry = EntryOf(slot, layer, head);
  Claim(entry);
  entry.evaluated_at.store(first_row, std::memory_order_release);
  if (blocks == 0) {
    entry.judged.store(0, std::memory_order_release);
  } else {
    std::array<JudgingRow, kMostJudgingRows> rows;
    for (int i = 0; i < count; ++i) {
      const int32_t position = first_row - count + i;
      const float* const q =
          options_.queries->Of(layer, slot, position) + head * group_ * head_dim_;
      float* const lse = scratch.lse.data() + i * group_;
      AttendTo(slot, layer, head, position, q, scale_.load(std::memory_order_relaxed), nullptr,
               tokens, scratch.o.data(), lse);
      rows[static_cast<size_t>(i)] = {q, lse};
    }
    Judge(slot, layer, head, sequence, blocks,
          absl::MakeSpan(rows.data(), static_cast<size_t>(count)), scratch);
  }
  entry.busy.store(false, std::memory_order_release);
}

// Algorithm 1, lines 19 to 21, by the first decode row.
bool ContextualCache::EvaluateHead(int slot, int layer, int head, uint64_t sequence,
                                   Scratch& scratch) {
  const Entry& entry = EntryOf(slot, layer, head);
  const int64_t position = entry.evaluated_at.load(std::memory_order_acquire);
  const int64_t row = (int64_t{slot} * layers_ + layer) * options_.heads + int64_t{head} * group_;
  const JudgingRow judge{row_queries_.data() + row * head_dim_, row_lse_.data() + row};
  return Judge(slot, layer, head, sequence, options_.window.BlocksOutside(position), {&judge, 1},
               scratch);
}

// A_cpu is the softmax over the complete CPU cache, and its moving average is made as line 8 makes
// that of the window.
bool ContextualCache::Judge(int slot, int layer, int head, uint64_t sequence, int64_t blocks,
                            absl::Span<const JudgingRow> rows, Scratch& scratch) {
  Entry& entry = EntryOf(slot, layer, head);
  const int64_t chunk_blocks = ChunkBlocks();
  constexpr int32_t kNoOwnToken = INT32_MAX;
  kernels::MovingAverageParams params{};
  params.q_stride = int64_t{group_} * head_dim_;
  params.slots = &kSlotZero_;
  params.positions = &kNoOwnToken;
  params.average.base = scratch.weights.data();
  params.average.page_table = &kSlotZero_;
  params.average.rows_per_page = static_cast<int32_t>(chunk_blocks * kind_.block_tokens);
  params.average.dim = 1;
  params.average.type = kernels::DType::kFloat32;
  params.average.kv_heads = 1;
  params.unit_tokens = 1;
  params.rows = 1;
  params.heads = group_;
  params.scale = scale_.load(std::memory_order_relaxed);
  params.reduction = options_.reduction;
  int32_t count = 0;
  for (int64_t block = 0; block < blocks; block += chunk_blocks) {
    if (!Has(slot, sequence)) return false;
    const int64_t tokens = std::min(chunk_blocks, blocks - block) * kind_.block_tokens;
    params.cache = View(PagesOf(slot, layer) + block, head);
    params.capacity = static_cast<int32_t>(tokens);
    params.counts = &params.capacity;
    for (const JudgingRow& row : rows) {
      params.q = row.q;
      params.lse = row.lse;
      params.alpha = &row == rows.data() ? 1 : options_.alpha;  // the average begins with a row
      options_.kernels->moving_average(params, kAlone);
    }
    count += Mark(slot, layer, head, block * kind_.block_tokens, scratch.weights.data(), tokens,
                  blocks * kind_.block_tokens);
  }
  entry.count.store(count, std::memory_order_relaxed);
  entry.judged.store(blocks, std::memory_order_release);
  return true;
}

}  // namespace sluice
