#include "src/attention/policies/fluxion/host_scores.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/scalar.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// A list is cut at multiples of about this many blocks: few against a worker's share, and enough
// that a call of the kernel costs nothing.
constexpr int64_t kPieceBlocks = 64;

}  // namespace

// One worker's share of a round, in memory of its own: it scores a copy of the request, with a copy
// of the page numbers, and its scores lie here until they are given. So a late worker touches
// nothing that belongs to another round by then. The functions Take... and Give are called while
// the worker holds the round; the work between them is done without holding it.
class HostScores::Worker {
 public:
  explicit Worker(const Options& options)
      : options_(options),
        shape_(options.shape),
        group_(shape_.heads / shape_.kv_heads),
        q_(static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.head_dim)),
        levels_(static_cast<size_t>(shape_.kv_heads)),
        blocks_(static_cast<size_t>(shape_.heads)),
        scores_(static_cast<size_t>(shape_.heads * shape_.score_stride())) {
    lists_.reserve(static_cast<size_t>(shape_.lists()));
    groups_.reserve(static_cast<size_t>(shape_.rows));
    items_.reserve(lists_.capacity());
    int64_t pages = 0;
    for (const kernels::LevelDigests& of_layer : options.digests) {
      const int32_t per_page = of_layer.of[0].rows_per_page;
      if (per_page > 0) pages = std::max(pages, shape_.score_stride() / per_page + 1);
    }
    pages_.resize(static_cast<size_t>(pages));
  }

  // Blocks [begin, end) of a list, counted from the first that has a score: pieces [first, last) of
  // `pieces`.
  struct Item {
    int32_t row = 0, slot = 0, position = 0;
    int32_t kv_head = 0, level = 0;
    int first = 0, last = 0, pieces = 1;
    int64_t begin = 0, end = 0;
  };
  const std::vector<Item>& items() const { return items_; }

  // Takes the worker's items; `bit` is the worker's among those of SlotWorkers::Servers. Returns
  // whether the worker serves any row.
  bool TakeItems(const Side& request, const SlotWorkers& workers, uint64_t bit) {
    bool serves = false;
    lists_.clear();
    items_.clear();
    groups_.clear();
    for (int32_t row = 0; row < *request.rows; ++row) {
      const int32_t slot = request.slots[row];
      const uint64_t servers = slot < 0 ? 0 : workers.Servers(slot);
      if ((servers & bit) == 0) continue;
      serves = true;
      Group& group = GroupOf(servers);
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        const int64_t blocks = ScoredBlocks(request, row, head);
        if (blocks == 0) continue;
        lists_.push_back({row, head, servers, group.blocks, blocks});
        group.blocks += blocks;
      }
    }
    for (const List& list : lists_) Divide(request, list, bit);
    return serves;
  }

  // Takes what an item's scores depend on but the digests.
  void TakeRequest(const Side& request, int layer, const Item& item) {
    const int64_t dim = shape_.head_dim, first_head = item.kv_head * group_;
    const int64_t head = int64_t{item.row} * shape_.heads + first_head;
    std::copy_n(request.q + head * dim, group_ * dim, q_.begin() + first_head * dim);
    std::copy_n(request.blocks + head, group_, blocks_.begin() + first_head);
    const kernels::PagedRows& rows = options_.digests[static_cast<size_t>(layer)].of[item.level];
    const int64_t first = FirstRow(item);
    const int64_t begin = (first + item.begin) / rows.rows_per_page;
    const int64_t end = (first + item.end - 1) / rows.rows_per_page + 1;
    SLUICE_CHECK(end <= std::ssize(pages_));
    const int32_t* const table = rows.page_table + item.slot * rows.table_stride;
    std::copy(table + begin, table + end, pages_.begin() + begin);
  }

  void Compute(int layer, const Item& item) {
    constexpr int32_t kFirst = 0;  // the copy is of one sequence, in slot 0
    std::fill(levels_.begin(), levels_.end(), -1);
    levels_[static_cast<size_t>(item.kv_head)] = item.level;
    kernels::LevelScoresParams p{};
    p.q = q_.data();
    p.q_stride = int64_t{shape_.heads} * shape_.head_dim;
    p.slots = &kFirst;
    p.positions = &item.position;
    p.digests = options_.digests[static_cast<size_t>(layer)];
    p.digests.of[item.level].page_table = pages_.data();
    p.levels = levels_.data();
    p.blocks = blocks_.data();
    p.scores = scores_.data();
    p.score_stride = shape_.score_stride();
    p.rows = 1;
    p.heads = shape_.heads;
    for (int piece = item.first; piece < item.last; ++piece) {
      options_.kernels->level_scores(p, {piece, item.pieces});
    }
  }

  void Give(const Side& answer, const Item& item) const {
    const int64_t all = kernels::CpuBlocks(kernels::SegmentsOf(item.position), item.level);
    const int64_t stride = shape_.score_stride(), at = FirstRow(item) + item.begin;
    for (int64_t head = item.kv_head * group_; head < (item.kv_head + 1) * group_; ++head) {
      const int32_t selected = blocks_[static_cast<size_t>(head)];
      if (selected <= 0 || selected >= all) continue;
      std::copy_n(scores_.begin() + head * stride + at, item.end - item.begin,
                  answer.scores + (int64_t{item.row} * shape_.heads + head) * stride + at);
    }
  }

 private:
  // A list that has scores, and how many blocks the lists before it have that the same workers
  // serve.
  struct List {
    int32_t row, kv_head;
    uint64_t servers;
    int64_t before, blocks;
  };
  // Rows with the same servers. Nearly always all rows of a worker have the same; they differ only
  // after workers have died.
  struct Group {
    uint64_t servers;
    int64_t blocks;
  };

  static int64_t FirstRow(const Item& item) {
    return kernels::FirstBlock(kernels::SegmentsOf(item.position), item.level);
  }

  Group& GroupOf(uint64_t servers) {
    for (Group& group : groups_) {
      if (group.servers == servers) return group;
    }
    return groups_.emplace_back(Group{servers, 0});
  }

  // Returns the blocks of a list that have scores for some query head.
  int64_t ScoredBlocks(const Side& request, int32_t row, int32_t kv_head) const {
    const int32_t level = request.levels[int64_t{row} * shape_.kv_heads + kv_head];
    if (level < 0) return 0;
    const int32_t all = kernels::CpuBlocks(kernels::SegmentsOf(request.positions[row]), level);
    const int32_t* const blocks = request.blocks + int64_t{row} * shape_.heads + kv_head * group_;
    const bool scored =
        std::any_of(blocks, blocks + group_, [all](int32_t n) { return n > 0 && n < all; });
    return scored ? all : 0;
  }

  // Adds the pieces of a list that begin in the worker's share of its group's blocks.
  void Divide(const Side& request, const List& list, uint64_t bit) {
    const int rank = std::popcount(list.servers & (bit - 1));
    const kernels::Range mine =
        kernels::Share(GroupOf(list.servers).blocks, {rank, std::popcount(list.servers)});
    if (mine.end <= list.before || list.before + list.blocks <= mine.begin) return;
    Item item{list.row, request.slots[list.row], request.positions[list.row], list.kv_head};
    item.level = request.levels[int64_t{list.row} * shape_.kv_heads + list.kv_head];
    item.pieces = static_cast<int>(kernels::CeilDiv(list.blocks, kPieceBlocks));
    const auto begin = [&](int piece) {
      return kernels::Share(list.blocks, {piece, item.pieces}).begin;
    };
    while (item.first < item.pieces && list.before + begin(item.first) < mine.begin) ++item.first;
    item.last = item.first;
    while (item.last < item.pieces && list.before + begin(item.last) < mine.end) ++item.last;
    item.begin = begin(item.first);
    item.end = begin(item.last);
    if (item.first < item.last) items_.push_back(item);
  }

  const Options& options_;
  const FluxionShape& shape_;
  const int64_t group_;  // query heads per KV head
  std::vector<List> lists_;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  // Arrays of one row, as in LevelScoresParams.
  std::vector<float> q_;         // [heads][head_dim]
  std::vector<int32_t> levels_;  // [kv_heads]
  std::vector<int32_t> blocks_;  // [heads]
  std::vector<float> scores_;    // [heads][score_stride]
  std::vector<int32_t> pages_;   // by page of an array; only the item's are valid
};

HostScores::HostScores(const Options& options) : options_(options) {
  for (int w = 0; w < options_.workers; ++w) shares_.push_back(std::make_unique<Worker>(options_));
}

HostScores::~HostScores() = default;

absl::StatusOr<std::unique_ptr<HostScores>> HostScores::Create(const Options& given) {
  Options options = given;
  if (options.kernels == nullptr) options.kernels = kernels::AvailableKernelTables().back();
  if (options.kernels->level_scores == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("the kernels ", options.kernels->name, " have no scores of Fluxion's levels"));
  }
  auto made = std::unique_ptr<HostScores>(new HostScores(options));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  return made;
}

absl::Status HostScores::Allocate() {
  const FluxionShape& shape = options_.shape;
  const BufferAllocator allocator(options_.device, "scores by CPU workers");
  const int64_t rows = shape.rows, values = rows * shape.heads;
  const int64_t words = 1 + 2 * rows + shape.lists() + values + (rows + 1);
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &words_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, values * shape.head_dim, &q_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, values * shape.score_stride(), &scores_));
  side_.rows = words_.as<int32_t>();
  side_.slots = side_.rows + 1;
  side_.positions = side_.slots + rows;
  side_.levels = side_.positions + rows;
  side_.blocks = side_.levels + shape.lists();
  side_.q = q_.as<float>();
  side_.scores = scores_.as<float>();
  counts_ = side_.blocks + values;
  for (int32_t i = 0; i <= rows; ++i) counts_[i] = i;
  return absl::OkStatus();
}

void HostScores::ServeWith(SlotWorkers* workers, int first_channel) {
  workers_ = workers;
  first_channel_ = first_channel;
}

const float* HostScores::Score(Stream& stream, int layer, const Queries& queries,
                               const int32_t* levels, const int32_t* blocks) {
  const FluxionShape& shape = options_.shape;
  SLUICE_CHECK(workers_ != nullptr && queries.rows <= shape.rows && queries.heads == shape.heads);
  kernels::CopyRowsParams post{};
  constexpr auto kWord = static_cast<int64_t>(sizeof(int32_t));
  const auto piece = [&post](const void* source, int64_t source_pitch, void* target, int32_t rows,
                             int64_t words) {
    post.pieces[post.count++] = {source,
                                 target,
                                 source_pitch,
                                 words * kWord,
                                 nullptr,
                                 rows,
                                 static_cast<int32_t>(words * kWord)};
  };
  const int64_t rows = queries.rows;
  piece(queries.q, queries.stride * kWord, side_.q, queries.rows,
        int64_t{shape.heads} * shape.head_dim);
  piece(counts_ + rows, 0, side_.rows, 1, 1);
  piece(queries.slots, 0, side_.slots, 1, rows);
  piece(queries.positions, 0, side_.positions, 1, rows);
  piece(levels, 0, side_.levels, 1, rows * shape.kv_heads);
  piece(blocks, 0, side_.blocks, 1, rows * shape.heads);
  options_.device->kernels().CopyRows(stream, post);
  workers_->Raise(stream, first_channel_ + layer);
  workers_->Await(stream, first_channel_ + layer);
  return side_.scores;
}

absl::StatusOr<bool> HostScores::Share(int worker, int layer) {
  Worker& share = *shares_[static_cast<size_t>(worker)];
  {
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return false;
    if (!share.TakeItems(side_, *workers_, uint64_t{1} << worker)) return false;
  }
  SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
  const absl::Cleanup rest = [this, worker] { workers_->SetReading(worker, -1); };
  for (const Worker::Item& item : share.items()) {
    {
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return true;
      // Stored while the step still waits, so that whoever sees the step done sees this too.
      workers_->SetReading(worker, item.slot);
      share.TakeRequest(side_, layer, item);
    }
    share.Compute(layer, item);
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return true;
    share.Give(side_, item);
  }
  return true;
}

}  // namespace sluice
