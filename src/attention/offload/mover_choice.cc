#include "src/attention/offload/mover_choice.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {
namespace {

using Mover = PolicyOptions::Mover;

// A run visits as many places of the arena as a step does: the device's rate depends on that.
constexpr int64_t kRunBytes = int64_t{256} << 20;
constexpr int kRuns = 4;        // the first of them is not counted
constexpr int kMostMoves = 64;  // of a run
// The measurement lets a row miss so many units in a layer, among so many of its sequence.
constexpr int64_t kMisses = 192;
constexpr int64_t kSequenceUnits = 32768;
// The CPU's rate has to be so much higher to be worth its threads.
constexpr double kWorthwhile = 1.1;

// Lists of a run's moves, on the device.
class Trial {
 public:
  Trial(const RowMover::Options& options, const MoverTrial& memory) : options_(options) {
    const int64_t rows = options.max_rows;
    options_.lists_per_row = 1;
    const int64_t of_row = std::min(
        {kMisses, int64_t{options.capacity}, memory.target_units / rows, memory.source_units});
    options_.capacity = static_cast<int32_t>(std::max<int64_t>(of_row, 0));
    const int64_t move = std::max<int64_t>(rows * of_row * UnitBytes(), 1);
    moves_ = static_cast<int>(std::clamp<int64_t>(kRunBytes / move, 1, kMostMoves));
  }

  // Returns whether there is anything to measure with.
  bool possible() const { return options_.capacity > 0; }
  absl::Status Prepare(const MoverTrial& memory);
  // Returns bytes/s of payload; 0: the device's clock stands still, or a worker failed.
  absl::StatusOr<double> Measure(Mover kind);

 private:
  int64_t UnitBytes() const { return int64_t{options_.unit_bytes} * options_.parts; }
  int64_t Words() const { return int64_t{moves_} * options_.max_rows * options_.capacity; }
  void Draw(const MoverTrial& memory, int32_t* sources, int32_t* targets) const;
  void Enqueue(Stream& stream, RowMover& mover) const;

  RowMover::Options options_;
  int moves_ = 1;
  // int32 [moves][rows][capacity] twice, [rows] and [rows].
  Buffer lists_, host_;
  std::unique_ptr<Stream> stream_;
};

absl::Status Trial::Prepare(const MoverTrial& memory) {
  const BufferAllocator allocator(options_.device, "a trial of movers");
  const int64_t words = 2 * Words() + 2 * int64_t{options_.max_rows};
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &lists_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &host_));
  auto* const sources = host_.as<int32_t>();
  Draw(memory, sources, sources + Words());
  int32_t* const slots = sources + 2 * Words();
  for (int row = 0; row < options_.max_rows; ++row) slots[row] = row % options_.slots;
  std::fill_n(slots + options_.max_rows, options_.max_rows, options_.capacity);
  stream_ = options_.device->NewStream(Device::StreamKind::kCompute);
  stream_->Copy(lists_.data(), host_.data(), host_.bytes());
  return absl::OkStatus();
}

void Trial::Draw(const MoverTrial& memory, int32_t* sources, int32_t* targets) const {
  SplitMix64 random(1);
  const int64_t window = std::min(memory.source_units, kSequenceUnits);
  const int64_t lists = int64_t{moves_} * options_.max_rows;
  for (int64_t list = 0; list < lists; ++list, sources += options_.capacity) {
    const auto first =
        static_cast<int64_t>(random.Below(static_cast<uint64_t>(memory.source_units - window + 1)));
    for (int32_t i = 0; i < options_.capacity; ++i) {
      sources[i] =
          static_cast<int32_t>(first + static_cast<int64_t>(random.Below(uint64_t(window))));
      *targets++ = static_cast<int32_t>(list % options_.max_rows * options_.capacity + i);
    }
    std::sort(sources, sources + options_.capacity);
  }
}

void Trial::Enqueue(Stream& stream, RowMover& mover) const {
  const auto* const sources = lists_.as<int32_t>();
  const int32_t* const slots = sources + 2 * Words();
  const int64_t of_move = int64_t{options_.max_rows} * options_.capacity;
  for (int64_t move = 0; move < moves_; ++move) {
    mover.Move(stream, 0,
               {slots, sources + move * of_move, sources + Words() + move * of_move,
                slots + options_.max_rows, options_.max_rows});
  }
}

absl::StatusOr<double> Trial::Measure(Mover kind) {
  options_.kind = kind;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RowMover> mover, RowMover::Create(options_));
  const auto begin = options_.device->NewTimedEvent(), end = options_.device->NewTimedEvent();
  absl::Duration best = absl::InfiniteDuration();
  for (int run = 0; run < kRuns; ++run) {
    stream_->Record(*begin);
    Enqueue(*stream_, *mover);
    stream_->Record(*end);
    end->Wait();
    SLUICE_RETURN_IF_ERROR(options_.device->Health());
    if (run > 0) best = std::min(best, end->Since(*begin));
  }
  if (mover->workers() != nullptr) {
    const WorkerStatistics did = mover->workers()->Statistics();
    if (did.failed + did.left + did.late > 0) return 0.0;
  }
  if (best <= absl::ZeroDuration()) return 0.0;
  return static_cast<double>(Words() * UnitBytes()) / absl::ToDoubleSeconds(best);
}

}  // namespace

absl::StatusOr<LinkStatistics> MeasureMovers(const RowMover::Options& options,
                                             const MoverTrial& memory) {
  LinkStatistics link;
  Trial trial(options, memory);
  if (!trial.possible()) return link;
  SLUICE_RETURN_IF_ERROR(trial.Prepare(memory));
  for (const Mover kind : {Mover::kUva, Mover::kCpu}) {
    SLUICE_ASSIGN_OR_RETURN(link.bytes_per_s[static_cast<size_t>(kind)], trial.Measure(kind));
  }
  return link;
}

PolicyOptions::Mover FasterMover(const LinkStatistics& measured) {
  const auto of = [&measured](Mover kind) {
    return measured.bytes_per_s[static_cast<size_t>(kind)];
  };
  return of(Mover::kCpu) > kWorthwhile * of(Mover::kUva) ? Mover::kCpu : Mover::kUva;
}

absl::StatusOr<ChosenMover> ChooseMover(const RowMover::Options& given, const MoverTrial& memory) {
  RowMover::Options options = given;
  ChosenMover chosen;
  if (options.kind == Mover::kAuto) {
    if (options.device->Memory().total_bytes > 0) {
      SLUICE_ASSIGN_OR_RETURN(chosen.link, MeasureMovers(options, memory));
    }
    options.kind = FasterMover(chosen.link);
  }
  chosen.link.mover = static_cast<int>(options.kind);
  SLUICE_ASSIGN_OR_RETURN(chosen.mover, RowMover::Create(options));
  return chosen;
}

}  // namespace sluice
