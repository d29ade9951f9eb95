// Evaluation: the new selection of a contextual cache after an append (section 3.2.3:
// re-evaluation).
#include <algorithm>

#include "src/attention/policies/hgca/contextual_cache.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr kernels::Worker kAlone{0, 1};

// Tokens that are processed between two checks that the sequence is still there.
constexpr int64_t kChunkTokens = 2048;

}  // namespace

int64_t ContextualCache::ChunkBlocks() const {
  return std::max<int64_t>(1, kChunkTokens / kind_.block_tokens);
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

void ContextualCache::Evaluate(int slot, int32_t first_row, float scale,
                               const Event* queries_there) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(Evaluated(slot), "one append at a time");
  scale_.store(scale, std::memory_order_relaxed);
  s.first_row.store(first_row, std::memory_order_relaxed);
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
  const int32_t row = s.first_row.load(std::memory_order_relaxed);
  Scratch& scratch = scratch_.back();
  for (int layer = options_.first_layer; layer < layers_; ++layer) {
    for (int head = 0; head < kind_.heads; ++head) {
      EvaluateAppended(slot, layer, head, sequence, row, scratch);
    }
  }
  s.queries_there.store(nullptr, std::memory_order_release);
  s.queries_there.notify_all();
  return true;
}

// Algorithm 2, line 4, only for the weights: the row's attention result is not needed.
void ContextualCache::EvaluateAppended(int slot, int layer, int head, uint64_t sequence,
                                       int32_t row, Scratch& scratch) {
  const int64_t blocks = options_.window.BlocksOutside(row);
  CoAttention::Task task{};
  task.slot = slot;
  task.channel = layer;
  task.position = row;
  task.q = AppendedQueries(slot) + int64_t{layer} * options_.slots * options_.heads * head_dim_;
  task.o = scratch.o.data();
  task.lse = scratch.lse.data();
  task.head_begin = head;
  task.head_end = head + 1;
  task.scale = scale_.load(std::memory_order_relaxed);
  const size_t at = static_cast<size_t>(head);
  scratch.counts[at] = static_cast<int32_t>(blocks * kind_.block_tokens);
  if (blocks > 0) {
    AttendTo(
        PagesOf(slot, layer), blocks, task, [] { return true; }, scratch, task.o, task.lse);
  }
  KeepRow(task, sequence);
  if (blocks == 0) return;
  Entry& entry = EntryOf(slot, layer, head);
  Claim(entry);
  Advance(slot, layer, head, sequence, blocks, scratch);
  entry.busy.store(false, std::memory_order_release);
}

// Algorithm 1, lines 19 to 21: A_cpu is the softmax over the complete CPU cache.
bool ContextualCache::EvaluateHead(int slot, int layer, int head, uint64_t sequence,
                                   Scratch& scratch) {
  Entry& entry = EntryOf(slot, layer, head);
  const auto position = static_cast<int32_t>(entry.evaluated_at.load(std::memory_order_acquire));
  const int64_t blocks = options_.window.BlocksOutside(position);
  const int64_t chunk_blocks = ChunkBlocks();
  const int64_t row = (int64_t{slot} * layers_ + layer) * options_.heads;
  std::fill(scratch.only.begin(), scratch.only.end(), 0);
  // The moving average with alpha = 1 is the row's weights.
  kernels::MovingAverageParams params{};
  params.q = row_queries_.data() + row * head_dim_;
  params.q_stride = int64_t{options_.heads} * head_dim_;
  params.slots = &kSlotZero_;
  params.positions = &position;
  params.counts = scratch.only.data();
  params.lse = row_lse_.data() + row;
  params.average.base = scratch.weights.data();
  params.average.page_table = &kSlotZero_;
  params.average.rows_per_page = static_cast<int32_t>(chunk_blocks * kind_.block_tokens);
  params.average.dim = 1;
  params.average.type = kernels::DType::kFloat32;
  params.average.kv_heads = kind_.heads;
  params.unit_tokens = 1;
  params.rows = 1;
  params.heads = options_.heads;
  params.scale = scale_.load(std::memory_order_relaxed);
  params.alpha = 1;
  params.reduction = options_.reduction;
  int64_t count = 0;
  for (int64_t block = 0; block < blocks; block += chunk_blocks) {
    if (!Has(slot, sequence)) return false;
    const int64_t tokens = std::min(chunk_blocks, blocks - block) * kind_.block_tokens;
    params.cache = View(PagesOf(slot, layer) + block);
    params.capacity = static_cast<int32_t>(tokens);
    scratch.only[static_cast<size_t>(head)] = params.capacity;
    options_.kernels->moving_average(params, kAlone);
    count = CopySalient(slot, layer, head, block * kind_.block_tokens, scratch.weights.data(),
                        tokens, blocks * kind_.block_tokens, count);
  }
  entry.counts[static_cast<size_t>(blocks & 1)].store(static_cast<int32_t>(count),
                                                      std::memory_order_release);
  entry.judged.store(blocks, std::memory_order_release);
  return true;
}

}  // namespace sluice
