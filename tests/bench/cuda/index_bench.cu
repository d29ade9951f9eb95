// Times the indexer's logits and the top-k behind them on a GPU, in DeepSeek-V3.2's geometry (64
// heads of 128, packed keys, 2,048 selected), beside plain reads of as many bytes in the same
// run. Launches run back to back in a graph, over pages in any order that rotate so that no
// launch finds its keys in L2. The scores do lie there, as they do behind the logits.
//
//   sluice-index-bench [SUBSTRING OF A CASE'S NAME]
//
// Each line has the microseconds of a launch (median, least and most of 15 replays), the bytes
// that it must move, the rate, and its share of the rate of plain reads.
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: this file is about them

constexpr int32_t kHeads = 64, kTopK = 2048;
constexpr int64_t kKeyBytes = IndexKeyBytes(DType::kFloat8E4M3);
constexpr int64_t kArenaBytes = int64_t{4} << 30;
constexpr int kReplays = 15;

// Fills pages with e4m3 values below 2 in magnitude, and scales below 2.
__global__ void FillPages(unsigned char* data, int64_t pages, int block_tokens) {
  const int64_t page_words = int64_t{block_tokens} * kKeyBytes / 4, words = pages * page_words;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    uint64_t z = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull;
    z ^= z >> 29;
    z *= 0xBF58476D1CE4E5B9ull;
    const auto bits = static_cast<uint32_t>(z >> 32);
    const bool is_scale = i % page_words >= int64_t{block_tokens} * kIndexDim / 4;
    reinterpret_cast<uint32_t*>(data)[i] = is_scale ? 0x3F800000u | bits >> 12 : bits & 0xBFBFBFBFu;
  }
}

template <typename T, typename Make>
T* Filled(int64_t size, Make make) {
  std::vector<T> values(static_cast<size_t>(size));
  for (T& v : values) v = make();
  return DeviceCopy(values);
}

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    cudaDeviceProp device;
    Check(cudaGetDeviceProperties(&device, 0), "device");
    arena_ = DeviceArray<unsigned char>(kArenaBytes);
    std::printf("%s\n%-44s %8s %8s %8s %9s %7s %7s\n", device.name, "case", "us", "least", "most",
                "MB", "GB/s", "of read");
  }

  // Runs the logits, the top-k of them, and one after the other. If a sequence has several rows,
  // its keys count once, and `apart` reads them for each row.
  void Run(int sequences, int context, int block_tokens, int stride, int rows_each = 1,
           bool apart = false) {
    const int rows = sequences * rows_each;
    std::string name = std::to_string(sequences) + " x " + std::to_string(context >> 10) + "K";
    if (rows_each > 1) name += " x " + std::to_string(rows_each) + (apart ? " apart" : " rows");
    name += ", blocks of " + std::to_string(block_tokens);
    if (name.find(filter_) == std::string::npos) return;
    const int64_t page_bytes = block_tokens * kKeyBytes, pages = kArenaBytes / page_bytes;
    FillPages<<<2048, 256>>>(arena_, pages, block_tokens);
    Check(cudaDeviceSynchronize(), "fill");
    std::mt19937 random(7);
    std::vector<int32_t> table(static_cast<size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    const int64_t blocks = (context + block_tokens - 1) / block_tokens;
    const int64_t sets = std::max<int64_t>(1, pages / (sequences * blocks));
    std::vector<int32_t> slots, positions;
    for (int r = 0; r < rows; ++r) {
      slots.push_back(r / rows_each);
      positions.push_back(context - rows_each + r % rows_each);
    }
    IndexLogitsParams p{};
    p.q = Filled<uint8_t>(int64_t{rows} * kHeads * kIndexDim,
                          [&] { return static_cast<uint8_t>(random() & 0xBF); });
    std::normal_distribution<float> normal;
    p.weights = Filled<float>(int64_t{rows} * kHeads, [&] { return normal(random); });
    p.slots = DeviceCopy(slots);
    p.positions = DeviceCopy(positions);
    p.sequence_rows = apart ? 1 : rows_each;
    int32_t* const device_table = DeviceCopy(table);
    p.cache = {arena_, device_table, blocks, page_bytes, block_tokens, DType::kFloat8E4M3};
    p.score_stride = stride;
    p.scores = DeviceArray<float>(rows * p.score_stride);
    p.rows = rows;
    p.heads = kHeads;
    TopKParams top{};
    top.scores = p.scores;
    top.score_stride = p.score_stride;
    top.slots = p.slots;
    top.positions = p.positions;
    top.selected = {DeviceArray<int32_t>(int64_t{rows} * kTopK), DeviceArray<int32_t>(rows), kTopK};
    top.rows = rows;
    top.kv_heads = top.unit_tokens = 1;
    top.k = kTopK;
    top.margin = std::numeric_limits<float>::infinity();
    const auto logits = [&](int i, cudaStream_t stream) {
      IndexLogitsParams of_set = p;
      of_set.cache.block_table = device_table + i % sets * sequences * blocks;
      Check(cuda::LaunchIndexLogits(of_set, stream), "index logits");
    };
    const double keys = static_cast<double>(kKeyBytes) * sequences * context;
    const double scores = 4.0 * rows * context;
    const int launches = keys > 100e6 ? 8 : 30;
    Print("logits, " + name, keys, Time(launches, kReplays, logits));
    Print("top-k, " + name, scores, Time(launches, kReplays, [&](int, cudaStream_t stream) {
            Check(cuda::LaunchTopK(top, stream), "top-k");
          }));
    Print("both, " + name, keys + scores, Time(launches, kReplays, [&](int i, cudaStream_t stream) {
            logits(i, stream);
            Check(cuda::LaunchTopK(top, stream), "top-k");
          }));
    cudaFree(p.scores);
    cudaFree(device_table);
  }

 private:
  void Print(const std::string& name, double bytes, const Timing& t) {
    const double rate = bytes / t.median_us / 1e3;
    std::printf("%-44s %8.2f %8.2f %8.2f %9.2f %7.0f", name.c_str(), t.median_us, t.least_us,
                t.most_us, bytes * 1e-6, rate);
    if (bytes > 4e6) {
      std::printf(" %6.0f%%",
                  100 * rate / ReadRate(arena_, kArenaBytes, static_cast<int64_t>(bytes)));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string filter_;
  unsigned char* arena_ = nullptr;
};

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  sluice::bench::Bench bench(argc > 1 ? argv[1] : "");
  constexpr int kLongest = 128 << 10;
  bench.Run(32, 128 << 10, 64, kLongest);
  bench.Run(32, 128 << 10, 32, kLongest);
  bench.Run(20, 128 << 10, 64, kLongest);
  bench.Run(5, 128 << 10, 64, kLongest);
  bench.Run(1, 128 << 10, 64, kLongest);
  bench.Run(76, 32 << 10, 64, 32 << 10);
  bench.Run(26, 32 << 10, 64, 32 << 10);
  bench.Run(4, 32 << 10, 64, 32 << 10);
  bench.Run(1, 32 << 10, 64, 32 << 10);
  bench.Run(1, 32 << 10, 64, kLongest);
  bench.Run(1, 2 << 10, 64, kLongest);
  for (const int sequences : {1, 8, 76}) {
    for (const bool apart : {false, true}) bench.Run(sequences, 32 << 10, 64, 32 << 10, 4, apart);
  }
}
