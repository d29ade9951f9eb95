// Times attention over lists on a GPU at the shapes of the policies, against the rate of plain
// reads of as many bytes, measured in this run.
//
//   sluice-sparse-attention-bench [--gib N] [--pinned]
//
// --gib is the size of the KV arena (default 8). With --pinned it lies in the host's memory and is
// read over the link. Every launch of a graph reads other pages, so
// that none finds its K and V in L2; the time is that of one launch. Lists, q and results stay
// where they are.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using kernels::DType;
using kernels::MovingAverageParams;
using kernels::SparseAttentionParams;

struct Case {
  const char* name;
  int rows;
  int tokens;  // tokens of a list
  int unit_tokens;
  int heads = 40;
  int kv_heads = 8;
};

constexpr int kDim = 128;
constexpr int kBlockTokens = 32;
constexpr int kPlaceTokens = 4096;  // places of a sequence and KV head

constexpr Case kCases[] = {
    {"scout, blocks of 32", 10, 1900, 32},        {"scout, blocks of 16", 10, 1900, 16},
    {"scout, blocks of 32", 20, 1900, 32},        {"scout, blocks of 32", 1, 1900, 32},
    {"scout, blocks of 32, 8 rows", 8, 1900, 32}, {"scout, group 4", 10, 1900, 32, 32},
    {"hgca, window of 512", 10, 512, 32},         {"recall, single tokens", 10, 2048, 1},
    {"recall, single tokens", 1, 2048, 1},        {"long lists", 4, 16384, 32},
    {"fluxion, blocks of 16", 16, 800, 16, 32},   {"fluxion, blocks of 16", 4, 800, 16, 32},
};

// Fills with bf16 of values in [-1, 1), from a hash of the index.
__global__ void FillKernel(uint16_t* data, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    const float v = static_cast<float>(z >> 32 & 0xffffff) * 0x1p-23f - 1.0f;
    data[i] = static_cast<uint16_t>(__float_as_uint(v) >> 16);
  }
}

void Run(const Case& c, char* arena, int64_t arena_bytes, std::mt19937_64& random) {
  const int64_t page_bytes = int64_t{c.kv_heads} * 4 * kDim * kBlockTokens;
  const int places = std::max(kPlaceTokens, 2 * c.tokens);
  const int blocks = places / kBlockTokens, lists = c.rows * c.kv_heads;
  const int capacity = (c.tokens + c.unit_tokens - 1) / c.unit_tokens;
  std::vector<int32_t> pages(static_cast<size_t>(arena_bytes / page_bytes));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  const int64_t bytes = int64_t{lists} * c.tokens * 4 * kDim;
  // A launch's lists name part of its sequences' pages. The next launches' lists name the others.
  const auto table_size = static_cast<size_t>(c.rows * blocks);
  std::vector<int32_t*> tables;
  for (size_t at = 0; at + table_size <= pages.size() && tables.size() < 24; at += table_size) {
    tables.push_back(
        DeviceCopy(std::vector<int32_t>(pages.begin() + static_cast<int64_t>(at),
                                        pages.begin() + static_cast<int64_t>(at + table_size))));
  }
  std::vector<int32_t> units(static_cast<size_t>(lists * capacity)),
      of_list(static_cast<size_t>(places / c.unit_tokens));
  std::vector<int32_t> where(units.size());
  std::iota(of_list.begin(), of_list.end(), 0);
  for (int l = 0; l < lists; ++l) {
    const auto begin = static_cast<size_t>(l * capacity);
    // Units are ascending, at any places.
    for (int i = 0; i < capacity; ++i) units[begin + static_cast<size_t>(i)] = 2 * i;
    std::shuffle(of_list.begin(), of_list.end(), random);
    std::copy_n(of_list.begin(), capacity, where.begin() + static_cast<int64_t>(begin));
  }
  const int last_tokens = c.tokens - (capacity - 1) * c.unit_tokens;
  std::vector<int32_t> slots(static_cast<size_t>(c.rows));
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<int32_t> positions(slots.size(),
                                       2 * (capacity - 1) * c.unit_tokens + last_tokens - 1);
  const std::vector<int32_t> counts(static_cast<size_t>(lists), capacity);
  std::vector<float> q(static_cast<size_t>(c.rows * c.heads * kDim));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (float& v : q) v = normal(random);

  SparseAttentionParams p{};
  p.q = DeviceCopy(q);
  p.q_stride = c.heads * kDim;
  p.slots = DeviceCopy(slots);
  p.positions = DeviceCopy(positions);
  p.cache = {arena, nullptr, blocks, page_bytes, kBlockTokens, c.kv_heads, kDim, DType::kBFloat16};
  p.units = DeviceCopy(units);
  p.places = DeviceCopy(where);
  p.counts = DeviceCopy(counts);
  p.o = DeviceArray<float>(int64_t{c.rows} * c.heads * kDim);
  p.lse = DeviceArray<float>(int64_t{c.rows} * c.heads);
  p.capacity = capacity;
  p.unit_tokens = c.unit_tokens;
  p.rows = c.rows;
  p.heads = c.heads;
  p.kv_head_end = c.kv_heads;
  p.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  const int launches = static_cast<int>(tables.size());
  const Timing t = Time(launches, 9, [&](int i, cudaStream_t stream) {
    p.cache.block_table = tables[static_cast<size_t>(i)];
    Check(kernels::cuda::LaunchSparseAttention(p, stream), "LaunchSparseAttention");
  });
  const double ceiling = ReadRate(arena, arena_bytes, bytes);
  const double rate = static_cast<double>(bytes) / t.median_us / 1e3;
  std::printf(
      "%-28s %2d rows x %d lists x %5d tokens %6.1f MB %6.1f us [%.1f, %.1f] %5.0f GB/s, "
      "reads %5.0f: %5.1f %%\n",
      c.name, c.rows, c.kv_heads, c.tokens, static_cast<double>(bytes) / 1e6, t.median_us,
      t.least_us, t.most_us, rate, ceiling, 100 * rate / ceiling);

  if (c.unit_tokens == kBlockTokens && c.tokens <= 512) {
    MovingAverageParams m{};
    m.q = p.q;
    m.q_stride = p.q_stride;
    m.slots = p.slots;
    m.positions = p.positions;
    m.cache = p.cache;
    m.units = p.units;
    m.places = p.places;
    m.counts = p.counts;
    m.lse = p.lse;
    const std::vector<int32_t> numbers = slots;
    m.average = {DeviceArray<float>(int64_t{lists} * places),
                 DeviceCopy(numbers),
                 1,
                 int64_t{c.kv_heads} * places * 4,
                 int64_t{places} * 4,
                 places,
                 1,
                 DType::kFloat32,
                 c.kv_heads};
    m.capacity = capacity;
    m.unit_tokens = c.unit_tokens;
    m.rows = c.rows;
    m.heads = c.heads;
    m.scale = p.scale;
    m.alpha = 0.3f;
    m.reduction = kernels::GroupReduction::kMean;
    const auto average = [&](int i, cudaStream_t stream) {
      m.cache.block_table = tables[static_cast<size_t>(i)];
      Check(kernels::cuda::LaunchMovingAverage(m, stream), "LaunchMovingAverage");
    };
    const Timing cold = Time(launches, 9, average);
    const Timing both = Time(launches, 9, [&](int i, cudaStream_t stream) {
      p.cache.block_table = tables[static_cast<size_t>(i)];
      Check(kernels::cuda::LaunchSparseAttention(p, stream), "LaunchSparseAttention");
      average(i, stream);
    });
    std::printf("  moving averages: %.1f us from HBM (%.0f GB/s), %.1f us after its attention\n",
                cold.median_us, static_cast<double>(bytes) / 2 / cold.median_us / 1e3,
                both.median_us - t.median_us);
  }
  std::fflush(stdout);
  for (int32_t* table : tables) cudaFree(table);
}

int Main(int argc, char** argv) {
  int64_t gib = 8;
  bool pinned = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--gib") == 0 && i + 1 < argc) gib = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--pinned") == 0) pinned = true;
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %d SMs; arena %lld GiB%s; heads of %d\n", device.name,
              device.multiProcessorCount, static_cast<long long>(gib), pinned ? ", pinned" : "",
              kDim);
  const int64_t bytes = gib << 30;
  char* arena = nullptr;
  if (pinned) {
    Check(cudaHostAlloc(&arena, static_cast<size_t>(bytes), 0), "pinned");
  } else {
    arena = DeviceArray<char>(bytes);
  }
  FillKernel<<<4096, 256>>>(reinterpret_cast<uint16_t*>(arena), bytes / 2);
  Check(cudaDeviceSynchronize(), "fill");
  std::mt19937_64 random(5);
  for (const Case& c : kCases) Run(c, arena, bytes, random);
  Check(cudaDeviceSynchronize(), "end");
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
