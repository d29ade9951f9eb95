// Times selection on a GPU, in Qwen3-14B's geometry (40 query and 8 KV heads of 128, blocks of
// 32), beside plain reads of as many bytes in the same run: digests' scores and top-k, one after
// the other in a graph, over operands that rotate so that no launch finds its digests in L2; scores
// of key codes and of hash codes; and digests and hash codes of decode rows, and of a whole prompt
// over the link.
//
//   sluice-selection-bench [SUBSTRING OF A CASE'S NAME]
//
// Each line has the microseconds of a launch (median, least and most of 15 replays), the bytes
// that it must move, the rate, and its share of the rate of plain reads. Lists of top-k lie in
// L2, as they do behind the scores.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: this file is about them

constexpr int32_t kHeads = 40, kKvHeads = 8, kHeadDim = 128, kBlockTokens = 32;
constexpr int32_t kRowsOfPage = 32;  // digest rows, 16 KiB of each head
constexpr int64_t kRowBytes = int64_t{4} * kHeadDim;
constexpr int32_t kShortlist = 128, kCodesOfPage = 512;  // blocks, tokens
constexpr int64_t kCodeBytes = int64_t{kHeadDim} / 4;
constexpr int64_t kPageBytes = kKvHeads * kRowsOfPage * kRowBytes;

__global__ void FillBf16(uint16_t* data, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull;
    z ^= z >> 29;
    const float v = static_cast<float>(static_cast<int32_t>(z >> 20)) * 0x1p-31f;
    data[i] = static_cast<uint16_t>(__float_as_uint(v) >> 16);
  }
}

std::vector<float> Normal(int64_t size, float scale) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& v : values) v = normal(random);
  return values;
}

std::vector<int32_t> Shuffled(int64_t size) {
  std::vector<int32_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), 0);
  std::shuffle(values.begin(), values.end(), std::mt19937(3));
  return values;
}

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    cudaDeviceProp device;
    Check(cudaGetDeviceProperties(&device, 0), "device");
    arena_ = DeviceArray<uint16_t>(kArenaBytes / 2);
    FillBf16<<<2048, 256>>>(arena_, kArenaBytes / 2);
    Check(cudaDeviceSynchronize(), "fill");
    pages_ = DeviceCopy(Shuffled(kArenaBytes / kPageBytes));
    std::printf("%s\n%-52s %8s %8s %8s %9s %7s %7s\n", device.name, "case", "us", "least", "most",
                "MB", "GB/s", "of read");
  }

  void Scores(int rows, int context, GroupReduction reduction, const char* what) {
    const std::string name = "digest scores, " + std::to_string(rows) + " x " +
                             std::to_string(context >> 10) + "K, " + what;
    if (!Wants(name)) return;
    DigestScoresParams p = ScoresParams(rows, context);
    p.reduction = reduction;
    const double bytes =
        1.0 * rows * kKvHeads * static_cast<double>(context / kBlockTokens) * kRowBytes;
    const int64_t pages = p.digests.table_stride;
    const int64_t sets = std::max<int64_t>(1, kArenaBytes / kPageBytes / (rows * pages));
    Print(name, bytes, Time(kLaunches, kReplays, [&](int i, cudaStream_t stream) {
            DigestScoresParams of_set = p;
            of_set.digests.page_table = pages_ + i % sets * rows * pages;
            Check(cuda::LaunchDigestScores(of_set, stream), "digest scores");
          }));
  }

  void Top(int rows, int units, int unit_tokens, int k, int last, float margin) {
    const std::string name = "top-k, " + std::to_string(rows * kKvHeads) + " lists, " +
                             std::to_string(k) + " of " + std::to_string(units) +
                             (std::isinf(margin) ? "" : ", margin");
    if (!Wants(name)) return;
    const int64_t lists = int64_t{rows} * kKvHeads;
    std::vector<int32_t> slots(static_cast<size_t>(rows));
    std::iota(slots.begin(), slots.end(), 0);
    TopKParams p{};
    p.scores = DeviceCopy(Normal(lists * units, 2.0f));
    p.score_stride = units;
    p.slots = DeviceCopy(slots);
    p.positions =
        DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), units * unit_tokens - 1));
    p.selected = {DeviceArray<int32_t>(lists * k), DeviceArray<int32_t>(lists), k};
    p.rows = rows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = unit_tokens;
    p.k = k;
    p.first_units = 1;
    p.last_units = last;
    p.margin = margin;
    Print(name, 4.0 * static_cast<double>(lists) * units,
          Time(kLaunches, kReplays,
               [&](int, cudaStream_t stream) { Check(cuda::LaunchTopK(p, stream), "top-k"); }));
  }

  // Times digest scores and top-k on a branch beside a product: both together, and the product
  // alone.
  void Beside(int rows, int context, int n, int k) {
    const std::string name = "product " + std::to_string(n) + " x " + std::to_string(k) + ", " +
                             std::to_string(rows) + " rows";
    if (!Wants(name)) return;
    const int64_t matrix = int64_t{n} * k;
    const int64_t matrices = std::max<int64_t>(1, kArenaBytes / 2 / matrix);
    const auto* x = DeviceArray<uint16_t>(int64_t{rows} * k);
    auto* y = DeviceArray<float>(int64_t{rows} * n);
    const DigestScoresParams scores = ScoresParams(rows, context);
    const TopKParams top = TopParams(rows, scores);
    const int64_t of_set = scores.digests.table_stride * rows;
    const int64_t sets = kArenaBytes / kPageBytes / of_set;
    const auto product = [&](int i, cudaStream_t stream) {
      const LinearParams p = {x,
                              {arena_ + i % matrices * matrix, n, k, WeightLayout::kRowMajor},
                              nullptr,
                              y,
                              rows,
                              rows,
                              DType::kBFloat16,
                              false};
      Check(cuda::LaunchLinear(p, stream), "product");
    };
    const double bytes = 2.0 * static_cast<double>(matrix);
    Print(name + " alone", bytes, Time(kBesideLaunches, kReplays, product));
    cudaStream_t side;
    cudaEvent_t fork, join;
    Check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "stream");
    Check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "event");
    Check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "event");
    Print(name + " beside selection",
          bytes + 1.0 * rows * kKvHeads * static_cast<double>(context / kBlockTokens * kRowBytes),
          Time(kBesideLaunches, kReplays, [&](int i, cudaStream_t stream) {
            Check(cudaEventRecord(fork, stream), "fork");
            Check(cudaStreamWaitEvent(side, fork), "fork");
            DigestScoresParams one = scores;
            one.digests.page_table += i % sets * of_set;
            Check(cuda::LaunchDigestScores(one, side), "digest scores");
            Check(cuda::LaunchTopK(top, side), "top-k");
            product(i, stream);
            Check(cudaEventRecord(join, side), "join");
            Check(cudaStreamWaitEvent(stream, join), "join");
          }));
  }

  // Times scores of key codes, of a shortlist of 128 blocks in each list.
  void Refine(int rows, int context, GroupReduction reduction, const char* what) {
    const std::string name = "refined scores, " + std::to_string(rows) + " x " +
                             std::to_string(context >> 10) + "K, " + what;
    if (!Wants(name)) return;
    RefineScoresParams p = RefineParams(rows, context);
    p.reduction = reduction;
    const double bytes = 1.0 * rows * kKvHeads * kShortlist *
                         static_cast<double>(kRowBytes + kBlockTokens * kCodeBytes);
    const int64_t pages = p.digests.table_stride;
    const int64_t sets =
        std::max<int64_t>(1, kArenaBytes / kPageBytes / (rows * (pages + p.codes.table_stride)));
    Print(name, bytes, Time(kLaunches, kReplays, [&](int i, cudaStream_t stream) {
            RefineScoresParams of_set = p;
            of_set.digests.page_table = pages_ + i % sets * rows * (pages + p.codes.table_stride);
            of_set.codes.page_table = of_set.digests.page_table + rows * pages;
            Check(cuda::LaunchRefineScores(of_set, stream), "refined scores");
          }));
  }

  // Times scores of hash codes of 256 bits, and lengths, for groups of `group` query heads.
  void Hash(int rows, int context, int group) {
    const std::string name = "hash scores, " + std::to_string(rows) + " x " +
                             std::to_string(context >> 10) + "K, groups of " +
                             std::to_string(group);
    if (!Wants(name)) return;
    constexpr int32_t kWords = 8, kLengthsOfPage = 8192;
    const int64_t heads = int64_t{kKvHeads} * group, tokens = int64_t{rows} * kKvHeads * context;
    HashScoresParams p{};
    std::mt19937 random(5);
    std::vector<int32_t> codes(static_cast<size_t>(rows * heads * kHashPlanes * kWords));
    for (int32_t& word : codes) word = static_cast<int32_t>(random());
    p.q_codes = DeviceCopy(codes);
    p.slots = DeviceCopy(Slots(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.codes = Codes(arena_, pages_, context);
    p.codes.dim = kWords;
    p.lengths = {arena_,
                 nullptr,
                 (context - 1) / kLengthsOfPage + 1,
                 kPageBytes,
                 2 * kLengthsOfPage,
                 kLengthsOfPage,
                 1,
                 DType::kBFloat16,
                 kKvHeads};
    p.score_stride = context;
    p.scores = DeviceArray<float>(tokens);
    p.rows = rows;
    p.heads = static_cast<int32_t>(heads);
    p.reduction = GroupReduction::kMax;
    const int64_t of_codes = p.codes.table_stride * rows,
                  of_lengths = p.lengths.table_stride * rows;
    const int64_t sets = std::max<int64_t>(1, kArenaBytes / kPageBytes / (of_codes + of_lengths));
    Print(name, static_cast<double>(tokens) * (4 * kWords + 2 + 4),
          Time(kLaunches, kReplays, [&](int i, cudaStream_t stream) {
            HashScoresParams of_set = p;
            of_set.codes.page_table = pages_ + i % sets * (of_codes + of_lengths);
            of_set.lengths.page_table = of_set.codes.page_table + of_codes;
            Check(cuda::LaunchHashScores(of_set, stream), "hash scores");
          }));
  }

  // Times hash codes of 128 bits: of each row's newest key, or of all keys of one row.
  void HashOf(int rows, int context, bool bulk) {
    const std::string name =
        "hash codes of " + (bulk ? std::to_string(context >> 10) + "K tokens in pinned memory"
                                 : std::to_string(rows) + " decode rows");
    if (!Wants(name)) return;
    constexpr int32_t kWords = 4, kCodeRows = 1024, kLengthRows = 8192;  // rows of a page
    HashKeysParams p{};
    p.cache = Cache(rows, context, bulk);
    p.hash = DeviceCopy(Normal(int64_t{kKvHeads} * kHeadDim * kWords * 32, 1.0f));
    float* const centres = DeviceCopy(Normal(int64_t{rows} * kKvHeads * kHeadDim, 1.0f));
    p.centres = centres;
    const auto rows_of = [&](int32_t of_page, int32_t dim, DType type) {
      const int64_t pages = (context - 1) / of_page + 1;
      return PagedRows{DeviceArray<char>(rows * pages * kPageBytes),
                       DeviceCopy(Shuffled(rows * pages)),
                       pages,
                       kPageBytes,
                       kRowsOfPage * kRowBytes,
                       of_page,
                       dim,
                       type,
                       kKvHeads};
    };
    p.codes = rows_of(kCodeRows, kWords, DType::kFloat32);
    p.lengths = rows_of(kLengthRows, 1, DType::kBFloat16);
    p.slots = DeviceCopy(Slots(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.first_positions = bulk ? DeviceCopy(std::vector<int32_t>(1, 0)) : nullptr;
    p.rows = rows;
    Print(name, 2.0 * kHeadDim * kKvHeads * (bulk ? context : rows),
          Time(bulk ? 2 : kLaunches, bulk ? 5 : kReplays,
               [&](int, cudaStream_t stream) { Check(cuda::LaunchHashKeys(p, stream), "codes"); }),
          bulk);
    if (!bulk) return;
    const KeyCentresParams of_keys{p.cache, p.slots, p.positions, centres, 1};
    Print("their centres", 2.0 * kHeadDim * kKvHeads * kCentreKeys,
          Time(2, 5,
               [&](int, cudaStream_t stream) {
                 Check(cuda::LaunchKeyCentres(of_keys, stream), "centres");
               }),
          true);
  }

  // Times rows that extend their newest block, or one row that begins at 0.
  void Digest(int rows, int context, bool bulk, bool codes) {
    const std::string name = (codes ? "digests and codes of " : "digests of ") +
                             (bulk ? std::to_string(context >> 10) + "K tokens in pinned memory"
                                   : std::to_string(rows) + " decode rows");
    if (!Wants(name)) return;
    const int64_t blocks = context / kBlockTokens, pages = (blocks - 1) / kRowsOfPage + 1;
    DigestParams p{};
    p.cache = Cache(rows, context, bulk);
    p.digests = {DeviceArray<char>(rows * pages * kPageBytes),
                 DeviceCopy(Shuffled(rows * pages)),
                 pages,
                 kPageBytes,
                 kRowsOfPage * kRowBytes,
                 kRowsOfPage,
                 2 * kHeadDim,
                 DType::kBFloat16,
                 kKvHeads};
    if (codes) {
      const int64_t of_codes = (context - 1) / kCodesOfPage + 1;
      p.codes = Codes(DeviceArray<char>(rows * of_codes * kPageBytes),
                      DeviceCopy(Shuffled(rows * of_codes)), context);
    }
    p.slots = DeviceCopy(Slots(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.first_positions = bulk ? DeviceCopy(std::vector<int32_t>(1, 0)) : nullptr;
    p.rows = rows;
    const double bytes = 2.0 * kHeadDim * kKvHeads * (bulk ? context : rows * kBlockTokens);
    Print(name, bytes,
          Time(bulk ? 2 : kLaunches, bulk ? 5 : kReplays,
               [&](int, cudaStream_t stream) { Check(cuda::LaunchDigest(p, stream), "digest"); }),
          bulk);
  }

 private:
  // Returns the KV cache of rows of `context` tokens: in the arena, or in pinned memory of its own.
  PagedCache Cache(int rows, int context, bool pinned) const {
    const int64_t blocks = context / kBlockTokens;
    const int64_t page = int64_t{kKvHeads} * 2 * kBlockTokens * kHeadDim * 2;
    PagedCache cache{arena_,       DeviceCopy(Shuffled(rows * blocks)),
                     blocks,       page,
                     kBlockTokens, kKvHeads,
                     kHeadDim,     DType::kBFloat16};
    if (pinned) {
      Check(cudaHostAlloc(&cache.base, static_cast<size_t>(blocks * page), 0), "pinned");
      std::memset(cache.base, 0x3c, static_cast<size_t>(blocks * page));
    }
    return cache;
  }

  static std::vector<int32_t> Slots(int rows) {
    std::vector<int32_t> slots(static_cast<size_t>(rows));
    std::iota(slots.begin(), slots.end(), 0);
    return slots;
  }

  // Returns the key codes of rows of `context` tokens.
  static PagedRows Codes(void* base, const int32_t* page_table, int context) {
    return {base,
            page_table,
            (context - 1) / kCodesOfPage + 1,
            kPageBytes,
            kCodesOfPage * kCodeBytes,
            kCodesOfPage,
            2 * KeyCodeWords(kHeadDim),
            DType::kFloat32,
            kKvHeads};
  }

  DigestScoresParams ScoresParams(int rows, int context) const {
    const int64_t blocks = context / kBlockTokens, pages = (blocks - 1) / kRowsOfPage + 1;
    DigestScoresParams p{};
    p.q = DeviceCopy(Normal(int64_t{rows} * kHeads * kHeadDim, 1.0f));
    p.q_stride = kHeads * kHeadDim;
    p.slots = DeviceCopy(Slots(rows));
    p.positions = DeviceCopy(std::vector<int32_t>(static_cast<size_t>(rows), context - 1));
    p.digests = {
        arena_,       pages_,           pages,   kPageBytes, kRowsOfPage * kRowBytes, kRowsOfPage,
        2 * kHeadDim, DType::kBFloat16, kKvHeads};
    p.score_stride = blocks;
    p.scores = DeviceArray<float>(rows * kKvHeads * p.score_stride);
    p.rows = rows;
    p.heads = kHeads;
    p.block_tokens = kBlockTokens;
    p.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
    p.reduction = GroupReduction::kMax;
    return p;
  }
  RefineScoresParams RefineParams(int rows, int context) const {
    const DigestScoresParams scores = ScoresParams(rows, context);
    const int64_t lists = int64_t{rows} * kKvHeads;
    RefineScoresParams p{};
    p.q = scores.q;
    p.q_stride = scores.q_stride;
    p.slots = scores.slots;
    p.positions = scores.positions;
    p.digests = scores.digests;
    p.codes = Codes(arena_, pages_, context);
    std::mt19937 random(5);
    std::vector<int32_t> all(static_cast<size_t>(context / kBlockTokens - 1)), units;
    std::iota(all.begin(), all.end(), 0);
    for (int64_t list = 0; list < lists; ++list) {
      std::shuffle(all.begin(), all.end(), random);
      std::sort(all.begin(), all.begin() + kShortlist);
      units.insert(units.end(), all.begin(), all.begin() + kShortlist);
    }
    p.units = {DeviceCopy(units),
               DeviceCopy(std::vector<int32_t>(static_cast<size_t>(lists), kShortlist)),
               kShortlist};
    p.scores = scores.scores;
    p.score_stride = scores.score_stride;
    p.rows = rows;
    p.heads = kHeads;
    p.block_tokens = kBlockTokens;
    p.scale = scores.scale;
    return p;
  }
  // Returns Scout's params for those scores.
  static TopKParams TopParams(int rows, const DigestScoresParams& scores) {
    constexpr int32_t kBudget = 64;
    TopKParams p{};
    p.scores = scores.scores;
    p.score_stride = scores.score_stride;
    p.slots = scores.slots;
    p.positions = scores.positions;
    p.selected = {DeviceArray<int32_t>(int64_t{rows} * kKvHeads * kBudget),
                  DeviceArray<int32_t>(int64_t{rows} * kKvHeads), kBudget};
    p.rows = rows;
    p.kv_heads = kKvHeads;
    p.unit_tokens = kBlockTokens;
    p.k = kBudget;
    p.first_units = 1;
    p.last_units = 2;
    p.margin = std::numeric_limits<float>::infinity();
    return p;
  }

  static constexpr int64_t kArenaBytes = int64_t{2} << 30;
  static constexpr int kLaunches = 40, kBesideLaunches = 10, kReplays = 15;

  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  void Print(const std::string& name, double bytes, const Timing& t, bool over_link = false) {
    const double rate = bytes / t.median_us / 1e3;
    std::printf("%-52s %8.2f %8.2f %8.2f %9.2f %7.0f", name.c_str(), t.median_us, t.least_us,
                t.most_us, bytes * 1e-6, rate);
    if (!over_link && bytes > 8e6) {
      std::printf(" %6.0f%%",
                  100 * rate / ReadRate(arena_, kArenaBytes, static_cast<int64_t>(bytes)));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string filter_;
  uint16_t* arena_ = nullptr;
  int32_t* pages_ = nullptr;
};

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  using namespace sluice::bench;
  using sluice::kernels::GroupReduction;
  constexpr float kNoMargin = std::numeric_limits<float>::infinity();
  Bench bench(argc > 1 ? argv[1] : "");
  for (const auto& [rows, context] :
       {std::pair{10, 64 << 10}, {1, 64 << 10}, {10, 8 << 10}, {64, 8 << 10}, {32, 32 << 10}}) {
    bench.Scores(rows, context, GroupReduction::kMax, "max");
  }
  bench.Scores(10, 64 << 10, GroupReduction::kMean, "mean");
  bench.Scores(10, 64 << 10, GroupReduction::kSoftmaxSum, "softmax-sum");
  bench.Refine(10, 64 << 10, GroupReduction::kMax, "max");
  bench.Refine(1, 64 << 10, GroupReduction::kMax, "max");
  bench.Refine(10, 64 << 10, GroupReduction::kSoftmaxSum, "softmax-sum");
  for (const int group : {4, 5, 8}) bench.Hash(10, 64 << 10, group);
  bench.Hash(1, 128 << 10, 4);
  bench.Hash(14, 32 << 10, 4);
  for (const int rows : {14, 64}) bench.HashOf(rows, 8 << 10, false);
  bench.HashOf(1, 32 << 10, true);
  bench.Top(10, 2048, 32, 64, 2, kNoMargin);
  bench.Top(1, 2048, 32, 64, 2, kNoMargin);
  bench.Top(64, 2048, 32, 64, 2, kNoMargin);
  bench.Top(10, 65536, 1, 2048, 64, 4.5f);
  bench.Top(1, 65536, 1, 2048, 64, 4.5f);
  bench.Beside(10, 64 << 10, 34816, 5120);
  bench.Beside(10, 64 << 10, 5120, 17408);
  for (const bool codes : {false, true}) {
    bench.Digest(10, 8 << 10, false, codes);
    bench.Digest(1, 64 << 10, true, codes);
  }
}
