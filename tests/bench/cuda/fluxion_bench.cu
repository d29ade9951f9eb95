// Times Fluxion's operators on a GPU in Llama-3.1-8B's geometry (32 query and 8 KV heads of 128),
// one after the other in a graph. Digests rotate, so that no launch finds its own in L2.
//
//   sluice-fluxion-bench [SUBSTRING OF A CASE'S NAME]
//
// Each line has the microseconds of a launch (median, least and most of 15 replays), the bytes
// that it must move, the rate, and its share of the rate of plain reads of as many bytes.
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

constexpr int32_t kHeads = 32, kKvHeads = 8, kHeadDim = 128, kUnitTokens = 16;
constexpr int32_t kRingUnits = (kFluxionLocalTokens + kFluxionLargestBlock) / kUnitTokens;
constexpr int32_t kRowsOfPage = 32;  // digests in a page, for each head
constexpr int64_t kRowBytes = int64_t{kDigestVectors} * kHeadDim;  // of a digest, at most
constexpr int64_t kPageBytes = kKvHeads * kRowsOfPage * kRowBytes;
constexpr int64_t kArenaBytes = int64_t{2} << 30;
constexpr int kLaunches = 40, kReplays = 15;
constexpr int32_t kHidden[] = {256, 256, 128};

std::vector<float> Normal(int64_t size, float scale) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& v : values) v = normal(random);
  return values;
}

std::vector<int32_t> Counted(int64_t size) {
  std::vector<int32_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

std::vector<int32_t> Shuffled(int64_t size) {
  std::vector<int32_t> values = Counted(size);
  std::shuffle(values.begin(), values.end(), std::mt19937(3));
  return values;
}

// Returns rows of `dim` elements in the pages of one table.
PagedRows RowsIn(char* arena, const int32_t* table, int64_t pages, int32_t dim) {
  return {arena,
          table,
          pages,
          kPageBytes,
          kRowsOfPage * kRowBytes,
          kRowsOfPage,
          dim,
          DType::kFloat8E4M3,
          kKvHeads};
}

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    cudaDeviceProp device;
    Check(cudaGetDeviceProperties(&device, 0), "device");
    arena_ = DeviceArray<char>(kArenaBytes);
    Check(cudaMemset(arena_, 0x3c, kArenaBytes), "fill");
    pages_ = DeviceCopy(Shuffled(kArenaBytes / kPageBytes));
    std::printf("%s\n%-52s %8s %8s %8s %9s %7s %7s\n", device.name, "case", "us", "least", "most",
                "MB", "GB/s", "of read");
  }

  // Times the scores of all blocks of a level, for all query heads, and the selection by them of a
  // share of the blocks for each query head.
  void Level(int rows, int context, int level, float share) {
    const std::string shape = std::to_string(rows) + " x " + std::to_string(context >> 10) +
                              "K, blocks of " + std::to_string(LevelTokens(level));
    const FluxionSegments segments = SegmentsOf(context - 1);
    const int64_t blocks = CpuBlocks(segments, level);
    LevelScoresParams p{};
    p.q = DeviceCopy(Normal(int64_t{rows} * kHeads * kHeadDim, 1.0f));
    p.q_stride = kHeads * kHeadDim;
    p.slots = DeviceCopy(Counted(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    const int64_t pages = EndBlock(segments, level) / kRowsOfPage + 1;
    // The digests of level 0 have a spread and are alone, as in HBM. Other levels have their own,
    // as in the published form.
    const int32_t dim = (level == 0 ? kDigestVectors : kDigestPieces) * kHeadDim;
    for (int32_t i = 0; i < (level == 0 ? 1 : kFluxionLevels); ++i) {
      p.digests.of[i] = RowsIn(arena_, pages_, pages, dim);
    }
    const auto lists = static_cast<size_t>(rows * kKvHeads);
    p.levels = DeviceCopy(std::vector<int32_t>(lists, level));
    p.blocks = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows * kHeads),
                                               BlocksOfShare(segments, level, share)));
    p.score_stride = context / LevelTokens(0) + 1;
    p.scores = DeviceCopy(Normal(int64_t{rows} * kHeads * p.score_stride, 1.0f));
    p.rows = rows;
    p.heads = kHeads;
    p.head_dim = kHeadDim;
    const int64_t sets = std::max<int64_t>(1, kArenaBytes / kPageBytes / (rows * pages));
    Run("scores, " + shape, static_cast<double>(lists) * static_cast<double>(blocks * dim),
        [&](int i, cudaStream_t stream) {
          LevelScoresParams of_set = p;
          for (PagedRows& digests : of_set.digests.of) {
            digests.page_table = pages_ + i % sets * rows * pages;
          }
          return cuda::LaunchLevelScores(of_set, stream);
        });

    SelectUnionParams s{};
    s.scores = p.scores;
    s.score_stride = p.score_stride;
    s.slots = p.slots;
    s.positions = p.positions;
    s.levels = p.levels;
    s.blocks = p.blocks;
    const int32_t capacity = context / kUnitTokens;
    s.selected = {DeviceArray<int32_t>(static_cast<int64_t>(lists) * capacity),
                  DeviceArray<int32_t>(static_cast<int64_t>(lists)), capacity};
    s.rows = rows;
    s.heads = kHeads;
    s.kv_heads = kKvHeads;
    s.unit_tokens = kUnitTokens;
    Run("union, " + shape, 4.0 * rows * kHeads * static_cast<double>(blocks),
        [&](int, cudaStream_t stream) { return cuda::LaunchSelectUnion(s, stream); });
  }

  // Times the predictor and the plan.
  void Predict(int rows, int context) {
    const std::string shape = std::to_string(rows) + " rows";
    const int64_t values = int64_t{rows} * kHeads;
    PredictBudgetsParams p{};
    p.q = DeviceCopy(Normal(values * kHeadDim, 1.0f));
    p.q_stride = kHeads * kHeadDim;
    p.slots = DeviceCopy(Counted(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.sink_o = DeviceCopy(Normal(values * kHeadDim, 1.0f));
    p.sink_lse = DeviceCopy(Normal(values, 1.0f));
    p.local_o = DeviceCopy(Normal(values * kHeadDim, 1.0f));
    p.local_lse = DeviceCopy(Normal(values, 1.0f));
    p.anchors = {DeviceCopy(Normal(int64_t{rows} * kKvHeads * (kAnchorKvNumbers + kHeadDim), 1.0f)),
                 DeviceCopy(Normal(values * (kAnchorHeadNumbers + kHeadDim), 1.0f)),
                 DeviceCopy(Normal(rows, 1.0f))};
    std::vector<float> network(2 * kFluxionFeatures, 1.0f);
    p.network.widths[0] = kFluxionFeatures;
    int64_t parameters = 0;
    for (const int32_t width : {kHidden[0], kHidden[1], kHidden[2], 5}) {
      const int64_t in = p.network.widths[p.network.layers];
      const std::vector<float> layer =
          Normal((in + 1) * width, 1 / std::sqrt(static_cast<float>(in)));
      network.insert(network.end(), layer.begin(), layer.end());
      parameters += (in + 1) * width;
      p.network.widths[++p.network.layers] = width;
    }
    p.network.values = DeviceCopy(network);
    p.network.form = FluxionForm::kFour;
    p.network.threshold = 0.5f;
    float* const budgets = DeviceArray<float>(values * kFluxionLevels);
    int32_t* const streaming = DeviceArray<int32_t>(values);
    p.budgets = budgets;
    p.streaming = streaming;
    p.rows = rows;
    p.heads = kHeads;
    p.kv_heads = kKvHeads;
    p.head_dim = kHeadDim;
    Run("budgets, " + shape,
        4.0 * static_cast<double>(parameters + values * (4 * kHeadDim + kAnchorHeadNumbers)),
        [&](int, cudaStream_t stream) { return cuda::LaunchPredictBudgets(p, stream); });

    PlanRetrievalParams plan{};
    plan.budgets = budgets;
    plan.streaming = streaming;
    plan.slots = p.slots;
    plan.positions = p.positions;
    plan.levels = DeviceArray<int32_t>(int64_t{rows} * kKvHeads);
    plan.blocks = DeviceArray<int32_t>(values);
    plan.volumes = DeviceArray<int32_t>(int64_t{rows} * kKvHeads);
    plan.rows = rows;
    plan.heads = kHeads;
    plan.kv_heads = kKvHeads;
    Run("plan, " + shape, 4.0 * static_cast<double>(values) * (kFluxionLevels + 2),
        [&](int, cudaStream_t stream) { return cuda::LaunchPlanRetrieval(plan, stream); });
  }

  // Times the division of lists of `units` units.
  void Divide(int rows, int units) {
    const int64_t lists = int64_t{rows} * kKvHeads;
    const auto made = [&] {
      return UnitLists{DeviceArray<int32_t>(lists * units), DeviceArray<int32_t>(lists), units};
    };
    DivideListsParams p{};
    p.from = {DeviceCopy(Counted(lists * units)),
              DeviceCopy(std::vector<int32_t>(static_cast<size_t>(lists), units)), units};
    p.first = made();
    p.rest = made();
    p.slots = DeviceCopy(Counted(rows));
    p.rows = rows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = kUnitTokens;
    p.share = 0.4f;
    Run("division, " + std::to_string(rows) + " rows, " + std::to_string(units) + " units",
        8.0 * static_cast<double>(lists) * units,
        [&](int, cudaStream_t stream) { return cuda::LaunchDivideLists(p, stream); });
  }

  // Times the statistics of one anchor, whose cache lies in pinned memory, and the digests of its
  // prompt.
  void Anchor(int context) {
    const std::string shape = std::to_string(context >> 10) + "K tokens in pinned memory";
    if (!Wants("anchor, " + shape) && !Wants("digests, " + shape)) return;
    const int64_t blocks = context / kUnitTokens;
    const int64_t page = int64_t{kKvHeads} * 2 * kUnitTokens * kHeadDim * 2;
    PagedCache cache{nullptr,     DeviceCopy(Shuffled(blocks)),
                     blocks,      page,
                     kUnitTokens, kKvHeads,
                     kHeadDim,    DType::kBFloat16};
    Check(cudaHostAlloc(&cache.base, static_cast<size_t>(blocks * page), 0), "pinned");
    auto* const keys = static_cast<uint16_t*>(cache.base);
    std::mt19937 random(9);
    for (int64_t i = 0; i < blocks * page / 2; ++i) {
      // Numbers of both signs with lengths from 0.5 to 1.
      keys[i] = static_cast<uint16_t>((random() & 1) << 15 | 0x3f00 | (random() & 0x7f));
    }
    LevelDigestsParams d{};
    d.cache = cache;
    const int64_t pages = (context / LevelTokens(0) - 1) / kRowsOfPage + 1;
    d.digests.of[0] = RowsIn(DeviceArray<char>(pages * kPageBytes), DeviceCopy(Shuffled(pages)),
                             pages, kDigestVectors * kHeadDim);
    d.slots = DeviceCopy(Counted(1));
    d.first_positions = DeviceCopy(Counted(1));
    d.positions = DeviceCopy(std::vector<int32_t>(1, context - 1));
    d.rows = 1;
    const double bytes = 2.0 * kHeadDim * kKvHeads * context;
    Run(
        "digests, " + shape, bytes,
        [&](int, cudaStream_t stream) { return cuda::LaunchLevelDigests(d, stream); }, true);

    AnchorStatisticsParams p{};
    p.q = DeviceCopy(Normal(int64_t{kHeads} * kHeadDim, 1.0f));
    p.q_stride = int64_t{kHeads} * kHeadDim;
    p.slots = d.slots;
    p.positions = d.positions;
    p.cache = cache;
    p.digests = d.digests;
    p.anchors = {DeviceArray<float>(int64_t{kKvHeads} * (kAnchorKvNumbers + kHeadDim)),
                 DeviceArray<float>(int64_t{kHeads} * (kAnchorHeadNumbers + kHeadDim)),
                 DeviceArray<float>(1)};
    p.scratch = DeviceArray<char>(AnchorScratchBytes(context, kHeads, kHeadDim));
    p.rows = 1;
    p.heads = kHeads;
    p.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
    p.tau = 0.1f;
    Run(
        "anchor, " + shape, 2 * bytes,
        [&](int, cudaStream_t stream) { return cuda::LaunchAnchorStatistics(p, stream); }, true);
  }

 private:
  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  template <typename Launch>
  void Run(const std::string& name, double bytes, Launch launch, bool over_link = false) {
    if (!Wants(name)) return;
    const Timing t =
        Time(over_link ? 2 : kLaunches, over_link ? 5 : kReplays,
             [&](int i, cudaStream_t stream) { Check(launch(i, stream), name.c_str()); });
    const double rate = bytes / t.median_us / 1e3;
    std::printf("%-52s %8.2f %8.2f %8.2f %9.2f %7.0f", name.c_str(), t.median_us, t.least_us,
                t.most_us, bytes * 1e-6, rate);
    if (!over_link && bytes > 8e6) {
      std::printf(" %6.0f%%", 100 * rate /
                                  ReadRate(reinterpret_cast<uint16_t*>(arena_), kArenaBytes,
                                           static_cast<int64_t>(bytes)));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string filter_;
  char* arena_ = nullptr;
  int32_t* pages_ = nullptr;
};

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  using namespace sluice::bench;
  Bench bench(argc > 1 ? argv[1] : "");
  for (const auto& [rows, context] : {std::pair{16, 32 << 10}, {4, 32 << 10}, {4, 128 << 10}}) {
    for (const int level : {0, 1, 3}) bench.Level(rows, context, level, 0.05f);
  }
  for (const int rows : {1, 4, 16, 64}) bench.Predict(rows, 32 << 10);
  bench.Divide(16, 400);
  bench.Divide(4, 1600);
  for (const int context : {32 << 10, 128 << 10}) bench.Anchor(context);
}
