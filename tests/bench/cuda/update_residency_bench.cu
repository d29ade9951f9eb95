// Times token residency on a GPU: UpdateResidency in ESS's shapes, step after step of as many
// sequences as given. Each sequence has 2,048 selected tokens of which a set number miss, in a pool
// that is full, so that the tokens used longest ago are evicted. Positions rise from launch to
// launch.
//
//   sluice-update-residency-bench
//
// Each line has the microseconds of a launch (median, least and most of graphs of 64), and the
// moves of a sequence and step as the counters have them.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: this file is about them

constexpr int32_t kSelected = 2048, kSteps = 64, kGraphs = 8, kRowsPerPage = 1024;

struct Shape {
  const char* name;
  int sequences;
  int places;  // places of a sequence
  int context;
  int misses;
  int ahead;
  bool whole = false;
};

PagedRows Table(int64_t slots, int64_t rows, int32_t dim, std::vector<int32_t> initial) {
  const int64_t pages = (rows + kRowsPerPage - 1) / kRowsPerPage;
  std::vector<int32_t> data(static_cast<size_t>(slots * pages * kRowsPerPage * dim), -1);
  std::vector<int32_t> table(static_cast<size_t>(slots * pages));
  std::iota(table.begin(), table.end(), 0);
  for (int64_t s = 0; s < slots; ++s) {
    std::copy(initial.begin(), initial.end(), data.begin() + s * pages * kRowsPerPage * dim);
  }
  return {DeviceCopy(data),
          DeviceCopy(table),
          pages,
          int64_t{kRowsPerPage} * dim * 4,
          int64_t{kRowsPerPage} * dim * 4,
          kRowsPerPage,
          dim,
          DType::kFloat32,
          1};
}

void Run(const Shape& shape) {
  const int n = shape.sequences;
  std::mt19937 random(9);
  // Some units stay selected, and others take turns. The pool holds the first and the others of
  // some 45 steps, so that a unit has been evicted by the time it is selected again.
  std::vector<int32_t> units(static_cast<size_t>(shape.context));
  std::iota(units.begin(), units.end(), 0);
  std::shuffle(units.begin(), units.end(), random);
  const int steady = kSelected - shape.misses;
  const int turns = shape.misses == 0 ? 1 : (shape.context - steady) / shape.misses;
  std::vector<int32_t> lists, slots(static_cast<size_t>(n)), positions, place_of, places;
  for (int turn = 0; turn < turns; ++turn) {
    std::vector<int32_t> list(units.begin(), units.begin() + steady);
    const auto from = units.begin() + steady + turn * shape.misses;
    list.insert(list.end(), from, from + shape.misses);
    std::sort(list.begin(), list.end());
    for (int s = 0; s < n; ++s) lists.insert(lists.end(), list.begin(), list.end());
  }
  std::iota(slots.begin(), slots.end(), 0);
  // All places are taken, by units of all ages.
  const int first_position = shape.context, launches = kSteps * (kGraphs + 1);
  place_of.assign(static_cast<size_t>(shape.context + launches + shape.ahead + 1), -1);
  for (int place = 0; place < shape.places; ++place) {
    const bool taken = place < shape.context;
    const int32_t unit =
        taken ? units[static_cast<size_t>(shape.places < shape.context ? shape.context - 1 - place
                                                                       : place)]
              : -1;
    places.push_back(unit);
    places.push_back(first_position - 1 - static_cast<int>(random() % 2000));
    if (taken) place_of[static_cast<size_t>(unit)] = place;
  }
  for (int i = 0; i < launches; ++i) {
    positions.insert(positions.end(), static_cast<size_t>(n), first_position + i);
  }
  const int64_t page_stride = (shape.context + launches) / 64 + 1;
  std::vector<int32_t> pages(static_cast<size_t>(n * page_stride));
  std::iota(pages.begin(), pages.end(), 0);
  UpdateResidencyParams p{};
  p.residency = {Table(n, static_cast<int64_t>(place_of.size()), 1, place_of),
                 Table(n, shape.places, 2, places), 0, shape.places};
  p.slots = DeviceCopy(slots);
  const int32_t* const device_positions = DeviceCopy(positions);
  int32_t* const device_lists = DeviceCopy(lists);
  p.selected = {device_lists, DeviceCopy(std::vector<int32_t>(static_cast<size_t>(n), kSelected)),
                kSelected};
  p.resident = DeviceArray<int32_t>(int64_t{n} * kSelected);
  p.resident_counts = DeviceArray<int32_t>(n);
  p.arriving = DeviceArray<int32_t>(int64_t{n} * kSelected);
  p.arriving_counts = DeviceArray<int32_t>(n);
  p.home = p.pool = {nullptr, DeviceCopy(pages), page_stride, int64_t{64} * kPackedEntryBytes,
                     64,      kPackedRank,       kPackedRope, DType::kFloat8E4M3};
  p.source_units = DeviceArray<int32_t>(int64_t{n} * kSelected);
  p.target_units = DeviceArray<int32_t>(int64_t{n} * kSelected);
  p.move_counts = DeviceArray<int32_t>(n);
  p.move_capacity = kSelected;
  p.counters = DeviceCopy(std::vector<SparseCounters>(static_cast<size_t>(n)));
  p.rows = n;
  p.ahead = shape.ahead;
  if (shape.whole) p.whole = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(n), 1));
  std::vector<double> us;
  int launch = 0;
  SparseCounters before{}, after{};
  for (int graph = 0; graph <= kGraphs; ++graph) {
    if (graph == 1)
      Check(cudaMemcpy(&before, p.counters, sizeof(before), cudaMemcpyDefault), "read");
    const Timing t = TimeOnce([&](cudaStream_t stream) {
      for (int i = 0; i < kSteps; ++i, ++launch) {
        UpdateResidencyParams of_step = p;
        of_step.positions = device_positions + int64_t{launch} * n;
        of_step.selected.units = device_lists + int64_t{launch % turns} * n * kSelected;
        Check(cuda::LaunchUpdateResidency(of_step, stream), "update_residency");
      }
    });
    if (graph > 0) us.push_back(t.median_us / kSteps);
  }
  Check(cudaMemcpy(&after, p.counters, sizeof(after), cudaMemcpyDefault), "read");
  std::sort(us.begin(), us.end());
  std::printf("%-52s %6.2f (%.2f-%.2f) us, %.1f moves\n", shape.name, us[us.size() / 2], us.front(),
              us.back(),
              static_cast<double>(after.recalled - before.recalled) / (kSteps * kGraphs));
  std::fflush(stdout);
}

}  // namespace
}  // namespace sluice::bench

int main() {
  using namespace sluice::bench;
  constexpr int k32K = 32 << 10, k128K = 128 << 10;
  for (const Shape& shape : {
           Shape{"76 x 32K, 6,600 places, 100 missing", 76, 6600, k32K, 100, 1},
           Shape{"76 x 32K, 6,600 places, none missing", 76, 6600, k32K, 0, 1},
           Shape{"76 x 32K, 6,600 places, none missing or ahead", 76, 6600, k32K, 0, 0},
           Shape{"76 x 32K, 6,600 places, 17 missing", 76, 6600, k32K, 17, 1},
           Shape{"76 x 32K, 6,600 places, 605 missing", 76, 6600, k32K, 605, 1},
           Shape{"19 x 128K, 13,200 places, 100 missing", 19, 13200, k128K, 100, 1},
           Shape{"19 x 128K, 13,200 places, 512 missing", 19, 13200, k128K, 512, 1},
           Shape{"1 x 32K, 6,600 places, 100 missing", 1, 6600, k32K, 100, 1},
           Shape{"1 x 32K, 33,600 places, free ones", 1, 33600, k32K, 0, 1},
           Shape{"4 x 32K, 33,600 places, free ones", 4, 33600, k32K, 0, 1},
           Shape{"1 x 128K, 132,000 places, free ones", 1, 132000, k128K, 0, 1},
           Shape{"1 x 32K, whole", 1, 33600, k32K, 0, 1, true},
           Shape{"4 x 32K, whole", 4, 33600, k32K, 0, 1, true},
       }) {
    Run(shape);
  }
}
