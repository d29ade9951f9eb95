// HGCA's contextual cache: the tokens outside the window that the CPU attends to. For each
// sequence, layer and KV head it is one bit for each token of the host cache: attention reads the
// selected rows where they lie (HGCA, section 3.2.2, copies them together instead; algorithm 1,
// lines 15-25).
//
// A row's attention depends only on its position:
//   * An append is what comes before a first decode row: a prompt, pending tokens of a handoff, a
//     second turn. If its last rows were computed here, the moving average of their weights A_cpu
//     over every token outside the window of the first decode row makes the selection, before the
//     sequence counts as warm (Evaluate).
//   * Otherwise (everything was handed over) the first decode row attends to every token outside
//     the window. Its own weights make the selection, and the next row sees the result.
//   * A later row attends to the selected tokens of the blocks that have left, except for the block
//     that left last: until the next one leaves, rows attend to all of its tokens. So its selection
//     has the time of a whole block, off the path, and every token is judged before it is left out.
//
// Selection runs ahead on a thread of its own (SelectAhead). A worker that needs a selection that
// is not there makes it itself, or waits for the thread that makes it: no result depends on which
// came first.
//
// Threads: Join to Evict on the engine's, Attend and ListTokens on workers', SelectAhead on one
// thread. The bits of a block are written once, before the block counts as judged, and readers read
// judged blocks alone. An append writes them anew, when nobody reads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/prompt_queries.h"
#include "src/attention/policies/hgca/window.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class ContextualCache : public CoAttention::Source {
 public:
  struct Options {
    Device* device = nullptr;
    const kernels::KernelTable* kernels = nullptr;
    CacheLayout layout;  // has one kind, K and V
    int slots = 0;
    int heads = 0;
    int workers = 0;  // number of workers that call Attend
    int max_context = 0;
    int first_layer = 0;       // first layer for which Attend is called
    uint8_t* arena = nullptr;  // memory of the host caches' pages
    // Queries of the last rows of prompts, in memory that the host reads. Outlives the cache. Null:
    // Evaluate is not called.
    const PromptQueries* queries = nullptr;
    HgcaWindow window;
    float beta = 1;
    std::vector<float> betas;  // [layers][kv_heads]; empty: `beta` everywhere
    int following = 0;
    float alpha = 0;
    kernels::GroupReduction reduction = kernels::GroupReduction::kMax;
    // How long a worker waits for a selection that another thread makes.
    absl::Duration patience = absl::Seconds(1);
  };
  // RESOURCE_EXHAUSTED: there is no pinned memory for the averages.
  static absl::StatusOr<std::unique_ptr<ContextualCache>> Create(const Options& options);

  // Takes note that a sequence moves into the slot. All pages of `home` are there. Nothing is
  // selected yet.
  void Join(int slot, const SequenceCache& home);
  // Forgets what was selected: the next decode row selects anew, unless Evaluate does. REQUIRES:
  // every step that has the slot is done.
  void Append(int slot);
  // Asks for the selection of an append before `first_row`, its first decode row, by the queries of
  // the `rows` rows before that, which Options::queries has once `queries_there` is ready.
  // SelectAhead or EvaluateNow makes the selection. REQUIRES: Append was called, and Leave is not
  // called before Evaluated.
  void Evaluate(int slot, int32_t first_row, int rows, const Event* queries_there);
  bool Evaluated(int slot) const;
  void WaitEvaluated(int slot) const;
  // Makes that selection. Returns false if the queries are not there yet. REQUIRES:
  // !Evaluated(slot), and nobody calls SelectAhead.
  bool EvaluateNow(int slot);
  // Ends the sequence. When it returns no thread selects for the slot any more. REQUIRES: no worker
  // attends to it.
  void Leave(int slot);

  // Returns where the device puts the averages of a block that leaves the window, float32
  // [kv_heads][block_tokens], pinned. They stay until those of block + 2 come.
  float* Averages(int slot, int layer, int64_t block) const;
  // Announces that, once `done` is ready, blocks [0, blocks) will have left the window and their
  // averages be there. `done` stays the caller's, and may be recorded again.
  void Evict(int slot, int64_t blocks, const Event* done);

  // Keeps, for ListTokens, how many tokens the lists of the slot's next decode row hold as far as
  // they are selected. Called before the row's step is launched; at most three steps are under way.
  void Announce(int slot, int32_t position);
  // Writes what Announce kept for the row, so that every worker is told the same while selection
  // goes on. Without an Announce for the sequence it is all tokens outside the window.
  void ListTokens(int channel, int slot, int32_t position, int32_t* tokens) const override;

  // The sequence stays until it returns, even if the round no longer waits for that.
  absl::Status Attend(int worker, const CoAttention::Task& task,
                      absl::FunctionRef<bool()> owes) override;

  // Makes every selection that is known to be needed and can be made. Returns whether some wait for
  // an event. Called by one thread, ahead of the workers; calling it is optional.
  bool SelectAhead();
  // SelectAhead's thread uses these: work() changes whenever there is more to select, and
  // WaitForWork waits for a change.
  uint32_t work() const { return work_.load(std::memory_order_acquire); }
  void WaitForWork(uint32_t seen) const { work_.wait(seen, std::memory_order_acquire); }
  void Wake();

  // Return the tokens that are selected, and the number of tokens that were judged. REQUIRES: no
  // step is under way.
  int64_t SelectedTokens(int slot, int layer, int head) const;
  int64_t JudgedTokens(int slot, int layer, int head) const;
  std::vector<int32_t> Selected(int slot, int layer, int head) const;

  // Returns how many of an append's last rows judge `tokens` tokens. Judging costs a thread as much
  // as one row's attention to all of them for each row, so that long sequences are judged by fewer
  // rows.
  static int JudgingRows(int64_t tokens);
  static constexpr int kMostJudgingRows = 8;

  // Sums over all sequences so far. REQUIRES: no step is under way.
  struct Counters {
    int64_t rows = 0;            // decode rows
    int64_t cpu_tokens = 0;      // tokens x KV heads that workers attended to
    int64_t window_tokens = 0;   // tokens x KV heads that the window's attention covered
    int64_t outside_tokens = 0;  // tokens x KV heads outside the window

    Counters& operator+=(const Counters& other);
  };
  Counters LayerCounters(int layer) const;

 private:
  static constexpr int kSnapshots = 4;
  static constexpr int32_t kNever = INT32_MAX;

  // State of one (slot, layer, KV head).
  struct alignas(64) Entry {
    std::atomic<bool> busy{false};  // a thread selects
    // Blocks [0, judged) were judged; -1: none since the last append.
    std::atomic<int64_t> judged{-1};
    // Position of the row whose weights select anew; -1: there is none yet.
    std::atomic<int64_t> evaluated_at{-1};
    std::atomic<int32_t> count{0};  // selected tokens of the judged blocks
  };
  struct Slot {
    // Number of the sequence and its append; 0: none. A thread that selects for another number
    // gives up.
    std::atomic<uint64_t> sequence{0};
    std::atomic<int64_t> evicted{0};  // blocks
    std::atomic<const Event*> evicted_done{nullptr};
    // Event of the queries of an append that is to be evaluated; null: there is none.
    std::atomic<const Event*> queries_there{nullptr};
    std::atomic<int32_t> first_row{0};
    std::atomic<int32_t> rows{0};  // rows of the append that are known

    // The first rows for which the snapshots of list lengths count; kNever: a snapshot is being
    // written, or is another sequence's. Rows use the newest snapshot that counts for them, and one
    // is written when four newer rows than its last may not yet have been launched.
    std::array<std::atomic<int32_t>, kSnapshots> from;
    // The engine thread's alone.
    int next_snapshot = 0;
    int64_t outside = -1;   // blocks outside in the newest snapshot; -1: there is none
    bool complete = false;  // every list of it had been selected
  };
  // Counters that one thread adds to. A late thread adds when no step is under way.
  struct Tally {
    std::atomic<int64_t> rows{0}, cpu_tokens{0}, window_tokens{0}, outside_tokens{0};

    void Add(const Counters& more);
    Counters Sum() const;
  };
  // Scratch memory of a thread that attends or selects.
  struct Scratch {
    std::vector<int32_t> list;   // [max_context]: the tokens of one head
    std::vector<float> o, lse;   // [group][head_dim], [kMostJudgingRows][group]
    std::vector<float> weights;  // [chunk]
    std::vector<Tally> tallies;  // [layers]
  };
  // A row that judges tokens for one KV head.
  struct JudgingRow {
    const float* q;    // [group][head_dim]
    const float* lse;  // [group]: of all tokens that are judged
  };

  ContextualCache(const Options& options, Buffer averages);
  // Returns the blocks that are processed between two checks that the sequence is still there.
  int64_t ChunkBlocks() const;

  size_t EntryIndex(int slot, int layer, int head) const {
    return (static_cast<size_t>(slot) * static_cast<size_t>(layers_) + static_cast<size_t>(layer)) *
               static_cast<size_t>(kind_.heads) +
           static_cast<size_t>(head);
  }
  Entry& EntryOf(int slot, int layer, int head) { return entries_[EntryIndex(slot, layer, head)]; }
  const Entry& EntryOf(int slot, int layer, int head) const {
    return entries_[EntryIndex(slot, layer, head)];
  }
  // Returns the page numbers of the slot's host cache, from its first block on.
  int32_t* PagesOf(int slot, int layer) const {
    return pages_.get() + (int64_t{slot} * layers_ + layer) * most_blocks_;
  }
  // Returns the selection's bits: whole words for each block, its first token in the lowest bit.
  uint16_t* BitsOf(int slot, int layer, int head) const {
    return bits_.get() + EntryIndex(slot, layer, head) * static_cast<size_t>(words_);
  }
  std::atomic<int32_t>& SnapshotOf(int slot, int snapshot, int layer, int head) const {
    const size_t slots = (static_cast<size_t>(slot) * kSnapshots + static_cast<size_t>(snapshot));
    return snapshots_[slots * static_cast<size_t>(layers_ * kind_.heads) +
                      static_cast<size_t>(layer * kind_.heads + head)];
  }
  float BetaOf(int layer, int head) const {
    return options_.betas.empty() ? options_.beta
                                  : options_.betas[static_cast<size_t>(layer * kind_.heads + head)];
  }
  // Returns the cache of one KV head, as that of a model with a single one.
  kernels::PagedCache View(const int32_t* pages, int head) const;
  bool Has(int slot, uint64_t sequence) const {
    return slots_[static_cast<size_t>(slot)].sequence.load(std::memory_order_acquire) == sequence;
  }

  // Attends with a head's queries [group][head_dim] to `count` tokens of the host cache: those of
  // `list`, which are before the row's position, or the first ones if it is null. Writes o and lse
  // of the group.
  void AttendTo(int slot, int layer, int head, int32_t position, const float* q, float scale,
                const int32_t* list, int64_t count, float* o, float* lse) const;
  // Keeps what EvaluateHead needs of the row, for the task's heads.
  void KeepRow(const CoAttention::Task& task, uint64_t sequence);

  // Waits until blocks [0, blocks) are judged, or judges them.
  absl::Status Settle(int slot, int layer, int head, uint64_t sequence, int64_t blocks,
                      Scratch& scratch);
  // Selects blocks up to `blocks`. Returns false if the sequence is not there any more, or has no
  // row to judge by. REQUIRES: entry.busy is the caller's.
  bool Advance(int slot, int layer, int head, uint64_t sequence, int64_t blocks, Scratch& scratch);
  bool EvaluateHead(int slot, int layer, int head, uint64_t sequence, Scratch& scratch);
  void EvaluateAppended(int slot, int layer, int head, uint64_t sequence, Scratch& scratch);
  // Selects among the first `blocks` blocks by the moving average of the rows' weights. Returns
  // false if the sequence is not there any more.
  bool Judge(int slot, int layer, int head, uint64_t sequence, int64_t blocks,
             absl::Span<const JudgingRow> rows, Scratch& scratch);
  void SelectBlock(int slot, int layer, int head, int64_t block);
  // Writes the bits of tokens [first, first + tokens), whole blocks, by their weights; returns how
  // many were selected.
  int32_t Mark(int slot, int layer, int head, int64_t first, const float* weights, int64_t tokens,
               int64_t size) const;
  // Writes the selected tokens of the first `blocks` blocks to `list` and returns their number.
  int64_t List(int slot, int layer, int head, int64_t blocks, int32_t* list) const;
  void Forget(int slot);
  static void Claim(Entry& entry);

  static constexpr int32_t kSlotZero_ = 0;  // slot number in a cache of one sequence
  static constexpr int kWordTokens = 16;

  const Options options_;
  const CacheKind kind_;
  const int layers_;
  const int group_;
  const int head_dim_;
  const int64_t most_blocks_;               // blocks of a host cache
  const int64_t block_words_;               // of a block's bits
  const int64_t words_;                     // of a selection's bits
  const Buffer averages_;                   // float32 [layers][slots][2][kv_heads][block_tokens]
  const std::unique_ptr<int32_t[]> pages_;  // [slots][layers][most_blocks]
  // [slots][layers][kv_heads][words]. Not set at the start, so that memory of unused slots and of
  // contexts that never come is not taken from the system.
  const std::unique_ptr<uint16_t[]> bits_;
  const std::unique_ptr<std::atomic<int32_t>[]> snapshots_;  // [slots][kSnapshots][layers][heads]
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;
  uint64_t sequences_ = 0;        // numbers given so far
  std::vector<Scratch> scratch_;  // one for each worker, then SelectAhead's
  // Queries and lse of the rows that select anew, [slots][layers][heads] x [head_dim] and x 1.
  std::vector<float> row_queries_, row_lse_;
  std::atomic<float> scale_{0};
  std::atomic<uint32_t> work_{0};
};

}  // namespace sluice
