// The worker's side of a round in which lists are made: parts of scores, and whole selections.
#include "src/attention/policies/fluxion/host_scores.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/claim_plan.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
namespace {

// A part has so many blocks at least: 64 KiB of digests of 128 elements in e4m3, in some 15 us.
constexpr int32_t kPartBlocks = 128;
// Fixed cost of a part beside its blocks, in blocks; a list that has no scores is one such part.
constexpr int32_t kFixedBlocks = 16;

}  // namespace

// One worker's share of a round, in memory of its own: it scores a copy of the request, with a copy
// of the page numbers, and its scores and its selection lie here until they are given. So a late
// worker touches nothing that belongs to another round by then.
class HostScores::Worker {
 public:
  explicit Worker(const Options& options)
      : options_(options),
        shape_(options.shape),
        group_(shape_.heads / shape_.kv_heads),
        plan_(static_cast<size_t>(shape_.lists())),
        counts_(static_cast<size_t>(shape_.lists())),
        q_(static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.head_dim)),
        levels_(static_cast<size_t>(shape_.kv_heads)),
        blocks_(static_cast<size_t>(shape_.heads)),
        scores_(static_cast<size_t>(shape_.heads * shape_.score_stride())),
        units_(static_cast<size_t>(shape_.most_units)) {
    lists_.reserve(counts_.size());
    int64_t pages = 0;
    for (const kernels::LevelDigests& of_layer : options.digests) {
      const int32_t per_page = of_layer.of[0].rows_per_page;
      if (per_page > 0) pages = std::max(pages, shape_.score_stride() / per_page + 1);
    }
    pages_.resize(static_cast<size_t>(pages));
  }

  // Takes the lists of the rows that the worker serves, and plans with which parts it begins; `bit`
  // is the worker's among those of SlotWorkers::Servers.
  void TakeLists(const Round& round, const Side& side, const SlotWorkers& workers, uint64_t bit) {
    lists_.clear();
    plan_.Clear();
    whole_ = false;
    for (int32_t row = 0; row < round.rows; ++row) {
      const int32_t slot = round.slots[row];
      const uint64_t servers = slot < 0 ? 0 : workers.Servers(slot);
      if ((servers & bit) == 0) continue;
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        TakeList(round, side, row, head, servers);
      }
    }
    plan_.Divide(bit);
  }

  // Claims the selection of the list whose scores have become whole, or the next part of the plan,
  // and takes what the task depends on but the digests. Returns false if nothing is left.
  bool Claim(const Round& round, const Side& side) {
    if (whole_) {
      whole_ = false;
      selects_ = true;
      if (list_.parts > 1) CopyScores(side.scores, 0, list_.blocks, Way::kTake);
      return true;
    }
    const std::optional<ClaimPlan::Claimed> claimed = plan_.Next(Board(round));
    if (!claimed.has_value()) return false;
    part_ = claimed->part;
    list_ = lists_[claimed->item];
    selects_ = !list_.scored;
    const int64_t index = plan_.list(claimed->item);
    const int64_t first_head = list_.kv_head * group_;
    std::copy_n(side.blocks + index * group_, group_, blocks_.begin() + first_head);
    if (selects_) return true;
    const int64_t dim = shape_.head_dim;
    std::copy_n(round.q + index * group_ * dim, group_ * dim, q_.begin() + first_head * dim);
    TakePages(round.channel);
    return true;
  }
  // Returns the slot of the claimed part's sequence.
  int slot() const { return list_.slot; }

  void Compute(int layer) {
    if (selects_) {
      Select();
    } else {
      Score(layer);
    }
  }

  // Gives scores, or the list, which is returned then.
  std::optional<int64_t> Give(const Round& round, const Side& side, Counters& counters) {
    const int64_t index = int64_t{list_.row} * shape_.kv_heads + list_.kv_head;
    if (!selects_) {
      const Blocks mine = BlocksOf(list_, part_);
      if (list_.parts > 1) CopyScores(side.scores, mine.begin, mine.end, Way::kGive);
      whole_ = Board(round).Finish(index, part_);
      return std::nullopt;
    }
    std::copy_n(units_.begin(), missing_, round.lists.units + index * round.lists.capacity);
    round.lists.counts[index] = missing_;
    const auto add = [this](std::atomic<int64_t>& to, int64_t units) {
      to.fetch_add(units * shape_.unit_tokens, std::memory_order_relaxed);
    };
    add(counters.selected, selected_);
    add(counters.missing, missing_);
    if (list_.kv_head == 0) counters.steps.fetch_add(1, std::memory_order_relaxed);
    return index;
  }

 private:
  // A list of a row that the worker serves.
  struct List {
    int32_t row, kv_head;
    int32_t slot, position, level;
    int32_t blocks;  // of the cpu segment; 0: no level
    bool scored;     // some head selects some blocks and not all
    int parts;       // 1 if it is not scored
  };
  enum class Way { kTake, kGive };

  void Score(int layer) {
    constexpr int32_t kFirst = 0;  // the copy is of one sequence, in slot 0
    std::fill(levels_.begin(), levels_.end(), -1);
    levels_[static_cast<size_t>(list_.kv_head)] = list_.level;
    kernels::LevelScoresParams p{};
    p.q = q_.data();
    p.q_stride = int64_t{shape_.heads} * shape_.head_dim;
    p.slots = &kFirst;
    p.positions = &list_.position;
    p.digests = options_.digests[static_cast<size_t>(layer)];
    p.digests.of[rows_level_].page_table = pages_.data();
    p.levels = levels_.data();
    p.blocks = blocks_.data();
    p.scores = scores_.data();
    p.score_stride = shape_.score_stride();
    p.rows = 1;
    p.heads = shape_.heads;
    p.head_dim = shape_.head_dim;
    options_.kernels->level_scores(p, {part_, list_.parts});
  }

  // Lists the units that the list's query heads select, then those of them that have no place. The
  // list is the only one of a row here.
  void Select() {
    constexpr int32_t kFirst = 0;
    const int64_t first_head = list_.kv_head * group_;
    kernels::SelectUnionParams p{};
    p.scores = scores_.data() + first_head * shape_.score_stride();
    p.score_stride = shape_.score_stride();
    p.slots = &kFirst;
    p.positions = &list_.position;
    p.levels = &list_.level;
    p.blocks = blocks_.data() + first_head;
    p.selected = {units_.data(), &selected_, shape_.most_units};
    p.rows = 1;
    p.heads = static_cast<int32_t>(group_);
    p.kv_heads = 1;
    p.unit_tokens = shape_.unit_tokens;
    options_.kernels->select_union(p, {0, 1});
    // Units are in ascending order.
    const int32_t ring = list_.position / shape_.unit_tokens - shape_.ring_units + 1;
    const auto end = std::lower_bound(units_.begin(), units_.begin() + selected_, ring);
    missing_ = static_cast<int32_t>(end - units_.begin());
  }

  // Copies the scores of the list's blocks [begin, end), counted from its first, of the query heads
  // that have any, between `shared` and the worker's own.
  void CopyScores(float* shared, int64_t begin, int64_t end, Way way) {
    const int64_t stride = shape_.score_stride(), at = FirstBlock(list_) + begin;
    for (int64_t head = list_.kv_head * group_; head < (list_.kv_head + 1) * group_; ++head) {
      const int32_t selected = blocks_[static_cast<size_t>(head)];
      if (selected <= 0 || selected >= list_.blocks) continue;
      float* const mine = scores_.data() + head * stride + at;
      float* const others = shared + (int64_t{list_.row} * shape_.heads + head) * stride + at;
      std::copy_n(way == Way::kGive ? mine : others, end - begin,
                  way == Way::kGive ? others : mine);
    }
  }

  static int64_t FirstBlock(const List& list) {
    return kernels::FirstBlock(kernels::SegmentsOf(list.position), list.level);
  }
  struct Blocks {
    int64_t begin, end;
  };
  // Returns the blocks of a part, counted from the list's first: those that the kernel computes as
  // worker `part` of list.parts.
  static Blocks BlocksOf(const List& list, int part) {
    const int64_t blocks = list.blocks;
    return {blocks * part / list.parts, blocks * (part + 1) / list.parts};
  }
  PartBoard Board(const Round& round) const { return {round.words, counts_.data(), kPartBlocks}; }

  void TakeList(const Round& round, const Side& side, int32_t row, int32_t kv_head,
                uint64_t servers) {
    const int64_t index = int64_t{row} * shape_.kv_heads + kv_head;
    const int32_t level = side.levels[index], position = round.positions[row];
    const int32_t all = level < 0 ? 0 : kernels::CpuBlocks(kernels::SegmentsOf(position), level);
    const int32_t* const blocks = side.blocks + index * group_;
    const auto is_some = [all](int32_t n) { return n > 0 && n < all; };
    const auto is_all = [all](int32_t n) { return n >= all; };
    // If one head selects all blocks, the selection of the others does not matter.
    const bool scored = level >= 0 && std::any_of(blocks, blocks + group_, is_some) &&
                        std::none_of(blocks, blocks + group_, is_all);
    const int32_t cost = scored ? all : 0;
    counts_[static_cast<size_t>(index)] = cost;
    const int parts = Board(round).Parts(index);
    lists_.push_back({row, kv_head, round.slots[row], position, level, all, scored, parts});
    plan_.Add(index, servers, parts, cost, (cost + parts - 1) / parts, kFixedBlocks);
  }

  // Takes the numbers of the pages that have the part's digests.
  void TakePages(int layer) {
    const kernels::LevelDigests& digests = options_.digests[static_cast<size_t>(layer)];
    const kernels::FluxionSegments segments = kernels::SegmentsOf(list_.position);
    const Blocks mine = BlocksOf(list_, part_);
    const auto rows_of = [&](int64_t block) {
      return kernels::RowsOfBlock(digests, segments, list_.level,
                                  static_cast<int32_t>(FirstBlock(list_) + block));
    };
    const kernels::DigestRows last = rows_of(mine.end - 1);
    rows_level_ = last.level;
    const kernels::PagedRows& rows = digests.of[rows_level_];
    const int64_t begin = rows_of(mine.begin).begin / rows.rows_per_page;
    const int64_t end = (last.end - 1) / rows.rows_per_page + 1;
    SLUICE_CHECK(end <= std::ssize(pages_));
    const int32_t* const table = rows.page_table + list_.slot * rows.table_stride;
    std::copy(table + begin, table + end, pages_.begin() + begin);
  }

  const Options& options_;
  const FluxionShape& shape_;
  const int64_t group_;  // query heads per KV head
  ClaimPlan plan_;
  std::vector<int32_t> counts_;  // [lists] blocks to score; only those of lists_ are valid
  std::vector<List> lists_;      // those of plan_
  // The claimed task, a part's scores or a list's selection. The arrays are those of one row, as in
  // LevelScoresParams.
  List list_{};
  int part_ = 0;
  bool selects_ = false;
  bool whole_ = false;           // the part that was given last made the list's scores whole
  int32_t rows_level_ = 0;       // the level whose digests the list's blocks are known by
  std::vector<float> q_;         // [heads][head_dim]
  std::vector<int32_t> levels_;  // [kv_heads]
  std::vector<int32_t> blocks_;  // [heads]
  std::vector<float> scores_;    // [heads][score_stride]
  std::vector<int32_t> units_;   // [most_units] that are selected; ascending
  int32_t selected_ = 0;         // units
  int32_t missing_ = 0;          // the first of these, which have no place
  std::vector<int32_t> pages_;   // by page of an array; only the part's are valid
};

HostScores::HostScores(const Options& options)
    : options_(options),
      counters_(std::make_unique<Counters[]>(static_cast<size_t>(options.shape.layers))) {
  for (int w = 0; w < options_.workers; ++w) shares_.push_back(std::make_unique<Worker>(options_));
}

HostScores::~HostScores() = default;

absl::StatusOr<std::unique_ptr<HostScores>> HostScores::Create(const Options& given) {
  Options options = given;
  if (options.kernels == nullptr) options.kernels = kernels::AvailableKernelTables().back();
  if (options.kernels->level_scores == nullptr || options.kernels->select_union == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("the kernels ", options.kernels->name, " have no scores of Fluxion's levels"));
  }
  auto made = std::unique_ptr<HostScores>(new HostScores(options));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  return made;
}

absl::Status HostScores::Allocate() {
  const FluxionShape& shape = options_.shape;
  const int64_t values = int64_t{shape.rows} * shape.heads;
  const BufferAllocator allocator(options_.device, "what CPU workers select by");
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, shape.lists() + values, &request_));
  scores_ =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(values * shape.score_stride()));
  side_.levels = request_.as<int32_t>();
  side_.blocks = side_.levels + shape.lists();
  side_.scores = scores_.get();
  return absl::OkStatus();
}

void HostScores::Post(int rows, kernels::CopyRowsParams* copies) {
  const FluxionShape& shape = options_.shape;
  SLUICE_CHECK(rows <= shape.rows);
  const auto piece = [copies, rows](const int32_t* source, int32_t* target, int32_t words) {
    const int32_t bytes = rows * words * static_cast<int32_t>(sizeof(int32_t));
    copies->pieces[copies->count++] = {source, target, 0, bytes, nullptr, 1, bytes};
  };
  piece(options_.levels, side_.levels, shape.kv_heads);
  piece(options_.blocks, side_.blocks, shape.heads);
}

void HostScores::Take(int worker, const Round& round, const SlotWorkers& workers) {
  shares_[static_cast<size_t>(worker)]->TakeLists(round, side_, workers, uint64_t{1} << worker);
}

std::optional<int> HostScores::Claim(int worker, const Round& round) {
  Worker& share = *shares_[static_cast<size_t>(worker)];
  if (!share.Claim(round, side_)) return std::nullopt;
  return share.slot();
}

void HostScores::Compute(int worker, int channel) {
  shares_[static_cast<size_t>(worker)]->Compute(channel);
}

std::optional<int64_t> HostScores::Give(int worker, const Round& round) {
  return shares_[static_cast<size_t>(worker)]->Give(round, side_,
                                                    counters_[static_cast<size_t>(round.channel)]);
}

void HostScores::Count(int layer, PolicyStatistics::Layer* sums) const {
  const Counters& counters = counters_[static_cast<size_t>(layer)];
  sums->steps += counters.steps.load(std::memory_order_relaxed);
  sums->selected += counters.selected.load(std::memory_order_relaxed);
  sums->missing += counters.missing.load(std::memory_order_relaxed);
}

}  // namespace sluice
