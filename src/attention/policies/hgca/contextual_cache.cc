#include "src/attention/policies/hgca/contextual_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr kernels::Worker kAlone{0, 1};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextualCache>> ContextualCache::Create(const Options& options) {
  SLUICE_CHECK(options.layout.kinds.size() == 1 && options.layout.kinds[0].part_bytes.size() == 2);
  const CacheKind& kind = options.layout.kinds[0];
  SLUICE_CHECK(options.window.blocks > 0 && options.window.block_tokens == kind.block_tokens);
  SLUICE_CHECK(options.heads % kind.heads == 0 && options.workers > 0);
  const int64_t bytes = int64_t{options.layout.layers} * options.slots * 2 * kind.heads *
                        kind.block_tokens * static_cast<int64_t>(sizeof(float));
  SLUICE_ASSIGN_OR_RETURN(Buffer averages,
                          options.device->Allocate(MemoryKind::kPinned, static_cast<size_t>(bytes),
                                                   "the averages of evicted blocks"));
  const int64_t queries = int64_t{options.layout.layers} * options.slots * options.heads *
                          (kind.part_bytes[0] / SizeOf(kind.element_type)) *
                          static_cast<int64_t>(sizeof(float));
  SLUICE_ASSIGN_OR_RETURN(
      Buffer appended, options.device->Allocate(MemoryKind::kPinned, static_cast<size_t>(queries),
                                                "the last queries of prompts"));
  return std::unique_ptr<ContextualCache>(
      new ContextualCache(options, std::move(averages), std::move(appended)));
}

ContextualCache::ContextualCache(const Options& options, Buffer averages, Buffer appended)
    : options_(options),
      kind_(options.layout.kinds[0]),
      layers_(options.layout.layers),
      group_(options.heads / kind_.heads),
      head_dim_(static_cast<int>(kind_.part_bytes[0] / SizeOf(kind_.element_type))),
      most_blocks_(kind_.BlocksFor(options.max_context) +
                   kind_.BlocksFor(ExtraTokens(options.window, options.max_context))),
      averages_(std::move(averages)),
      appended_(std::move(appended)),
      pages_(std::make_unique<int32_t[]>(static_cast<size_t>(options.slots) *
                                         static_cast<size_t>(layers_) *
                                         static_cast<size_t>(most_blocks_))),
      entries_(EntryIndex(options.slots, 0, 0)),
      slots_(static_cast<size_t>(options.slots)),
      scratch_(static_cast<size_t>(options.workers) + 1) {
  const auto heads = static_cast<size_t>(options.heads), group = static_cast<size_t>(group_);
  const auto dim = static_cast<size_t>(head_dim_);
  for (Scratch& scratch : scratch_) {
    scratch.counts.resize(static_cast<size_t>(kind_.heads));
    scratch.only.resize(static_cast<size_t>(kind_.heads));
    scratch.o.resize(heads * dim);
    scratch.lse.resize(heads);
    scratch.parts.resize(2 * group * dim);
    scratch.parts_lse.resize(2 * group);
    scratch.weights.resize(static_cast<size_t>(ChunkBlocks() * kind_.block_tokens));
    scratch.tallies = std::vector<Tally>(static_cast<size_t>(layers_));
  }
  const size_t rows = slots_.size() * static_cast<size_t>(layers_) * heads;
  row_queries_.resize(rows * dim);
  row_lse_.resize(rows);
}

int64_t ContextualCache::ExtraTokens(const HgcaWindow& window, int64_t total) {
  return window.BlocksOutside(std::max<int64_t>(total - 1, 0)) * window.block_tokens;
}

void ContextualCache::Claim(Entry& entry) {
  while (entry.busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
}

void ContextualCache::Forget(int slot) {
  slots_[static_cast<size_t>(slot)].evicted.store(0, std::memory_order_relaxed);
  for (int layer = 0; layer < layers_; ++layer) {
    for (int head = 0; head < kind_.heads; ++head) {
      Entry& entry = EntryOf(slot, layer, head);
      Claim(entry);
      entry.judged.store(-1, std::memory_order_relaxed);
      entry.evaluated_at.store(-1, std::memory_order_relaxed);
      for (std::atomic<int32_t>& count : entry.counts) count.store(0, std::memory_order_relaxed);
      entry.busy.store(false, std::memory_order_release);
    }
  }
}

void ContextualCache::Join(int slot, const SequenceCache& home, int64_t first_block) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(s.sequence.load(std::memory_order_relaxed) == 0, "a slot has one sequence");
  SLUICE_CHECK(home.pool()->base(0) == options_.arena);
  for (int layer = 0; layer < layers_; ++layer) {
    const std::vector<int32_t>& pages = home.Pages(layer, 0);
    std::copy_n(pages.begin(), std::min<int64_t>(std::ssize(pages), most_blocks_),
                PagesOf(slot, layer));
  }
  s.first_block.store(first_block, std::memory_order_relaxed);
  s.sequence.store(++sequences_, std::memory_order_release);
}

void ContextualCache::Append(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.sequence.store(0, std::memory_order_release);  // makes a selection under way end early
  Forget(slot);
  s.sequence.store(++sequences_, std::memory_order_release);
}

void ContextualCache::Leave(int slot) {
  slots_[static_cast<size_t>(slot)].sequence.store(0, std::memory_order_release);
  Forget(slot);
}

float* ContextualCache::Averages(int slot, int layer, int64_t block) const {
  const int64_t at = (int64_t{layer} * options_.slots + slot) * 2 + (block & 1);
  return averages_.as<float>() + at * kind_.heads * kind_.block_tokens;
}

void ContextualCache::Evict(int slot, int64_t blocks, const Event* done) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.evicted_done.store(done, std::memory_order_relaxed);
  s.evicted.store(blocks, std::memory_order_release);
  Wake();
}

void ContextualCache::Wake() {
  work_.fetch_add(1, std::memory_order_release);
  work_.notify_one();
}

uint8_t* ContextualCache::BlockAt(int slot, int layer, int head, int64_t block) const {
  return options_.arena + PagesOf(slot, layer)[block] * kind_.page_bytes() +
         head * kind_.block_bytes();
}

kernels::PagedCache ContextualCache::View(const int32_t* pages) const {
  kernels::PagedCache cache;
  cache.base = options_.arena;
  cache.block_table = pages;
  cache.table_stride = 0;  // one sequence, in slot 0
  cache.page_bytes = kind_.page_bytes();
  cache.block_tokens = kind_.block_tokens;
  cache.kv_heads = kind_.heads;
  cache.head_dim = head_dim_;
  cache.type = kind_.element_type;
  return cache;
}

bool ContextualCache::AttendTo(const int32_t* pages, int64_t blocks, const CoAttention::Task& task,
                               absl::FunctionRef<bool()> owes, Scratch& scratch, float* o,
                               float* lse) const {
  if (!owes()) return false;
  kernels::SparseAttentionParams params{};
  params.q = task.q;
  params.q_stride = int64_t{options_.heads} * head_dim_;
  params.slots = &kSlotZero_;
  params.positions = &task.position;
  params.cache = View(pages);
  params.counts = scratch.counts.data();
  params.o = o;
  params.lse = lse;
  params.capacity = static_cast<int32_t>(blocks * kind_.block_tokens);
  params.unit_tokens = 1;
  params.rows = 1;
  params.heads = options_.heads;
  params.kv_head_begin = task.head_begin;
  params.kv_head_end = task.head_end;
  params.scale = task.scale;
  options_.kernels->sparse_attention(params, kAlone);
  return true;
}

// Algorithm 2, lines 4 and 12: attention of the CPU with the row's own query.
absl::Status ContextualCache::Attend(int worker, const CoAttention::Task& task,
                                     absl::FunctionRef<bool()> owes) {
  Scratch& scratch = scratch_[static_cast<size_t>(worker)];
  const int slot = task.slot, layer = task.channel;
  const Slot& s = slots_[static_cast<size_t>(slot)];
  const uint64_t sequence = s.sequence.load(std::memory_order_acquire);
  const int64_t first_block = s.first_block.load(std::memory_order_relaxed);
  const int64_t evaluated_at =
      EntryOf(slot, layer, task.head_begin).evaluated_at.load(std::memory_order_acquire);
  const int64_t outside = options_.window.BlocksOutside(task.position);
  if (!owes()) return absl::OkStatus();
  SLUICE_CHECK(sequence != 0, "a row of a sequence that is not there");

  // Judged blocks that this row sees. It attends to all tokens of the other block outside, if there
  // is one.
  const bool evaluates = evaluated_at < 0;
  const int64_t judged =
      evaluates ? 0 : std::max(options_.window.BlocksOutside(evaluated_at), outside - 1);
  const bool pending = !evaluates && outside > judged;
  int64_t longest = 0;
  Counters counters;
  for (int head = task.head_begin; head < task.head_end; ++head) {
    int64_t count = 0;
    if (evaluates) {
      count = outside * kind_.block_tokens;
    } else if (judged > 0) {
      SLUICE_RETURN_IF_ERROR(Settle(slot, layer, head, sequence, judged, scratch));
      count = EntryOf(slot, layer, head)
                  .counts[static_cast<size_t>(judged & 1)]
                  .load(std::memory_order_acquire);
    }
    scratch.counts[static_cast<size_t>(head)] = static_cast<int32_t>(count);
    longest = std::max(longest, count);
    counters.rows += head == 0 ? 1 : 0;
    counters.cpu_tokens += count + (pending ? kind_.block_tokens : 0);
    counters.outside_tokens += outside * kind_.block_tokens;
    counters.window_tokens += task.position + 1 - outside * kind_.block_tokens;
  }
  const int32_t* const home = PagesOf(slot, layer);
  if (!AttendTo(home + (evaluates ? 0 : first_block), kind_.BlocksFor(longest), task, owes, scratch,
                task.o, task.lse)) {
    return absl::OkStatus();
  }
  if (evaluates) KeepRow(task, sequence);
  if (pending) {
    std::fill(scratch.counts.begin(), scratch.counts.end(), kind_.block_tokens);
    if (!AttendTo(home + outside - 1, 1, task, owes, scratch, scratch.o.data(),
                  scratch.lse.data())) {
      return absl::OkStatus();
    }
    MergeInto(task, scratch);
  }
  scratch.tallies[static_cast<size_t>(layer)].Add(counters);
  return absl::OkStatus();
}

void ContextualCache::MergeInto(const CoAttention::Task& task, Scratch& scratch) const {
  const int64_t width = int64_t{group_} * head_dim_;
  for (int head = task.head_begin; head < task.head_end; ++head) {
    const int64_t o = head * width, lse = int64_t{head} * group_;
    std::copy_n(task.o + o, width, scratch.parts.data());
    std::copy_n(scratch.o.data() + o, width, scratch.parts.data() + width);
    std::copy_n(task.lse + lse, group_, scratch.parts_lse.data());
    std::copy_n(scratch.lse.data() + lse, group_, scratch.parts_lse.data() + group_);
    kernels::MergeParams merge{};
    merge.o = scratch.parts.data();
    merge.lse = scratch.parts_lse.data();
    merge.out = task.o + o;
    merge.out_lse = task.lse + lse;
    merge.parts = 2;
    merge.rows = 1;
    merge.heads = group_;
    merge.head_dim = head_dim_;
    merge.out_type = kernels::DType::kFloat32;
    options_.kernels->merge(merge, kAlone);
  }
}

absl::Status ContextualCache::Settle(int slot, int layer, int head, uint64_t sequence,
                                     int64_t blocks, Scratch& scratch) {
  Entry& entry = EntryOf(slot, layer, head);
  if (entry.judged.load(std::memory_order_acquire) >= blocks) return absl::OkStatus();
  const auto give_up =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.patience);
  while (entry.judged.load(std::memory_order_acquire) < blocks) {
    if (!entry.busy.exchange(true, std::memory_order_acquire)) {
      const bool done = Advance(slot, layer, head, sequence, blocks, scratch);
      entry.busy.store(false, std::memory_order_release);
      if (!done) return absl::CancelledError("the sequence has left");
    } else if (std::chrono::steady_clock::now() > give_up) {
      return absl::DeadlineExceededError(absl::StrCat("the selection of layer ", layer,
                                                      " was not there within ",
                                                      absl::FormatDuration(options_.patience)));
    } else {
      std::this_thread::yield();
    }
  }
  return absl::OkStatus();
}

bool ContextualCache::Advance(int slot, int layer, int head, uint64_t sequence, int64_t blocks,
                              Scratch& scratch) {
  Entry& entry = EntryOf(slot, layer, head);
  if (!Has(slot, sequence)) return false;
  int64_t judged = entry.judged.load(std::memory_order_relaxed);
  if (judged < 0) {
    if (entry.evaluated_at.load(std::memory_order_acquire) < 0) return false;
    if (!EvaluateHead(slot, layer, head, sequence, scratch)) return false;
    judged = entry.judged.load(std::memory_order_relaxed);
  }
  for (; judged < blocks; ++judged) SelectBlock(slot, layer, head, judged);
  return true;
}

// Algorithm 1, lines 23 and 24. A block always leaves a full window, whose size is A_gpu.size.
void ContextualCache::SelectBlock(int slot, int layer, int head, int64_t block) {
  Entry& entry = EntryOf(slot, layer, head);
  const HgcaWindow& window = options_.window;
  const int64_t first = block * kind_.block_tokens;
  const int64_t evaluated_at = entry.evaluated_at.load(std::memory_order_relaxed);
  float* const averages = Averages(slot, layer, block) + int64_t{head} * kind_.block_tokens;
  // The averages of tokens that were there before the first row began at 0.
  const int64_t old = std::clamp<int64_t>(evaluated_at - first, 0, kind_.block_tokens);
  const float correction = StartCorrection(options_.alpha, first + window.tokens() - evaluated_at);
  for (int64_t t = 0; t < old; ++t) averages[t] *= correction;
  const int64_t judged =
      entry.counts[static_cast<size_t>(block & 1)].load(std::memory_order_relaxed);
  const int64_t count =
      CopySalient(slot, layer, head, first, averages, kind_.block_tokens, window.tokens(), judged);
  entry.counts[static_cast<size_t>((block + 1) & 1)].store(static_cast<int32_t>(count),
                                                           std::memory_order_release);
  entry.judged.store(block + 1, std::memory_order_release);
}

int64_t ContextualCache::CopySalient(int slot, int layer, int head, int64_t first,
                                     const float* weights, int64_t tokens, int64_t size,
                                     int64_t count) const {
  const int64_t row_bytes = kind_.part_bytes[0];
  const int64_t part_bytes = row_bytes * kind_.block_tokens;
  const int64_t first_block =
      slots_[static_cast<size_t>(slot)].first_block.load(std::memory_order_relaxed);
  const auto at = [&](int64_t from_block, int64_t token) {
    return BlockAt(slot, layer, head, from_block + token / kind_.block_tokens) +
           token % kind_.block_tokens * row_bytes;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    if (!IsSalient(weights[t], options_.beta, size)) continue;
    const uint8_t* const source = at(0, first + t);
    uint8_t* const target = at(first_block, count);
    for (int64_t part = 0; part < 2; ++part) {
      std::memcpy(target + part * part_bytes, source + part * part_bytes,
                  static_cast<size_t>(row_bytes));
    }
    ++count;
  }
  return count;
}

bool ContextualCache::SelectAhead() {
  Scratch& scratch = scratch_.back();
  bool waiting = false;
  for (int slot = 0; slot < options_.slots; ++slot) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    const uint64_t sequence = s.sequence.load(std::memory_order_acquire);
    if (sequence == 0) continue;
    if (!Evaluated(slot)) {
      waiting = !EvaluateNow(slot) || waiting;
      continue;
    }
    int64_t evicted = s.evicted.load(std::memory_order_acquire);
    const Event* const done = s.evicted_done.load(std::memory_order_relaxed);
    if (evicted > 0 && !done->Ready()) {
      waiting = true;
      evicted = 0;
    }
    for (int layer = 0; layer < layers_; ++layer) {
      for (int head = 0; head < kind_.heads; ++head) {
        Entry& entry = EntryOf(slot, layer, head);
        const int64_t judged = entry.judged.load(std::memory_order_acquire);
        const bool evaluates =
            judged < 0 && entry.evaluated_at.load(std::memory_order_acquire) >= 0;
        if (!evaluates && (judged < 0 || judged >= evicted)) continue;
        if (entry.busy.exchange(true, std::memory_order_acquire)) continue;
        Advance(slot, layer, head, sequence, evicted, scratch);
        entry.busy.store(false, std::memory_order_release);
      }
    }
  }
  return waiting;
}

int64_t ContextualCache::SelectedTokens(int slot, int layer, int head) const {
  const Entry& entry = EntryOf(slot, layer, head);
  const int64_t judged = entry.judged.load(std::memory_order_acquire);
  return judged < 0 ? 0 : entry.counts[static_cast<size_t>(judged & 1)].load();
}

int64_t ContextualCache::JudgedTokens(int slot, int layer, int head) const {
  const int64_t judged = EntryOf(slot, layer, head).judged.load(std::memory_order_acquire);
  return std::max<int64_t>(judged, 0) * kind_.block_tokens;
}

const uint8_t* ContextualCache::SelectedKey(int slot, int layer, int head, int64_t index) const {
  const int64_t first_block =
      slots_[static_cast<size_t>(slot)].first_block.load(std::memory_order_relaxed);
  return BlockAt(slot, layer, head, first_block + index / kind_.block_tokens) +
         index % kind_.block_tokens * (kind_.part_bytes[0]);
}

ContextualCache::Counters& ContextualCache::Counters::operator+=(const Counters& other) {
  rows += other.rows;
  cpu_tokens += other.cpu_tokens;
  window_tokens += other.window_tokens;
  outside_tokens += other.outside_tokens;
  return *this;
}

void ContextualCache::Tally::Add(const Counters& more) {
  const auto add = [](std::atomic<int64_t>& to, int64_t count) {
    to.store(to.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  };
  add(rows, more.rows);
  add(cpu_tokens, more.cpu_tokens);
  add(window_tokens, more.window_tokens);
  add(outside_tokens, more.outside_tokens);
}

ContextualCache::Counters ContextualCache::Tally::Sum() const {
  return {rows.load(std::memory_order_relaxed), cpu_tokens.load(std::memory_order_relaxed),
          window_tokens.load(std::memory_order_relaxed),
          outside_tokens.load(std::memory_order_relaxed)};
}

ContextualCache::Counters ContextualCache::LayerCounters(int layer) const {
  Counters sum;
  for (const Scratch& scratch : scratch_) {
    sum += scratch.tallies[static_cast<size_t>(layer)].Sum();
  }
  return sum;
}

}  // namespace sluice
