// A move is kParts rounds of the workers (src/device/mailbox.h). The device posts the lists once
// and raises the first two rounds; after each answer it copies that part from staging to HBM and
// raises the next round but one, whose part takes the same staging buffer. So the device copies one
// part while the workers gather the next. How many rounds there are is fixed, because a recorded
// program cannot choose; how large they are follows from the lists.
//
// A worker touches the request, the host cache and the staging buffers only while it holds the
// round, for kPieceTokens tokens at a time. So one that is late reads nothing of a sequence that
// has ended, and writes nothing into buffers that belong to a later round. The device puts the
// counts of what is gathered to 0 before the first round, and a worker sets its own at the very
// end: what it did not finish is not copied.
#include "src/attention/offload/gather_mover.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/gather_plan.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

constexpr int kSides = 2;  // moves under way, those of neighbouring layers
constexpr int kParts = 8;
constexpr int kRegions = 2;  // staging buffers of a side: one is filled while the other is read
constexpr int kPieceTokens = 64;
// The hardware prefetcher does not foresee the next row of a list. Measured:
// policies/clo/README.md.
constexpr int kPrefetchTokens = 8;
constexpr int64_t kLine = 64;

// Memory for one part. Each worker's rows follow one another.
struct Region {
  Buffer rows;     // [tokens][2][row_bytes]: K, V
  Buffer offsets;  // int64 [workers]: where a worker's rows begin, in bytes
  Buffer targets;  // int32 [workers][2 * tokens of one worker]: units of K and V in HBM
};

// Memory of one move.
struct Side {
  Buffer rows, slots, counts;         // int32 [1], [max_rows], [lists]
  Buffer source_units, target_units;  // int32 [lists][capacity]
  Buffer gathered;                    // int32 [kParts][workers]: entries of `targets`
  std::array<Region, kRegions> regions;
};

// Memory of one worker.
struct Gatherer {
  GatherPlan plan;
  std::vector<uint64_t> servers;  // by row
  int64_t tokens = 0;             // gathered since the start
};

class GatherMover : public RowMover {
 public:
  explicit GatherMover(const Options& options)
      : options_(options),
        row_bytes_(int64_t{options.home.head_dim} * SizeOf(options.home.type)),
        lists_(int64_t{options.max_rows} * options.kv_heads),
        most_of_one_(GatherPlan::MostOfOne(lists_ * options.capacity, kParts)) {}

  absl::Status Begin();
  void Move(Stream& stream, int layer, const Lists& lists) override;
  SlotWorkers* workers() override { return workers_.get(); }

 private:
  absl::Status Allocate();
  void Post(Stream& stream, const Side& side, const Lists& lists);
  void PostUnits(Stream& stream, const Lists& lists, const int32_t* units, const Buffer& to);
  void Fetch(Stream& stream, const Side& side, int part);

  absl::StatusOr<bool> Serve(int worker, int channel);
  bool Plan(int worker, const Side& side, int part);
  bool Gather(int worker, const Side& side, int part);
  void Copy(const Side& side, const GatherPlan::Range& range, uint8_t* rows,
            int32_t* targets) const;
  const uint8_t* HomeRow(int64_t unit) const {
    return static_cast<const uint8_t*>(options_.home.base) + unit * row_bytes_;
  }

  const Options options_;
  const int64_t row_bytes_;
  const int64_t lists_;        // maximum number of lists
  const int64_t most_of_one_;  // maximum number of tokens of one worker in a part
  std::array<Side, kSides> sides_;
  Buffer numbers_;                        // int32 [max_rows + 1] 0, 1, ...: rows to post
  Buffer zeros_;                          // int32 [kParts][workers]
  std::vector<Gatherer> gatherers_;       // by worker
  std::unique_ptr<SlotWorkers> workers_;  // last: its threads use all members above
};

absl::Status GatherMover::Begin() {
  SLUICE_RETURN_IF_ERROR(Allocate());
  for (int w = 0; w < options_.workers; ++w) {
    gatherers_.push_back({GatherPlan(options_.max_rows, options_.kv_heads, options_.workers), {}});
    gatherers_.back().servers.reserve(static_cast<size_t>(options_.max_rows));
  }
  SlotWorkers::Options workers;
  workers.device = options_.device;
  workers.channels = kSides * kParts;
  workers.workers = options_.workers;
  workers.slots = options_.slots;
  workers.groups = std::min({2, options_.workers, options_.slots});
  workers.deadline = options_.deadline;
  workers.duty = WorkerDuty::kGather;
  SLUICE_ASSIGN_OR_RETURN(workers_, SlotWorkers::Create(workers, [this](int worker, int channel) {
                            return Serve(worker, channel);
                          }));
  return absl::OkStatus();
}

absl::Status GatherMover::Allocate() {
  const int64_t workers = options_.workers, units = lists_ * options_.capacity;
  const BufferAllocator lists(options_.device, "lists of tokens for CPU workers");
  const BufferAllocator staging(options_.device, "staging of K and V that CPU workers gather");
  const auto words = [&lists](int64_t count, Buffer* buffer) {
    return lists.Words(MemoryKind::kPinned, count, buffer);
  };
  for (Side& side : sides_) {
    SLUICE_RETURN_IF_ERROR(words(1, &side.rows));
    SLUICE_RETURN_IF_ERROR(words(options_.max_rows, &side.slots));
    SLUICE_RETURN_IF_ERROR(words(lists_, &side.counts));
    SLUICE_RETURN_IF_ERROR(words(units, &side.source_units));
    SLUICE_RETURN_IF_ERROR(words(units, &side.target_units));
    SLUICE_RETURN_IF_ERROR(words(kParts * workers, &side.gathered));
    for (Region& region : side.regions) {
      SLUICE_RETURN_IF_ERROR(staging.Array(MemoryKind::kPinned,
                                           GatherPlan::MostOfAll(units, kParts, options_.workers),
                                           2 * row_bytes_, &region.rows));
      SLUICE_RETURN_IF_ERROR(
          lists.Array(MemoryKind::kPinned, workers, sizeof(int64_t), &region.offsets));
      SLUICE_RETURN_IF_ERROR(words(workers * 2 * most_of_one_, &region.targets));
    }
  }
  SLUICE_RETURN_IF_ERROR(words(options_.max_rows + 1, &numbers_));
  for (int32_t i = 0; i <= options_.max_rows; ++i) numbers_.as<int32_t>()[i] = i;
  return words(kParts * workers, &zeros_);
}

void GatherMover::Move(Stream& stream, int layer, const Lists& lists) {
  SLUICE_CHECK(lists.rows <= options_.max_rows);
  const int number = layer % kSides, first = number * kParts;
  const Side& side = sides_[static_cast<size_t>(number)];
  Post(stream, side, lists);
  for (int part = 0; part < kRegions; ++part) workers_->Raise(stream, first + part);
  for (int part = 0; part < kParts; ++part) {
    workers_->Await(stream, first + part);
    Fetch(stream, side, part);
    const int next = part + kRegions;  // its region is free now
    if (next < kParts) workers_->Raise(stream, first + next);
  }
}

void GatherMover::Post(Stream& stream, const Side& side, const Lists& lists) {
  PostUnits(stream, lists, lists.source_units, side.source_units);
  PostUnits(stream, lists, lists.target_units, side.target_units);
  kernels::CopyRowsParams post{};
  const auto piece = [&post](const int32_t* source, const Buffer& target, int64_t count) {
    const int64_t bytes = count * int64_t{sizeof(int32_t)};
    post.pieces[post.count++] = {
        source, target.data(), 0, bytes, nullptr, 1, static_cast<int32_t>(bytes)};
  };
  piece(numbers_.as<int32_t>() + lists.rows, side.rows, 1);
  piece(lists.slots, side.slots, lists.rows);
  piece(lists.counts, side.counts, int64_t{lists.rows} * options_.kv_heads);
  piece(zeros_.as<int32_t>(), side.gathered, int64_t{kParts} * options_.workers);
  options_.device->kernels().CopyRows(stream, post);
}

// Copies the entries that there are: a list may have room for many more.
void GatherMover::PostUnits(Stream& stream, const Lists& lists, const int32_t* units,
                            const Buffer& to) {
  kernels::TransferParams post{};
  post.source = units;
  post.target = to.data();
  post.unit_bytes = sizeof(int32_t);
  post.source_pitch = post.target_pitch = post.unit_bytes;
  post.source_stride = post.target_stride = int64_t{options_.capacity} * post.unit_bytes;
  post.counts = lists.counts;
  post.lists = lists.rows * options_.kv_heads;
  post.capacity = options_.capacity;
  options_.device->kernels().Transfer(stream, post);
}

// Copies a part from staging to HBM. There is one list for each worker.
void GatherMover::Fetch(Stream& stream, const Side& side, int part) {
  const Region& region = side.regions[static_cast<size_t>(part % kRegions)];
  kernels::TransferParams fetch{};
  fetch.source = region.rows.data();
  fetch.source_offsets = region.offsets.as<int64_t>();
  fetch.target = options_.resident;
  fetch.source_pitch = fetch.target_pitch = row_bytes_;
  fetch.target_units = region.targets.as<int32_t>();
  fetch.counts = side.gathered.as<int32_t>() + part * options_.workers;
  fetch.lists = options_.workers;
  fetch.capacity = static_cast<int32_t>(2 * most_of_one_);
  fetch.unit_bytes = static_cast<int32_t>(row_bytes_);
  options_.device->kernels().Transfer(stream, fetch);
}

// Returns whether the worker had something to gather.
absl::StatusOr<bool> GatherMover::Serve(int worker, int channel) {
  const Side& side = sides_[static_cast<size_t>(channel / kParts)];
  const int part = channel % kParts;
  if (!Plan(worker, side, part)) return false;
  SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
  if (Gather(worker, side, part)) {
    Gatherer& gatherer = gatherers_[static_cast<size_t>(worker)];
    gatherer.tokens += gatherer.plan.entries();
    workers_->SetTokens(worker, gatherer.tokens);
  }
  return true;
}

// Returns false if the worker has nothing to gather, or is late.
bool GatherMover::Plan(int worker, const Side& side, int part) {
  const SlotWorkers::Held held(*workers_, worker);
  if (!held) return false;
  Gatherer& gatherer = gatherers_[static_cast<size_t>(worker)];
  const auto rows = static_cast<size_t>(*side.rows.as<int32_t>());
  gatherer.servers.clear();
  for (size_t row = 0; row < rows; ++row) {
    const int32_t slot = side.slots.as<int32_t>()[row];
    gatherer.servers.push_back(slot < 0 ? 0 : workers_->Servers(slot));
  }
  gatherer.plan.Make({worker, part, kParts},
                     {side.counts.as<int32_t>(), rows * static_cast<size_t>(options_.kv_heads)},
                     gatherer.servers);
  return gatherer.plan.entries() > 0;
}

// Returns false if the worker is late; then nothing of the part counts.
bool GatherMover::Gather(int worker, const Side& side, int part) {
  const GatherPlan& plan = gatherers_[static_cast<size_t>(worker)].plan;
  const Region& region = side.regions[static_cast<size_t>(part % kRegions)];
  const int64_t offset = plan.before() * 2 * row_bytes_;
  uint8_t* rows = region.rows.as<uint8_t>() + offset;
  int32_t* targets = region.targets.as<int32_t>() + worker * 2 * most_of_one_;
  for (const GatherPlan::Range& range : plan.ranges()) {
    for (GatherPlan::Range piece = range; piece.begin < range.end; piece.begin = piece.end) {
      piece.end = std::min(range.end, piece.begin + kPieceTokens);
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return false;
      Copy(side, piece, rows, targets);
      const int64_t count = piece.end - piece.begin;
      rows += count * 2 * row_bytes_;
      targets += count * 2;
    }
  }
  const SlotWorkers::Held held(*workers_, worker);
  if (!held) return false;
  region.offsets.as<int64_t>()[worker] = offset;
  side.gathered.as<int32_t>()[part * options_.workers + worker] =
      static_cast<int32_t>(2 * plan.entries());
  return true;
}

void GatherMover::Copy(const Side& side, const GatherPlan::Range& range, uint8_t* rows,
                       int32_t* targets) const {
  const int64_t first = int64_t{range.list} * options_.capacity;
  const int32_t* const sources = side.source_units.as<int32_t>() + first;
  const int32_t* const to = side.target_units.as<int32_t>() + first;
  const int64_t values = options_.home.block_tokens * row_bytes_;  // V of a block, after its K
  const auto bytes = static_cast<size_t>(row_bytes_);
  for (int32_t i = range.begin; i < range.end; ++i) {
    if (i + kPrefetchTokens < range.end) {
      const uint8_t* const later = HomeRow(sources[i + kPrefetchTokens]);
      for (int64_t line = 0; line < row_bytes_; line += kLine) {
        __builtin_prefetch(later + line);
        __builtin_prefetch(later + values + line);
      }
    }
    const uint8_t* const key = HomeRow(sources[i]);
    std::memcpy(rows, key, bytes);
    std::memcpy(rows + row_bytes_, key + values, bytes);
    rows += 2 * row_bytes_;
    *targets++ = to[i];
    *targets++ = to[i] + options_.home.block_tokens;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<RowMover>> NewGatherMover(const RowMover::Options& options) {
  if (options.workers < 1 || options.workers > Mailbox::kMaxWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("workers: a mover by way of the CPU takes 1 to ",
                                                   Mailbox::kMaxWorkers, ", found ",
                                                   options.workers));
  }
  if (options.slots < 1 || options.max_rows < 1 || options.kv_heads < 1 || options.capacity < 1 ||
      options.home.head_dim < 1 || options.home.block_tokens < 1) {
    return absl::InvalidArgumentError("row mover: a shape is not above 0");
  }
  auto mover = std::make_unique<GatherMover>(options);
  SLUICE_RETURN_IF_ERROR(mover->Begin());
  return mover;
}

}  // namespace sluice
