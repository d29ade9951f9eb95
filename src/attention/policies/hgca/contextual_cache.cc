#include "src/attention/policies/hgca/contextual_cache.h"

#include <algorithm>
#include <bit>
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
  return std::unique_ptr<ContextualCache>(new ContextualCache(options, std::move(averages)));
}

ContextualCache::ContextualCache(const Options& options, Buffer averages)
    : options_(options),
      kind_(options.layout.kinds[0]),
      layers_(options.layout.layers),
      group_(options.heads / kind_.heads),
      head_dim_(static_cast<int>(kind_.part_bytes[0] / SizeOf(kind_.element_type))),
      most_blocks_(kind_.BlocksFor(options.max_context)),
      block_words_((kind_.block_tokens + kWordTokens - 1) / kWordTokens),
      words_((most_blocks_ * block_words_ + 3) / 4 * 4),
      averages_(std::move(averages)),
      pages_(std::make_unique<int32_t[]>(static_cast<size_t>(options.slots) *
                                         static_cast<size_t>(layers_) *
                                         static_cast<size_t>(most_blocks_))),
      bits_(std::make_unique_for_overwrite<uint16_t[]>(EntryIndex(options.slots, 0, 0) *
                                                       static_cast<size_t>(words_))),
      snapshots_(
          std::make_unique<std::atomic<int32_t>[]>(EntryIndex(options.slots, 0, 0) * kSnapshots)),
      entries_(EntryIndex(options.slots, 0, 0)),
      slots_(static_cast<size_t>(options.slots)),
      scratch_(static_cast<size_t>(options.workers) + 1) {
  SLUICE_CHECK(options.betas.empty() ||
               std::ssize(options.betas) == int64_t{layers_} * kind_.heads);
  const auto heads = static_cast<size_t>(options.heads), group = static_cast<size_t>(group_);
  const auto dim = static_cast<size_t>(head_dim_);
  for (Scratch& scratch : scratch_) {
    scratch.list.resize(static_cast<size_t>(most_blocks_ * kind_.block_tokens));
    scratch.o.resize(group * dim);
    scratch.lse.resize(kMostJudgingRows * group);
    scratch.weights.resize(static_cast<size_t>(ChunkBlocks() * kind_.block_tokens));
    scratch.tallies = std::vector<Tally>(static_cast<size_t>(layers_));
  }
  const size_t rows = slots_.size() * static_cast<size_t>(layers_) * heads;
  row_queries_.resize(rows * dim);
  row_lse_.resize(rows);
  for (Slot& slot : slots_) {
    for (std::atomic<int32_t>& from : slot.from) from.store(kNever, std::memory_order_relaxed);
  }
}

void ContextualCache::Claim(Entry& entry) {
  while (entry.busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
}

void ContextualCache::Forget(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.evicted.store(0, std::memory_order_relaxed);
  s.outside = -1;
  for (std::atomic<int32_t>& from : s.from) from.store(kNever, std::memory_order_relaxed);
  for (int layer = 0; layer < layers_; ++layer) {
    for (int head = 0; head < kind_.heads; ++head) {
      Entry& entry = EntryOf(slot, layer, head);
      Claim(entry);
      entry.judged.store(-1, std::memory_order_relaxed);
      entry.evaluated_at.store(-1, std::memory_order_relaxed);
      entry.count.store(0, std::memory_order_relaxed);
      entry.busy.store(false, std::memory_order_release);
    }
  }
}

void ContextualCache::Join(int slot, const SequenceCache& home) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(s.sequence.load(std::memory_order_relaxed) == 0, "a slot has one sequence");
  SLUICE_CHECK(home.pool()->base(0) == options_.arena);
  for (int layer = 0; layer < layers_; ++layer) {
    const std::vector<int32_t>& pages = home.Pages(layer, 0);
    std::copy_n(pages.begin(), std::min<int64_t>(std::ssize(pages), most_blocks_),
                PagesOf(slot, layer));
  }
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

// A snapshot is made for a sequence's first row, for each row until every list has been selected
// once, and whenever a block has left: a list is not selected otherwise.
void ContextualCache::Announce(int slot, int32_t position) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  const int64_t outside = options_.window.BlocksOutside(position);
  if (s.outside == outside && s.complete) return;
  const int snapshot = s.next_snapshot;
  s.next_snapshot = (snapshot + 1) % kSnapshots;
  s.outside = outside;
  s.complete = true;
  std::atomic<int32_t>& from = s.from[static_cast<size_t>(snapshot)];
  from.store(kNever, std::memory_order_release);
  for (int layer = options_.first_layer; layer < layers_; ++layer) {
    for (int head = 0; head < kind_.heads; ++head) {
      const Entry& entry = EntryOf(slot, layer, head);
      const int64_t judged = entry.judged.load(std::memory_order_acquire);
      int64_t tokens = outside * kind_.block_tokens;
      if (judged >= 0) {
        tokens -= std::min(judged, outside) * kind_.block_tokens;
        tokens += entry.count.load(std::memory_order_relaxed);
      } else {
        s.complete = outside == 0 && s.complete;
      }
      SnapshotOf(slot, snapshot, layer, head)
          .store(static_cast<int32_t>(tokens), std::memory_order_relaxed);
    }
  }
  from.store(position, std::memory_order_release);
}

void ContextualCache::ListTokens(int channel, int slot, int32_t position, int32_t* tokens) const {
  const Slot& s = slots_[static_cast<size_t>(slot)];
  int newest = -1;
  int32_t newest_from = -1;
  for (int i = 0; i < kSnapshots; ++i) {
    const int32_t from = s.from[static_cast<size_t>(i)].load(std::memory_order_acquire);
    if (from > position || from <= newest_from) continue;
    newest = i;
    newest_from = from;
  }
  for (int head = 0; head < kind_.heads; ++head) {
    tokens[head] =
        newest < 0
            ? static_cast<int32_t>(options_.window.BlocksOutside(position) * kind_.block_tokens)
            : SnapshotOf(slot, newest, channel, head).load(std::memory_order_relaxed);
  }
}

kernels::PagedCache ContextualCache::View(const int32_t* pages, int head) const {
  kernels::PagedCache cache;
  cache.base = options_.arena + head * kind_.block_bytes();
  cache.block_table = pages;
  cache.table_stride = 0;  // one sequence, in slot 0
  cache.page_bytes = kind_.page_bytes();
  cache.block_tokens = kind_.block_tokens;
  cache.kv_heads = 1;
  cache.head_dim = head_dim_;
  cache.type = kind_.element_type;
  return cache;
}

void ContextualCache::AttendTo(int slot, int layer, int head, int32_t position, const float* q,
                               float scale, const int32_t* list, int64_t count, float* o,
                               float* lse) const {
  const auto tokens = static_cast<int32_t>(count);
  kernels::SparseAttentionParams params{};
  params.q = q;
  params.q_stride = int64_t{group_} * head_dim_;
  params.slots = &kSlotZero_;
  params.positions = &position;
  params.cache = View(PagesOf(slot, layer), head);
  params.units = list;
  params.counts = &tokens;
  params.o = o;
  params.lse = lse;
  params.capacity = tokens;
  params.unit_tokens = 1;
  params.rows = 1;
  params.heads = group_;
  params.kv_head_begin = 0;
  params.kv_head_end = 1;
  params.scale = scale;
  options_.kernels->sparse_attention(params, kAlone);
}

// Algorithm 2, lines 4 and 12: attention of the CPU with the row's own query.
absl::Status ContextualCache::Attend(int worker, const CoAttention::Task& task,
                                     absl::FunctionRef<bool()> owes) {
  Scratch& scratch = scratch_[static_cast<size_t>(worker)];
  const int slot = task.slot, layer = task.channel;
  const Slot& s = slots_[static_cast<size_t>(slot)];
  const uint64_t sequence = s.sequence.load(std::memory_order_acquire);
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
  const int64_t tokens = outside * kind_.block_tokens;
  Counters counters;
  for (int head = task.head_begin; head < task.head_end; ++head) {
    const int32_t* list = nullptr;  // every token
    int64_t count = tokens;
    if (judged > 0) {
      SLUICE_RETURN_IF_ERROR(Settle(slot, layer, head, sequence, judged, scratch));
      const int64_t selected = List(slot, layer, head, judged, scratch.list.data());
      // A list of all tokens is none: rows in their order are read faster.
      if (selected < judged * kind_.block_tokens) {
        list = scratch.list.data();
        count = selected;
        for (int64_t t = judged * kind_.block_tokens; t < tokens; ++t) {
          scratch.list[static_cast<size_t>(count++)] = static_cast<int32_t>(t);
        }
      }
    }
    if (!owes()) return absl::OkStatus();
    const int64_t query = int64_t{head} * group_;
    AttendTo(slot, layer, head, task.position, task.q + query * head_dim_, task.scale, list, count,
             task.o + query * head_dim_, task.lse + query);
    counters.rows += head == 0 ? 1 : 0;
    counters.cpu_tokens += count;
    counters.outside_tokens += tokens;
    counters.window_tokens += task.position + 1 - tokens;
    if (!owes()) return absl::OkStatus();
  }
  if (evaluates) KeepRow(task, sequence);
  scratch.tallies[static_cast<size_t>(layer)].Add(counters);
  return absl::OkStatus();
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
  const int32_t selected =
      Mark(slot, layer, head, first, averages, kind_.block_tokens, window.tokens());
  entry.count.store(entry.count.load(std::memory_order_relaxed) + selected,
                    std::memory_order_relaxed);
  entry.judged.store(block + 1, std::memory_order_release);
}

int32_t ContextualCache::Mark(int slot, int layer, int head, int64_t first, const float* weights,
                              int64_t tokens, int64_t size) const {
  const float beta = BetaOf(layer, head);
  const int64_t block_tokens = kind_.block_tokens;
  uint16_t* bits = BitsOf(slot, layer, head) + first / block_tokens * block_words_;
  int32_t count = 0;
  for (int64_t block = 0; block < tokens; block += block_tokens) {
    int follows = 0;  // tokens from here on that are selected
    for (int64_t word = 0; word < block_tokens; word += kWordTokens) {
      const int64_t end = std::min<int64_t>(kWordTokens, block_tokens - word);
      uint32_t set = 0;
      for (int64_t t = 0; t < end; ++t, --follows) {
        if (IsSalient(weights[block + word + t], beta, size)) follows = options_.following + 1;
        set |= static_cast<uint32_t>(follows > 0) << t;
      }
      *bits++ = static_cast<uint16_t>(set);
      count += std::popcount(set);
    }
  }
  return count;
}

int64_t ContextualCache::List(int slot, int layer, int head, int64_t blocks, int32_t* list) const {
  const uint16_t* const bits = BitsOf(slot, layer, head);
  const int64_t words = blocks * block_words_;
  int64_t count = 0;
  const auto append = [&](uint64_t set, int64_t first) {
    for (; set != 0; set &= set - 1) {
      list[count++] = static_cast<int32_t>(first + std::countr_zero(set));
    }
  };
  int64_t word = 0;
  if (kind_.block_tokens % kWordTokens == 0) {  // no word has unused bits
    for (; word + 4 <= words; word += 4) {
      uint64_t set;
      std::memcpy(&set, bits + word, sizeof(set));
      append(set, word * kWordTokens);
    }
  }
  for (; word < words; ++word) {
    append(bits[word],
           word / block_words_ * kind_.block_tokens + word % block_words_ * kWordTokens);
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
  return EntryOf(slot, layer, head).count.load(std::memory_order_acquire);
}

int64_t ContextualCache::JudgedTokens(int slot, int layer, int head) const {
  const int64_t judged = EntryOf(slot, layer, head).judged.load(std::memory_order_acquire);
  return std::max<int64_t>(judged, 0) * kind_.block_tokens;
}

std::vector<int32_t> ContextualCache::Selected(int slot, int layer, int head) const {
  std::vector<int32_t> list(static_cast<size_t>(JudgedTokens(slot, layer, head)));
  list.resize(static_cast<size_t>(
      List(slot, layer, head, std::ssize(list) / kind_.block_tokens, list.data())));
  return list;
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
