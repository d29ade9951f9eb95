#include "src/attention/policies/fluxion/host_scores.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/attention/offload/claim_plan.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// A part has so many blocks at least: 64 KiB of digests of 128 elements in bf16, in some 15 us.
constexpr int32_t kPartBlocks = 128;
static_assert(sizeof(PartWords) == 2 * sizeof(int32_t));

}  // namespace

// One worker's share of a round, in memory of its own: it scores a copy of the request, with a copy
// of the page numbers, and its scores lie here until they are given. So a late worker touches
// nothing that belongs to another round by then. TakeLists, Claim and Give are called while the
// worker holds the round; the work between them is done without holding it.
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
        scores_(static_cast<size_t>(shape_.heads * shape_.score_stride())) {
    lists_.reserve(counts_.size());
    int64_t pages = 0;
    for (const kernels::LevelDigests& of_layer : options.digests) {
      const int32_t per_page = of_layer.of[0].rows_per_page;
      if (per_page > 0) pages = std::max(pages, shape_.score_stride() / per_page + 1);
    }
    pages_.resize(static_cast<size_t>(pages));
  }

  // Takes the lists of the rows that the worker serves, and plans with which parts it begins; `bit`
  // is the worker's among those of SlotWorkers::Servers. Returns whether it serves any row.
  bool TakeLists(const Side& request, const SlotWorkers& workers, uint64_t bit) {
    bool serves = false;
    lists_.clear();
    plan_.Clear();
    for (int32_t row = 0; row < *request.rows; ++row) {
      const int32_t slot = request.slots[row];
      const uint64_t servers = slot < 0 ? 0 : workers.Servers(slot);
      if ((servers & bit) == 0) continue;
      serves = true;
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        TakeList(request, row, head, servers);
      }
    }
    plan_.Divide(bit);
    return serves;
  }

  // Claims the next part of the plan, and takes what its scores depend on but the digests. Returns
  // false if nothing is left.
  bool Claim(const Side& request, int layer) {
    const std::optional<ClaimPlan::Claimed> claimed = plan_.Next(Board(request));
    if (!claimed.has_value()) return false;
    part_ = claimed->part;
    list_ = lists_[claimed->item];
    const int64_t index = plan_.list(claimed->item);
    const int64_t dim = shape_.head_dim, first_head = list_.kv_head * group_;
    std::copy_n(request.q + index * group_ * dim, group_ * dim, q_.begin() + first_head * dim);
    std::copy_n(request.blocks + index * group_, group_, blocks_.begin() + first_head);
    TakePages(layer);
    return true;
  }
  // Returns the slot of the claimed part's sequence.
  int slot() const { return list_.slot; }

  void Compute(int layer) {
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

  void Give(const Side& answer) const {
    const Blocks mine = BlocksOf(list_, part_);
    const int64_t stride = shape_.score_stride(), at = FirstBlock(list_) + mine.begin;
    for (int64_t head = list_.kv_head * group_; head < (list_.kv_head + 1) * group_; ++head) {
      const int32_t selected = blocks_[static_cast<size_t>(head)];
      if (selected <= 0 || selected >= list_.blocks) continue;
      std::copy_n(scores_.begin() + head * stride + at, mine.end - mine.begin,
                  answer.scores + (int64_t{list_.row} * shape_.heads + head) * stride + at);
    }
  }

 private:
  // A list that has scores.
  struct List {
    int32_t row, kv_head;
    int32_t slot, position, level;
    int32_t blocks;
    int parts;
  };

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
  PartBoard Board(const Side& request) const {
    return {request.words, counts_.data(), kPartBlocks};
  }

  // Takes a list if it has scores for some query head.
  void TakeList(const Side& request, int32_t row, int32_t kv_head, uint64_t servers) {
    const int64_t index = int64_t{row} * shape_.kv_heads + kv_head;
    const int32_t level = request.levels[index], position = request.positions[row];
    if (level < 0) return;
    const int32_t all = kernels::CpuBlocks(kernels::SegmentsOf(position), level);
    const int32_t* const blocks = request.blocks + index * group_;
    const auto is_scored = [all](int32_t n) { return n > 0 && n < all; };
    if (!std::any_of(blocks, blocks + group_, is_scored)) return;
    counts_[static_cast<size_t>(index)] = all;
    const int parts = Board(request).Parts(index);
    lists_.push_back({row, kv_head, request.slots[row], position, level, all, parts});
    plan_.Add(index, servers, parts, all, (all + parts - 1) / parts, /*fixed_cost=*/0);
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
  std::vector<int32_t> counts_;  // [lists] blocks; only those of lists_ are valid
  std::vector<List> lists_;      // those of plan_
  // The claimed part. The arrays are those of one row, as in LevelScoresParams.
  List list_{};
  int part_ = 0;
  int32_t rows_level_ = 0;       // the level whose digests the list's blocks are known by
  std::vector<float> q_;         // [heads][head_dim]
  std::vector<int32_t> levels_;  // [kv_heads]
  std::vector<int32_t> blocks_;  // [heads]
  std::vector<float> scores_;    // [heads][score_stride]
  std::vector<int32_t> pages_;   // by page of an array; only the part's are valid
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
  const int64_t words = head_words() + 2 * rows + shape.lists() + values;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, (rows + 1) * head_words(), &heads_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &request_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, values * shape.head_dim, &q_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, values * shape.score_stride(), &scores_));
  std::fill_n(heads_.as<int32_t>(), (rows + 1) * head_words(), 0);
  for (int32_t i = 0; i <= rows; ++i) heads_.as<int32_t>()[i * head_words()] = i;
  side_.rows = request_.as<int32_t>();
  side_.words = reinterpret_cast<PartWords*>(side_.rows + 1);
  side_.slots = side_.rows + head_words();
  side_.positions = side_.slots + rows;
  side_.levels = side_.positions + rows;
  side_.blocks = side_.levels + shape.lists();
  side_.q = q_.as<float>();
  side_.scores = scores_.as<float>();
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
  piece(heads_.as<int32_t>() + rows * head_words(), 0, side_.rows, 1, head_words());
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
  const absl::Cleanup rest = [this, worker] { workers_->SetReading(worker, -1); };
  const auto claim = [&] {
    if (!share.Claim(side_, layer)) return false;
    // Stored while the step still waits, so that whoever sees the step done sees this too.
    workers_->SetReading(worker, share.slot());
    return true;
  };
  bool more = false;
  {
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return false;
    if (!share.TakeLists(side_, *workers_, uint64_t{1} << worker)) return false;
    more = claim();
  }
  SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
  while (more) {
    share.Compute(layer);
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return true;
    share.Give(side_);
    more = claim();
  }
  return true;
}

}  // namespace sluice
