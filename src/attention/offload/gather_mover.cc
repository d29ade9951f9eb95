// A move is one round of the workers (src/device/mailbox.h). The device posts the lists and raises
// the round, and takes units out of the workers' rings (kernels/ring_params.h) until the round is
// over. That one operator waits for the workers too, so that what follows it may begin beneath it.
//
// A worker touches the request, the host cache and its ring only while it holds the round, for one
// bundle at a time. So one that is late reads nothing of a sequence that has ended, and writes
// nothing into a ring that belongs to a later round. While its ring is full it waits without
// holding the round; the round's deadline ends that too. No worker waits for another, and the
// device takes the rings of the others while one is late: only the sequences that it serves are
// lost.
//
// Where workers do not run beside streams (the simulated device), the round is over before the
// device begins to take, and the rings hold whatever a round may bring.
#include "src/attention/offload/gather_mover.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/gather_plan.h"
#include "src/attention/offload/patience.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

// A bundle is what one warp takes at a time. Larger ones keep it from its next look for longer.
constexpr int64_t kBundleBytes = 8 << 10;
constexpr int64_t kLeastDepth = 2;
constexpr int64_t kBundleAlignment = 128;
// The hardware prefetcher does not foresee the next entry of a list. Measured:
// policies/clo/README.md and tests/bench/mover_bench.cc.
constexpr int kPrefetchEntries = 8;
constexpr int64_t kLine = 64;

static_assert(kernels::kMostRingWorkers == Mailbox::kMaxWorkers);

// Memory of one move.
struct Side {
  // The request: int32 [1], [max_rows], [lists], [lists][capacity].
  Buffer rows, slots, counts, source_units;
  // The rings: bytes [workers][depth][place_bytes], int32 [workers][depth][kMostBundleUnits], and
  // RingWord [workers][depth].
  Buffer units, entries, words;
};

// A place in a worker's ranges of entries.
class Cursor {
 public:
  explicit Cursor(const std::vector<GatherPlan::Range>& ranges)
      : range_(ranges.data()), end_(range_ + ranges.size()), at_(done() ? 0 : range_->begin) {}
  bool done() const { return range_ == end_; }
  int64_t Entry(int64_t capacity) const { return range_->list * capacity + at_; }
  void Step() {
    if (++at_ == range_->end && ++range_ != end_) at_ = range_->begin;
  }

 private:
  const GatherPlan::Range* range_;
  const GatherPlan::Range* const end_;
  int32_t at_;
};

// Memory of one worker.
struct Gatherer {
  GatherPlan plan;
  std::vector<uint64_t> servers;  // by row
  int64_t units = 0;              // gathered since the start
};

class GatherMover : public RowMover {
 public:
  explicit GatherMover(const Options& options);

  absl::Status Begin();
  void Move(Stream& stream, int side, const Lists& lists) override;
  SlotWorkers* workers() override { return workers_.get(); }

 private:
  absl::Status Allocate();
  void Post(Stream& stream, const Side& side, const Lists& lists);
  void Take(Stream& stream, int number, const Lists& lists);

  absl::StatusOr<bool> Serve(int worker, int channel);
  bool Plan(int worker, const Side& side);
  absl::StatusOr<bool> Gather(int worker, const Side& side);
  bool AwaitPlace(int worker, const std::atomic_ref<uint32_t>& word, RoundWait* wait);
  int32_t Fill(const Side& side, int64_t place, Cursor* at, Cursor* ahead) const;
  const uint8_t* Unit(int64_t unit) const {
    return static_cast<const uint8_t*>(options_.source) + unit * options_.unit_bytes;
  }

  const Options options_;
  const int64_t lists_;         // maximum number of lists
  const int32_t bundle_units_;  // of a full bundle
  const int64_t place_bytes_;
  const bool beside_;    // workers run beside streams
  const int64_t depth_;  // places of a worker's ring
  std::array<Side, kSides> sides_;
  Buffer numbers_;                        // int32 [max_rows + 1] 0, 1, ...: rows to post
  std::vector<Gatherer> gatherers_;       // by worker
  std::unique_ptr<SlotWorkers> workers_;  // last: its threads use all members above
};

int32_t BundleUnits(const RowMover::Options& options) {
  const int64_t unit = int64_t{options.unit_bytes} * options.parts;
  return static_cast<int32_t>(
      std::clamp<int64_t>(kBundleBytes / unit, 1, kernels::kMostBundleUnits));
}

int64_t DepthOf(const RowMover::Options& options, int64_t place_bytes) {
  const int64_t bundle = BundleUnits(options);
  const int64_t units = int64_t{options.max_rows} * options.lists_per_row * options.capacity;
  const int64_t all = (units + bundle - 1) / bundle;  // one worker may be the only one left
  if (!options.device->WorkersRunBesideStreams()) return all;
  return std::min(all, std::max(kLeastDepth, options.ring_bytes / (place_bytes * options.workers)));
}

GatherMover::GatherMover(const Options& options)
    : options_(options),
      lists_(int64_t{options.max_rows} * options.lists_per_row),
      bundle_units_(BundleUnits(options)),
      place_bytes_(
          (int64_t{bundle_units_} * options.unit_bytes * options.parts + kBundleAlignment - 1) /
          kBundleAlignment * kBundleAlignment),
      beside_(options.device->WorkersRunBesideStreams()),
      depth_(DepthOf(options, place_bytes_)) {}

absl::Status GatherMover::Begin() {
  SLUICE_RETURN_IF_ERROR(Allocate());
  for (int w = 0; w < options_.workers; ++w) {
    gatherers_.push_back({GatherPlan(options_.max_rows, options_.lists_per_row), {}});
    gatherers_.back().servers.reserve(static_cast<size_t>(options_.max_rows));
  }
  SlotWorkers::Options workers;
  workers.device = options_.device;
  workers.channels = kSides;
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
  const BufferAllocator lists(options_.device, "lists of units for CPU workers");
  const BufferAllocator rings(options_.device, "rings that CPU workers fill");
  const auto words = [&lists](int64_t count, Buffer* buffer) {
    return lists.Words(MemoryKind::kPinned, count, buffer);
  };
  const int64_t places = options_.workers * depth_;
  for (Side& side : sides_) {
    SLUICE_RETURN_IF_ERROR(words(1, &side.rows));
    SLUICE_RETURN_IF_ERROR(words(options_.max_rows, &side.slots));
    SLUICE_RETURN_IF_ERROR(words(lists_, &side.counts));
    SLUICE_RETURN_IF_ERROR(words(lists_ * options_.capacity, &side.source_units));
    SLUICE_RETURN_IF_ERROR(words(places * kernels::kMostBundleUnits, &side.entries));
    SLUICE_RETURN_IF_ERROR(rings.Array(MemoryKind::kPinned, places, place_bytes_, &side.units));
    SLUICE_RETURN_IF_ERROR(
        rings.Array(MemoryKind::kPinned, places, sizeof(kernels::RingWord), &side.words));
  }
  SLUICE_RETURN_IF_ERROR(words(options_.max_rows + 1, &numbers_));
  for (int32_t i = 0; i <= options_.max_rows; ++i) numbers_.as<int32_t>()[i] = i;
  return absl::OkStatus();
}

void GatherMover::Move(Stream& stream, int number, const Lists& lists) {
  SLUICE_CHECK(lists.rows <= options_.max_rows && 0 <= number && number < kSides);
  Post(stream, sides_[static_cast<size_t>(number)], lists);
  workers_->Raise(stream, number);
  if (!beside_) workers_->Await(stream, number);
  Take(stream, number, lists);
}

// It copies only the entries that are there: a list may have room for many more.
void GatherMover::Post(Stream& stream, const Side& side, const Lists& lists) {
  kernels::CopyRowsParams post{};
  const auto piece = [&post](const int32_t* source, const Buffer& target, int64_t count) {
    const int64_t bytes = count * int64_t{sizeof(int32_t)};
    post.pieces[post.count++] = {
        source, target.data(), 0, bytes, nullptr, 1, static_cast<int32_t>(bytes)};
  };
  const int32_t of_step = lists.rows * options_.lists_per_row;
  piece(numbers_.as<int32_t>() + lists.rows, side.rows, 1);
  piece(lists.slots, side.slots, lists.rows);
  piece(lists.counts, side.counts, of_step);
  const int64_t list_bytes = int64_t{options_.capacity} * int64_t{sizeof(int32_t)};
  post.pieces[post.count++] = {lists.source_units,
                               side.source_units.data(),
                               list_bytes,
                               list_bytes,
                               nullptr,
                               of_step,
                               static_cast<int32_t>(list_bytes),
                               lists.counts};
  options_.device->kernels().CopyRows(stream, post);
}

void GatherMover::Take(Stream& stream, int number, const Lists& lists) {
  const Side& side = sides_[static_cast<size_t>(number)];
  kernels::TakeRingParams take{};
  take.units = side.units.data();
  take.entries = side.entries.as<int32_t>();
  take.words = side.words.as<kernels::RingWord>();
  take.open = beside_ ? workers_->OpenWord(number) : nullptr;
  take.target = options_.target;
  take.target_pitch = take.unit_bytes = options_.unit_bytes;
  take.target_units = lists.target_units;
  take.place_bytes = place_bytes_;
  take.part_pitch = options_.part_pitch;
  take.workers = options_.workers;
  take.depth = static_cast<int32_t>(depth_);
  take.parts = options_.parts;
  take.max_workers = options_.processors;
  options_.device->kernels().TakeRing(stream, take);
}

// Returns whether the worker had something to gather.
absl::StatusOr<bool> GatherMover::Serve(int worker, int channel) {
  const Side& side = sides_[static_cast<size_t>(channel)];
  if (!Plan(worker, side)) return false;
  SLUICE_ASSIGN_OR_RETURN(const bool done, Gather(worker, side));
  if (done) {
    Gatherer& gatherer = gatherers_[static_cast<size_t>(worker)];
    gatherer.units += gatherer.plan.entries();
    workers_->SetTokens(worker, gatherer.units);
  }
  return true;
}

// Returns false if the worker has nothing to gather, or is late.
bool GatherMover::Plan(int worker, const Side& side) {
  const SlotWorkers::Held held(*workers_, worker);
  if (!held) return false;
  Gatherer& gatherer = gatherers_[static_cast<size_t>(worker)];
  const auto rows = static_cast<size_t>(*side.rows.as<int32_t>());
  gatherer.servers.clear();
  for (size_t row = 0; row < rows; ++row) {
    const int32_t slot = side.slots.as<int32_t>()[row];
    gatherer.servers.push_back(slot < 0 ? 0 : workers_->Servers(slot));
  }
  gatherer.plan.Make(
      worker, {side.counts.as<int32_t>(), rows * static_cast<size_t>(options_.lists_per_row)},
      gatherer.servers);
  return gatherer.plan.entries() > 0;
}

// Returns false if the worker is late.
absl::StatusOr<bool> GatherMover::Gather(int worker, const Side& side) {
  const GatherPlan& plan = gatherers_[static_cast<size_t>(worker)].plan;
  Cursor at(plan.ranges()), ahead(plan.ranges());
  RoundWait wait(options_.deadline);
  for (int64_t bundle = 0; !at.done(); ++bundle) {
    SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
    const int64_t place = worker * depth_ + bundle % depth_;
    const std::atomic_ref<uint32_t> word(side.words.as<kernels::RingWord>()[place].value);
    if (!AwaitPlace(worker, word, &wait)) return false;
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return false;
    const int32_t units = Fill(side, place, &at, &ahead);
    word.store(kernels::RingWordOf(bundle, units), std::memory_order_release);
  }
  return true;
}

// Waits until the device has taken what lies in a place. Returns false if the round went on without
// the worker first.
bool GatherMover::AwaitPlace(int worker, const std::atomic_ref<uint32_t>& word, RoundWait* wait) {
  while (word.load(std::memory_order_acquire) != 0) {
    SLUICE_CHECK(beside_, "the ring holds all that a round brings");
    if (!workers_->Owes(worker)) return false;
    wait->Pause();
  }
  wait->End();
  workers_->SetWaited(worker, wait->sum());
  return true;
}

// Writes a bundle of the entries from `at` on. `ahead` is where the prefetch is. Returns its units.
// Plain copies: stores past the caches gain nothing, and the device reads what is in one (measured:
// tests/bench/mover_bench.cc). The library's memcpy chooses the instructions of this processor.
int32_t GatherMover::Fill(const Side& side, int64_t place, Cursor* at, Cursor* ahead) const {
  const auto bytes = static_cast<size_t>(options_.unit_bytes);
  const int32_t* const sources = side.source_units.as<int32_t>();
  int32_t* const entries = side.entries.as<int32_t>() + place * kernels::kMostBundleUnits;
  uint8_t* to = side.units.as<uint8_t>() + place * place_bytes_;
  const auto touch = [&] {
    const int32_t unit = sources[ahead->Entry(options_.capacity)];
    ahead->Step();
    for (int32_t part = 0; unit >= 0 && part < options_.parts; ++part) {
      const uint8_t* const later = Unit(unit) + part * options_.part_pitch;
      for (int64_t line = 0; line < options_.unit_bytes; line += kLine) {
        __builtin_prefetch(later + line);
      }
    }
  };
  int32_t units = 0;
  for (; units < bundle_units_ && !at->done(); ++units, at->Step()) {
    const int64_t entry = at->Entry(options_.capacity);
    const int32_t unit = sources[entry];
    if (!ahead->done()) touch();
    entries[units] = unit < 0 ? -1 : static_cast<int32_t>(entry);
    for (int32_t part = 0; part < options_.parts; ++part, to += bytes) {
      if (unit >= 0) std::memcpy(to, Unit(unit) + part * options_.part_pitch, bytes);
    }
  }
  return units;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RowMover>> NewGatherMover(const RowMover::Options& options) {
  if (options.workers < 1 || options.workers > Mailbox::kMaxWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("workers: a mover by way of the CPU takes 1 to ",
                                                   Mailbox::kMaxWorkers, ", found ",
                                                   options.workers));
  }
  if (options.slots < 1 || options.max_rows < 1 || options.lists_per_row < 1 ||
      options.capacity < 1 || options.unit_bytes < 1 || options.parts < 1) {
    return absl::InvalidArgumentError("row mover: a shape is not above 0");
  }
  auto mover = std::make_unique<GatherMover>(options);
  SLUICE_RETURN_IF_ERROR(mover->Begin());
  return mover;
}

}  // namespace sluice
