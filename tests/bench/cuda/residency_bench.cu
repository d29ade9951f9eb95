// Times residency and partial keys on a GPU, in Qwen3-14B's geometry (40 query and 8 KV heads of
// 128, blocks of 32), one launch after the other in a graph. Lists and tables lie in L2, as they
// do in a step; scores rotate through partial keys that no launch finds there. Recalls go on from
// each other's tables, with a position of their own for each step, so that each has places to
// take.
//
//   sluice-residency-bench [SUBSTRING OF A CASE'S NAME]
//
// Each line has the microseconds of a launch (median, least and most of 15 replays) and, where
// bytes count, the bytes that it must move, the rate, and its share of the rate of plain reads.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: this file is about them

constexpr int32_t kRows = 10, kHeads = 40, kKvHeads = 8, kHeadDim = 128, kBlockTokens = 32;
constexpr int32_t kLists = kRows * kKvHeads, kContext = 64 << 10, kRank = 38;
constexpr int64_t kHeadBytes = 4 * kBlockTokens * kHeadDim, kPageBytes = kKvHeads * kHeadBytes;
constexpr int kLaunches = 40, kReplays = 15;

std::vector<int32_t> Counted(int64_t size, int32_t first = 0) {
  std::vector<int32_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), first);
  return values;
}
std::vector<int32_t> Shuffled(int64_t size) {
  std::vector<int32_t> values = Counted(size);
  std::shuffle(values.begin(), values.end(), std::mt19937(3));
  return values;
}
std::vector<float> Normal(int64_t size) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& v : values) v = normal(random);
  return values;
}

bool Wanted(const std::string& filter, const std::string& name) {
  return name.find(filter) != std::string::npos;
}
void Print(const std::string& name, const Timing& t) {
  std::printf("%-58s %8.2f %8.2f %8.2f\n", name.c_str(), t.median_us, t.least_us, t.most_us);
  std::fflush(stdout);
}

// Makes rows of a table for each slot and head, `rows_per_page` in a page, in pages of any order.
PagedRows Table(int32_t slots, int32_t rows, int32_t rows_per_page, int32_t dim,
                const std::vector<int32_t>& init) {
  const int32_t pages = (rows - 1) / rows_per_page + 1;
  const std::vector<int32_t> order = Shuffled(int64_t{slots} * pages);
  const int64_t words = kPageBytes / 4, head_words = kHeadBytes / 4;
  std::vector<int32_t> data(static_cast<size_t>(slots * pages * words), -1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < kKvHeads; ++head) {
        const int64_t page = order[static_cast<size_t>(slot * pages + row / rows_per_page)];
        const int64_t at = page * words + head * head_words + row % rows_per_page * dim;
        for (int64_t i = 0; i < dim; ++i) {
          data[static_cast<size_t>(at + i)] = init[static_cast<size_t>(row * dim + i)];
        }
      }
    }
  }
  return {DeviceCopy(data), DeviceCopy(order), pages, kPageBytes, kHeadBytes, rows_per_page, dim,
          DType::kFloat32,  kKvHeads};
}

struct Shape {
  const char* name;
  int32_t unit_tokens, ring, places, selected, misses;
  int32_t rows_per_page;  // rows of place_of in a page
};

// Tables whose places hold units 0, 1, ..., and lists of which the last `misses` units have no
// place.
class ResidencyBench {
 public:
  ResidencyBench(const Shape& shape, std::string filter)
      : shape_(shape), filter_(std::move(filter)) {
    const int32_t units = kContext / shape.unit_tokens, held = shape.places - shape.ring;
    std::vector<int32_t> place_of(static_cast<size_t>(units), -1), places;
    for (int32_t u = 0; u < held; ++u) place_of[static_cast<size_t>(u)] = shape.ring + u;
    for (int32_t p = 0; p < shape.places; ++p) {
      places.push_back(p < shape.ring ? -1 : p - shape.ring);
      places.push_back(p % 97);
    }
    table_ = {Table(kRows, units, shape.rows_per_page, 1, place_of),
              Table(kRows, shape.places, 1024, 2, places), shape.ring, shape.places};
    slots_ = DeviceCopy(Counted(kRows));
    for (int i = 0; i < kLaunches; ++i) {
      positions_[i] = DeviceCopy(std::vector<int32_t>(kRows, kContext - 1 - kLaunches + i));
    }
    home_ = Cache(kContext / kBlockTokens);
    resident_ = Cache((shape.places * shape.unit_tokens - 1) / kBlockTokens + 1);
    counters_ = DeviceCopy(std::vector<SparseCounters>(kRows));
    sources_ = DeviceArray<int32_t>(int64_t{kLists} * shape.selected);
    targets_ = DeviceArray<int32_t>(int64_t{kLists} * shape.selected);
    moves_ = DeviceArray<int32_t>(kLists);
    since_ = DeviceCopy(std::vector<int32_t>(2 * kRows));
    missing_ = Lists({});
    resident_lists_ = Lists({});
    resident_places_ = DeviceArray<int32_t>(int64_t{kLists} * shape.selected);
  }

  void Run() {
    const int32_t held = shape_.places - shape_.ring, misses = shape_.misses;
    std::vector<int32_t> units = Counted(std::min(shape_.selected - misses, held));
    for (int32_t i = 0; i < misses; ++i) units.push_back(held + 1 + 2 * i);
    const UnitLists selected = Lists(units);
    Time("split", [&](int i, cudaStream_t stream) { Split(stream, i, selected); });
    Time("split and recall due", [&](int i, cudaStream_t stream) {
      Split(stream, i, selected);
      Due(stream, selected);
    });
    // Units that were evicted some launches ago come back.
    const int32_t sets = held / misses + 2;
    std::vector<UnitLists> coming;
    for (int32_t s = 0; s < sets; ++s) {
      coming.push_back(Lists(Counted(misses, held + 200 + s * misses)));
    }
    const std::string of = std::to_string(misses) + " of " + std::to_string(held) + " places";
    Time("recall of " + of, [&](int i, cudaStream_t stream) {
      Recall(stream, i, coming[static_cast<size_t>(next_++ % sets)]);
    });
  }

 private:
  template <typename Launch>
  void Time(const std::string& what, Launch launch) {
    const std::string name = std::string(shape_.name) + ": " + what;
    if (Wanted(filter_, name)) Print(name, bench::Time(kLaunches, kReplays, launch));
  }

  // Returns the same list for all.
  UnitLists Lists(const std::vector<int32_t>& units) const {
    std::vector<int32_t> all(static_cast<size_t>(int64_t{kLists} * shape_.selected));
    for (size_t l = 0; l < kLists; ++l) {
      std::copy(units.begin(), units.end(), all.begin() + static_cast<long>(l) * shape_.selected);
    }
    return {DeviceCopy(all),
            DeviceCopy(std::vector<int32_t>(kLists, static_cast<int32_t>(units.size()))),
            shape_.selected};
  }
  PagedCache Cache(int32_t blocks) const {
    return {nullptr,      DeviceCopy(Shuffled(int64_t{kRows} * blocks)),
            blocks,       kPageBytes,
            kBlockTokens, kKvHeads,
            kHeadDim,     DType::kBFloat16};
  }

  void Split(cudaStream_t stream, int i, const UnitLists& selected) const {
    SplitParams p{};
    p.residency = table_;
    p.slots = slots_;
    p.positions = positions_[i];
    p.selected = selected;
    p.resident = resident_lists_;
    p.places = resident_places_;
    p.missing = missing_;
    p.rows = kRows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = shape_.unit_tokens;
    Check(cuda::LaunchSplit(p, stream), "split");
  }
  void Due(cudaStream_t stream, const UnitLists& selected) const {
    RecallDueParams p{};
    p.slots = slots_;
    p.selected = selected;
    p.missing = missing_;
    p.since = since_;
    p.counters = counters_;
    p.due = since_ + kRows;
    p.rows = kRows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = shape_.unit_tokens;
    p.budget_units = shape_.selected;
    p.share_limit = 0.12f;
    Check(cuda::LaunchRecallDue(p, stream), "recall due");
  }
  void Recall(cudaStream_t stream, int i, const UnitLists& missing) const {
    RecallParams p{};
    p.residency = table_;
    p.slots = slots_;
    p.positions = positions_[i];
    p.missing = missing;
    p.home = home_;
    p.resident = resident_;
    p.source_units = sources_;
    p.target_units = targets_;
    p.move_counts = moves_;
    p.counters = counters_;
    p.rows = kRows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = shape_.unit_tokens;
    Check(cuda::LaunchRecall(p, stream), "recall");
  }

  const Shape shape_;
  const std::string filter_;
  ResidencyTable table_{};
  int32_t* slots_ = nullptr;
  int32_t* positions_[kLaunches] = {};
  PagedCache home_{}, resident_{};
  SparseCounters* counters_ = nullptr;
  int32_t *sources_ = nullptr, *targets_ = nullptr, *moves_ = nullptr, *since_ = nullptr;
  UnitLists missing_{}, resident_lists_{};
  int32_t* resident_places_ = nullptr;
  int next_ = 0;
};

// Bring of rows of `context` tokens, of which `wanted` lists in `of` select a tenth. Scores of two
// launches in a row differ in a part, so that some of what is selected is new.
void Bring(const std::string& filter, int32_t rows, int32_t context, int wanted, int of,
           bool by_place) {
  const int32_t k = context / 10, lists = rows * kKvHeads, places = 64 + k;
  const std::string name = "bring: " + std::to_string(rows) + " x " +
                           std::to_string(context >> 10) + "K, " + std::to_string(wanted) + " of " +
                           std::to_string(of) + " lists select " + std::to_string(k) +
                           (by_place ? "" : ", all listed by token");
  if (!Wanted(filter, name)) return;
  std::vector<int32_t> table(static_cast<size_t>(2 * places), -1);
  constexpr int kSets = 4;
  const float* scores[kSets];
  for (int set = 0; set < kSets; ++set) {
    std::vector<float> values = Normal(int64_t{lists} * context);
    std::mt19937 random(static_cast<unsigned>(set));
    std::normal_distribution<float> normal;
    for (float& v : values) v = random() % 8 == 0 ? normal(random) : v;
    scores[set] = DeviceCopy(values);
  }
  BringParams p{};
  p.select.score_stride = context;
  p.select.slots = DeviceCopy(Counted(rows));
  p.select.rows = rows;
  p.select.kv_heads = kKvHeads;
  p.select.unit_tokens = 1;
  p.select.k = k;
  p.select.first_units = 4;
  p.select.last_units = 64;
  p.select.margin = INFINITY;
  std::vector<int32_t> flags;
  for (int32_t l = 0; l < lists; ++l) flags.push_back(l * 7 % of < wanted ? 1 : 0);
  p.select.wanted = DeviceCopy(flags);
  p.residency = {
      Table(rows, context, 2000, 1, std::vector<int32_t>(static_cast<size_t>(context), -1)),
      Table(rows, places, 1000, 2, table), 64, places};
  p.resident = {DeviceArray<int32_t>(int64_t{lists} * places), DeviceArray<int32_t>(lists), places};
  p.places = DeviceArray<int32_t>(int64_t{lists} * places);
  p.home = {nullptr,
            DeviceCopy(Shuffled(int64_t{rows} * context / kBlockTokens)),
            context / kBlockTokens,
            kPageBytes,
            kBlockTokens,
            kKvHeads,
            kHeadDim,
            DType::kBFloat16};
  p.cache = p.home;
  p.source_units = DeviceArray<int32_t>(int64_t{lists} * k);
  p.target_units = DeviceArray<int32_t>(int64_t{lists} * k);
  p.move_counts = DeviceArray<int32_t>(lists);
  p.move_capacity = k;
  p.counters = DeviceCopy(std::vector<SparseCounters>(static_cast<size_t>(rows)));
  p.whole = true;
  p.by_place = by_place;
  const int32_t* positions[kLaunches];
  for (int i = 0; i < kLaunches; ++i) {
    positions[i] =
        DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1 - kLaunches + i));
  }
  Print(name, Time(kLaunches, kReplays, [&](int i, cudaStream_t stream) {
          p.select.scores = scores[i % kSets];
          p.select.positions = positions[i];
          Check(cuda::LaunchBring(p, stream), "bring");
        }));
}

// Returns pinned memory of a sequence's home, one layer.
PagedCache Home(int32_t rows, int32_t context) {
  const int32_t blocks = context / kBlockTokens;
  const std::vector<int32_t> order = Shuffled(int64_t{rows} * blocks);
  PagedCache home{nullptr,      nullptr,  blocks,   kPageBytes,
                  kBlockTokens, kKvHeads, kHeadDim, DType::kBFloat16};
  const auto bytes = static_cast<size_t>(int64_t{rows} * blocks * kPageBytes);
  Check(cudaHostAlloc(&home.base, bytes, 0), "pinned");
  std::memset(home.base, 0x3c, bytes);
  home.block_table = DeviceCopy(order);
  return home;
}

void WriteThrough(const std::string& filter, int32_t rows) {
  const std::string name = "write-through of " + std::to_string(rows) + " rows";
  if (!Wanted(filter, name)) return;
  WriteThroughParams p{};
  p.written = DeviceArray<uint16_t>(int64_t{rows} * kKvHeads * 2 * kHeadDim);
  p.slots = DeviceCopy(Counted(rows));
  p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), 1000));
  p.home = Home(rows, 1024);
  p.rows = rows;
  Print(name, Time(kLaunches, kReplays, [&](int, cudaStream_t stream) {
          Check(cuda::LaunchWriteThrough(p, stream), "write-through");
        }));
}

class PartialBench {
 public:
  explicit PartialBench(std::string filter) : filter_(std::move(filter)) {
    // starts with a part of it, before the rest is made
    arena_ = DeviceCopy(Normal(kArenaBytes / 4 / 64));
    char* all = DeviceArray<char>(kArenaBytes);
    for (int64_t at = 0; at < kArenaBytes; at += kArenaBytes / 64) {
      Check(cudaMemcpy(all + at, arena_, kArenaBytes / 64, cudaMemcpyDeviceToDevice), "fill");
    }
    arena_ = reinterpret_cast<float*>(all);
    pages_ = DeviceCopy(Shuffled(kArenaBytes / kPageBytes));
    projection_ = DeviceCopy(Normal(int64_t{kKvHeads} * kHeadDim * kRank));
  }

  void Scores(int32_t rows, int32_t context, GroupReduction reduction, const char* what) {
    const std::string name = "partial scores, " + std::to_string(rows) + " x " +
                             std::to_string(context >> 10) + "K, rank " + std::to_string(kRank) +
                             ", " + what;
    if (!Wanted(filter_, name)) return;
    const int64_t pages = (context - 1) / kRowsPerPage + 1;
    const int64_t sets = std::max<int64_t>(1, kArenaBytes / kPageBytes / (rows * pages));
    PartialScoresParams p{};
    p.q = DeviceCopy(Normal(int64_t{rows} * kHeads * kHeadDim));
    p.q_stride = kHeads * kHeadDim;
    p.slots = DeviceCopy(Counted(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.projection = projection_;
    p.partial = Partial(pages);
    p.score_stride = context;
    p.scores = DeviceArray<float>(int64_t{rows} * kKvHeads * context);
    p.rows = rows;
    p.heads = kHeads;
    p.head_dim = kHeadDim;
    p.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
    p.reduction = reduction;
    const double bytes = 2.0 * kRank * kKvHeads * rows * context;
    const Timing t = Time(kLaunches / 4, kReplays, [&](int i, cudaStream_t stream) {
      PartialScoresParams of_set = p;
      of_set.partial.page_table = pages_ + i % sets * rows * pages;
      Check(cuda::LaunchPartialScores(of_set, stream), "partial scores");
    });
    Print(name, t);
    const double rate = bytes / t.median_us / 1e3;
    std::printf("%58s %8.1f MB %6.0f GB/s, %.0f %% of plain reads\n", "", bytes * 1e-6, rate,
                100 * rate / ReadRate(arena_, kArenaBytes, static_cast<int64_t>(bytes)));
  }

  // Runs a step's rows in HBM, or a whole sequence from its home.
  void Keys(int32_t rows, int32_t context, bool bulk) {
    const std::string name =
        "partial keys of " + std::to_string(rows) +
        (bulk ? " x " + std::to_string(context >> 10) + "K from the home" : " rows of a step");
    if (!Wanted(filter_, name)) return;
    const int64_t blocks = context / kBlockTokens, pages = (context - 1) / kRowsPerPage + 1;
    PartialKeysParams p{};
    p.cache =
        bulk ? Home(rows, context) : PagedCache{arena_,       pages_,   blocks,   kPageBytes,
                                                kBlockTokens, kKvHeads, kHeadDim, DType::kBFloat16};
    p.projection = projection_;
    p.partial = Partial(pages);
    p.partial.base = DeviceArray<char>(rows * pages * kPageBytes);
    p.partial.page_table = DeviceCopy(Shuffled(rows * pages));
    p.slots = DeviceCopy(Counted(rows));
    p.first_positions =
        bulk ? DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows))) : nullptr;
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.rows = rows;
    const Timing t = Time(bulk ? 2 : kLaunches, bulk ? 5 : kReplays, [&](int, cudaStream_t stream) {
      Check(cuda::LaunchPartialKeys(p, stream), "partial keys");
    });
    Print(name, t);
    if (!bulk) return;
    const double bytes = 2.0 * kHeadDim * kKvHeads * rows * context;
    std::printf("%58s %8.1f MB %6.1f GB/s of keys\n", "", bytes * 1e-6, bytes / t.median_us / 1e3);
  }

 private:
  static constexpr int64_t kArenaBytes = int64_t{2} << 30;
  static constexpr int32_t kRowsPerPage = 204;  // rows in a page, with 4 bytes of place_of each

  PagedRows Partial(int64_t pages) const {
    return {arena_, pages_,           pages,   kPageBytes, kHeadBytes, kRowsPerPage,
            kRank,  DType::kBFloat16, kKvHeads};
  }

  const std::string filter_;
  float* arena_ = nullptr;
  int32_t* pages_ = nullptr;
  float* projection_ = nullptr;
};

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  using namespace sluice::bench;
  using sluice::kernels::GroupReduction;
  const std::string filter = argc > 1 ? argv[1] : "";
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %d lists\n%-58s %8s %8s %8s\n", device.name, kLists, "case", "us", "least",
              "most");
  ResidencyBench({"blocks", kBlockTokens, 2, 66, 64, 6, 31}, filter).Run();
  Bring(filter, 10, 64 << 10, 1, 1, true);
  Bring(filter, 14, 32 << 10, 1, 5, true);
  Bring(filter, 14, 32 << 10, 1, 1, true);
  Bring(filter, 14, 32 << 10, 1, 1, false);
  Bring(filter, 1, 126 << 10, 1, 5, true);
  Bring(filter, 1, 126 << 10, 1, 1, true);
  Bring(filter, 1, 512 << 10, 1, 1, true);
  WriteThrough(filter, kRows);
  WriteThrough(filter, 512);
  PartialBench partial(filter);
  partial.Scores(10, 64 << 10, GroupReduction::kMax, "max");
  partial.Scores(10, 64 << 10, GroupReduction::kMean, "mean");
  partial.Scores(1, 64 << 10, GroupReduction::kMax, "max");
  partial.Scores(10, 8 << 10, GroupReduction::kMax, "max");
  partial.Scores(10, 64 << 10, GroupReduction::kSoftmaxSum, "softmax-sum");
  partial.Keys(10, 32 << 10, false);
  partial.Keys(1, 64 << 10, true);
}
