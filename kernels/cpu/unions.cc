// SelectUnion for every path: exact, and linear in the blocks of a row. Each head's cut is found as
// in TopK. Then one walk over the blocks, 64 at a time, joins what the heads select, so that no
// head's selection has to be kept.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/score_cut.h"
#include "kernels/fluxion_segments.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMostGroup = 64;  // query heads of a KV head
constexpr int64_t kWordBlocks = 64;

// Returns 64 bytes of 0 or 1 as bits. Eight bytes at a time are multiplied, so that their bits meet
// in the highest byte; bytes are made in vectors, which bits are not.
uint64_t BitsOf(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < kWordBlocks / 8; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, sizeof(eight));
    bits |= (eight * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}

// The selection of one head, among the blocks of the cpu segment.
struct HeadCut {
  const float* scores;  // of the segment's first block on
  Cut cut;

  // Returns the bits of those of the `count` <= 64 blocks from `first` on that are selected.
  // REQUIRES: calls come in the order of blocks, and leave none out.
  uint64_t Take(int64_t first, int64_t count) {
    uint8_t is_above[kWordBlocks] = {}, is_same[kWordBlocks] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t of = KeyOf(scores[first + i]);
      is_above[i] = of > cut.key;
      is_same[i] = of == cut.key;
    }
    uint64_t above = BitsOf(is_above), same = BitsOf(is_same);
    for (; same != 0 && cut.equal > 0; --cut.equal) {
      above |= same & -same;
      same &= same - 1;
    }
    return above;
  }
};

// The union of what the heads of (row, KV head) select.
class Union {
 public:
  // REQUIRES: the list has a level.
  Union(const SelectUnionParams& p, int64_t list) {
    const int64_t r = list / p.kv_heads, group = p.heads / p.kv_heads;
    const int32_t level = p.levels[list];
    if (level >= kFluxionLevels || LevelTokens(level) % p.unit_tokens != 0) {
      KernelCheckFailed("select_union: a block is a whole number of units");
    }
    const FluxionSegments segments = SegmentsOf(p.positions[r]);
    first_block_ = FirstBlock(segments, level);
    blocks_ = CpuBlocks(segments, level);
    units_ = LevelTokens(level) / p.unit_tokens;
    sink_units_ = segments.sink / p.unit_tokens;
    const int64_t first_head = r * p.heads + list % p.kv_heads * group;
    for (int64_t h = first_head; h < first_head + group; ++h) all_ |= p.blocks[h] >= blocks_;
    if (all_) return;  // what other heads select does not matter
    for (int64_t h = first_head; h < first_head + group; ++h) {
      if (p.blocks[h] <= 0) continue;
      const float* scores = p.scores + h * p.score_stride + first_block_;
      heads_[count_++] = {scores, CutOf({scores, 0, blocks_, 0}, p.blocks[h])};
    }
  }

  // Writes the units to `out`, and returns how many there are.
  int32_t List(int32_t* out, int32_t capacity) {
    int32_t listed = 0;
    if (!all_ && count_ == 0) return 0;
    for (int64_t first = 0; first < blocks_; first += kWordBlocks) {
      for (uint64_t word = WordAt(first); word != 0; word &= word - 1) {
        const int64_t begin = (first_block_ + first + __builtin_ctzll(word)) * units_;
        for (int64_t unit = Max(begin, sink_units_); unit < begin + units_; ++unit) {
          if (listed == capacity) KernelCheckFailed("select_union: a list of units has no room");
          out[listed++] = static_cast<int32_t>(unit);
        }
      }
    }
    return listed;
  }

 private:
  // Returns the bits of the next selected blocks, which are [first, first + kWordBlocks).
  uint64_t WordAt(int64_t first) {
    const int64_t count = Min(kWordBlocks, blocks_ - first);
    if (all_) return ~uint64_t{0} >> (kWordBlocks - count);
    uint64_t word = 0;
    for (int64_t i = 0; i < count_; ++i) word |= heads_[i].Take(first, count);
    return word;
  }

  int64_t first_block_, blocks_;  // of the cpu segment
  int64_t units_;                 // of a block
  int64_t sink_units_;
  bool all_ = false;
  int64_t count_ = 0;  // heads that select some blocks, not all
  HeadCut heads_[kMostGroup];
};

}  // namespace

// A worker takes whole lists. The counters of a slot are sums over its lists, in any order of
// workers.
void SelectUnion(const SelectUnionParams& p, Worker worker) {
  if (p.heads > kMostGroup * p.kv_heads ||
      (p.unit_tokens != 16 && p.unit_tokens != 32 && p.unit_tokens != 64)) {
    KernelCheckFailed("select_union: units of 16, 32 or 64 tokens, and up to 64 heads in a group");
  }
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t slot = p.slots[list / p.kv_heads];
    int32_t& count = p.selected.counts[list];
    count = 0;
    if (slot < 0) continue;
    if (p.levels[list] >= 0) {
      const int64_t capacity = p.selected.capacity;
      count = Union(p, list).List(p.selected.units + list * capacity, p.selected.capacity);
    }
    if (p.counters == nullptr) continue;
    SparseCounters& counters = p.counters[slot];
    if (list % p.kv_heads == 0) __atomic_fetch_add(&counters.steps, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counters.selected, int64_t{count} * p.unit_tokens, __ATOMIC_RELAXED);
  }
}

}  // namespace sluice::kernels::cpu
