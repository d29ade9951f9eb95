// The pools of policy ess in a decode step: UpdateResidency, and transfers out of pinned memory.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>

#include "src/base/status_macros.h"
#include "src/bench/operators/device_operands.h"
#include "src/bench/operators/step_points.h"
#include "src/bench/overlap/forced_misses.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

constexpr int32_t kWorkers = 4;  // Processors that fetch, as ess_transfer_workers says.
constexpr int64_t kMostLists = int64_t{64} << 20;  // Elements of the lists of all launches.
constexpr int64_t kNearRegions = 4;  // Layers whose homes stay within address translation.

// Pools of sequences whose selections miss the same number of entries in each launch: lists go
// through all positions (forced_misses.h), so that an entry comes back after it lost its place.
class Pools {
 public:
  Pools(Device& device, int64_t sequences, int64_t context, int64_t places, int64_t top_k,
        bool whole)
      : operands_(device),
        sequences_(sequences),
        context_(context),
        top_k_(static_cast<int32_t>(top_k)),
        whole_(whole) {
    p_.residency.place_of = Table(context, 1, whole);
    p_.residency.places = Table(places, 2, whole);
    p_.residency.count = static_cast<int32_t>(places);
    std::vector<int32_t> slots(static_cast<size_t>(sequences));
    std::iota(slots.begin(), slots.end(), 0);
    p_.slots = operands_.Put(slots);
    const int64_t size = sequences * top_k;
    p_.resident = operands_.Room<int32_t>(size);
    p_.arriving = operands_.Room<int32_t>(size);
    p_.resident_counts = operands_.Room<int32_t>(sequences);
    p_.arriving_counts = operands_.Room<int32_t>(sequences);
    p_.move_counts = operands_.Room<int32_t>(sequences);
    p_.source_units = operands_.Room<int32_t>(size);
    p_.target_units = operands_.Room<int32_t>(size);
    p_.home = Latents(context);
    p_.pool = Latents(places);
    p_.move_capacity = top_k_;
    p_.rows = static_cast<int32_t>(sequences);
    if (whole) {
      p_.whole = operands_.Put(std::vector<int32_t>(static_cast<size_t>(sequences), 1));
    }
  }

  // Makes the lists of a cycle of launches that miss so many. REQUIRES: called once.
  absl::Status Prepare(int64_t misses) {
    const int64_t stride = std::max<int64_t>(context_ / top_k_, 1), cycle = stride * top_k_;
    launches_ =
        misses == 0 ? 8 : std::clamp<int64_t>(cycle / misses, 8, kMostLists / sequences_ / top_k_);
    std::vector<int32_t> all;
    for (int64_t launch = 0; launch < launches_; ++launch) {
      const std::vector<int32_t> list = ForcedMisses::ListAt(launch * misses, top_k_, stride);
      for (int64_t row = 0; row < sequences_; ++row) {
        all.insert(all.end(), list.begin(), list.end());
      }
    }
    lists_ = operands_.Put(all);
    counts_ = operands_.Put(std::vector<int32_t>(static_cast<size_t>(sequences_), top_k_));
    positions_ = operands_.Room<int32_t>(launches_ * sequences_);
    next_ = static_cast<int32_t*>(operands_.Room(MemoryKind::kPinned, launches_ * sequences_ * 4));
    return operands_.status();
  }

  // Later replays have later positions, so that stamps rise.
  void MovePositions(Stream& stream) {
    for (int64_t i = 0; i < launches_ * sequences_; ++i) {
      const int64_t later = context_ + replays_ * launches_ + i / sequences_;
      next_[i] = static_cast<int32_t>(whole_ ? context_ - 2 : later);
    }
    ++replays_;
    stream.Copy(positions_, next_, static_cast<size_t>(launches_ * sequences_) * 4);
  }
  const int32_t* missed() const { return p_.move_counts; }
  int launches() const { return static_cast<int>(launches_); }
  UpdateResidencyParams At(int number) const {
    UpdateResidencyParams p = p_;
    p.selected = {lists_ + number % launches_ * sequences_ * top_k_, counts_, top_k_};
    p.positions = positions_ + number % launches_ * sequences_;
    return p;
  }

 private:
  // A table with a page for each sequence: nothing has a place, or unit i has place i.
  PagedRows Table(int64_t rows, int32_t dim, bool whole) {
    std::vector<int32_t> values(static_cast<size_t>(rows * dim), -1);
    for (int64_t i = 0; whole && i < rows; ++i) {
      values[static_cast<size_t>(i * dim)] = static_cast<int32_t>(i);
    }
    const int64_t bytes = rows * dim * 4;
    void* const base = operands_.Room(MemoryKind::kDevice, sequences_ * bytes);
    operands_.Fill(base, sequences_ * bytes, values.data(), bytes);
    std::vector<int32_t> pages(static_cast<size_t>(sequences_));
    std::iota(pages.begin(), pages.end(), 0);
    return {base, operands_.Put(pages), 1, bytes, bytes, static_cast<int32_t>(rows),
            dim,  DType::kFloat32,      1};
  }
  PagedLatents Latents(int64_t tokens) {
    std::vector<int32_t> pages(static_cast<size_t>(sequences_));
    std::iota(pages.begin(), pages.end(), 0);
    return {nullptr,     operands_.Put(pages), 1, 0, static_cast<int32_t>(tokens), kPackedRank,
            kPackedRope, DType::kFloat8E4M3};
  }

  DeviceOperands operands_;
  const int64_t sequences_, context_;
  const int32_t top_k_;
  const bool whole_;
  UpdateResidencyParams p_{};
  int64_t launches_ = 0, replays_ = 0;
  int32_t *lists_ = nullptr, *counts_ = nullptr, *positions_ = nullptr, *next_ = nullptr;
};

absl::Status TimeUpdate(Device& device, const StepPointShape& shape, int64_t sequences,
                        int64_t places, int64_t misses, const char* name, const char* axis,
                        double count, const TimePoint& time) {
  const bool whole = places == 0;
  const int64_t context = shape.contexts.front();
  Pools pools(device, sequences, whole ? context + 1 : context, whole ? context + 1 : places,
              shape.top_k(), whole);
  SLUICE_RETURN_IF_ERROR(pools.Prepare(misses));
  StepPoint point{name, axis, count, pools.launches()};
  point.launch = [&](Stream& stream, int number) {
    device.kernels().UpdateResidency(stream, pools.At(number));
  };
  point.before = [&](Stream& stream) { pools.MovePositions(stream); };
  point.missed = pools.missed();
  return time(point);
}

// Returns a fifth of the context, as a pool of ratio 0.2 has, but so few places that what leaves a
// selection has lost its place when it comes back.
int64_t PlacesOf(const StepPointShape& shape) {
  const int64_t context = shape.contexts.front(), top_k = shape.top_k();
  return std::clamp(context / 5, top_k + 64, std::max(context - 2 * top_k, top_k + 64));
}

// Transfers of `misses` entries of each of `sequences` sequences into HBM. Homes of `regions`
// layers lie behind one another in pinned memory, and launches visit them in turn.
absl::Status TimeTransfer(Device& device, const StepPointShape& shape, DeviceOperands& operands,
                          void* homes, int64_t regions, int64_t sequences, int64_t misses,
                          const char* name, const TimePoint& time) {
  const int64_t context = shape.contexts.front();
  std::vector<int32_t> sources, targets;
  for (int64_t region = 0; region < regions; ++region) {
    for (int64_t s = 0; s < sequences; ++s) {
      std::set<int32_t> chosen;
      while (std::ssize(chosen) < misses) {
        chosen.insert(static_cast<int32_t>(operands.random()() % static_cast<uint64_t>(context)));
      }
      for (const int32_t unit : chosen) {
        sources.push_back(static_cast<int32_t>((region * shape.sequences + s) * context) + unit);
        targets.push_back(static_cast<int32_t>(std::ssize(targets)));
      }
    }
  }
  const auto launched = static_cast<int64_t>(sources.size()) / regions;
  for (int32_t& target : targets) target = static_cast<int32_t>(target % launched);
  TransferParams p{};
  p.source = homes;
  p.target = operands.Room(MemoryKind::kDevice, launched * kPackedEntryBytes);
  p.source_pitch = p.target_pitch = kPackedEntryBytes;
  const int32_t* const from = operands.Put(sources);
  p.target_units = operands.Put(targets);
  p.counts = operands.Put(
      std::vector<int32_t>(static_cast<size_t>(sequences), static_cast<int32_t>(misses)));
  p.lists = static_cast<int32_t>(sequences);
  p.capacity = static_cast<int32_t>(misses);
  p.unit_bytes = kPackedEntryBytes;
  p.max_workers = kWorkers;
  SLUICE_RETURN_IF_ERROR(operands.status());
  StepPoint point{name, "entries of 656 bytes, 4 blocks", static_cast<double>(launched),
                  static_cast<int>(std::max<int64_t>(regions, 8))};
  point.launch = [&](Stream& stream, int number) {
    p.source_units = from + number % regions * launched;
    device.kernels().Transfer(stream, p);
  };
  return time(point);
}

absl::Status TimeTransfers(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const int64_t region = shape.sequences * shape.contexts.front() * kPackedEntryBytes;
  const int64_t regions = std::max(shape.home_bytes / region, kNearRegions);
  DeviceOperands operands(device);
  void* const homes = operands.Room(MemoryKind::kPinned, regions * region);
  SLUICE_RETURN_IF_ERROR(operands.status());
  std::set<int64_t> timed;
  for (const int64_t sequences :
       {int64_t{1}, std::max<int64_t>(shape.sequences / 8, 1), shape.sequences}) {
    for (const int64_t misses : shape.misses) {
      if (misses == 0 || !timed.insert(sequences * misses).second) continue;
      SLUICE_RETURN_IF_ERROR(TimeTransfer(device, shape, operands, homes, kNearRegions, sequences,
                                          misses, "transfer", time));
    }
  }
  if (regions == kNearRegions) return absl::OkStatus();
  const int64_t misses = std::min(kFarMisses, shape.top_k());
  if (timed.insert(shape.sequences * misses).second) {
    SLUICE_RETURN_IF_ERROR(TimeTransfer(device, shape, operands, homes, kNearRegions,
                                        shape.sequences, misses, "transfer", time));
  }
  return TimeTransfer(device, shape, operands, homes, regions, shape.sequences, misses,
                      "transfer.far", time);
}

}  // namespace

absl::Status TimePools(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const int64_t places = PlacesOf(shape), middle = shape.misses[shape.misses.size() / 2];
  for (const int64_t misses : shape.misses) {
    SLUICE_RETURN_IF_ERROR(TimeUpdate(device, shape, shape.sequences, places, misses,
                                      "update_residency", "misses of a sequence",
                                      static_cast<double>(misses), time));
  }
  const int64_t more =
      std::min(2 * places, std::max(shape.contexts.front() - shape.top_k(), places + 1));
  for (const int64_t count : {places, more}) {
    SLUICE_RETURN_IF_ERROR(TimeUpdate(device, shape, shape.sequences, count, middle,
                                      "update_residency.places", "places of a sequence",
                                      static_cast<double>(count), time));
  }
  for (const int64_t sequences : std::set<int64_t>{1, shape.sequences}) {
    SLUICE_RETURN_IF_ERROR(TimeUpdate(device, shape, sequences, 0, 0, "update_residency.whole",
                                      "sequences", static_cast<double>(sequences), time));
  }
  return TimeTransfers(device, shape, time);
}

}  // namespace sluice::bench
