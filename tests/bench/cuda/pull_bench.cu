// Times PullAttention, whose parts a thread of this program grants as fast as it is asked, against
// the rate at which a plain kernel reads as many bytes over the link, measured in this run.
//
//   sluice-pull-bench [--gib N]
//
// --gib is the size of the pinned KV arena (default 4). Every launch of a graph reads other pages.
// No CPU worker reads beside the GPU, so this is the operator's own rate, and what the dialogue
// costs it.
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "kernels/cuda/common/launch.h"
#include "kernels/list_parts.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using kernels::MergePartsParams;
using kernels::PullAsk;
using kernels::PullAttentionParams;
using kernels::PullGrant;

constexpr int kRows = 8, kHeads = 32, kKvHeads = 8, kDim = 128, kLists = kRows * kKvHeads;
constexpr int kBlockTokens = 32, kUnitTokens = 16, kListTokens = 2048, kContext = 4096;
constexpr int kUnits = kListTokens / kUnitTokens, kUnitBytes = kUnitTokens * 4 * kDim;
constexpr int kBlocks = kContext / kBlockTokens;
constexpr int64_t kPageBytes = int64_t{kKvHeads} * 4 * kDim * kBlockTokens;
constexpr int64_t kBytes = int64_t{kLists} * kListTokens * 4 * kDim;

template <typename T>
T* PinnedArray(int64_t size) {
  void* data = nullptr;
  Check(cudaHostAlloc(&data, static_cast<size_t>(size) * sizeof(T), 0), "cudaHostAlloc");
  std::memset(data, 0, static_cast<size_t>(size) * sizeof(T));
  return static_cast<T*>(data);
}

// Grants all parts in their order, then -1 to every puller, and begins again with the next launch.
class Arbiter {
 public:
  Arbiter(const PullAttentionParams& p, PullGrant* grants)
      : asks_(p.asks),
        grants_(grants),
        pullers_(p.pullers),
        parts_(kernels::PartsOfList(kUnits, p.least_units)) {
    thread_ = std::thread([this] {
      while (!stop_) Look();
    });
  }
  ~Arbiter() {
    stop_ = true;
    thread_.join();
  }

 private:
  void Look() {
    for (int i = 0; i < pullers_; ++i) {
      const uint32_t asked = __atomic_load_n(&asks_[i].number, __ATOMIC_ACQUIRE);
      if (asked == grants_[i].number) continue;
      const bool none = next_ == kLists * parts_;
      grants_[i].list = none ? -1 : next_ / parts_;
      grants_[i].part = none ? -1 : next_ % parts_;
      __atomic_store_n(&grants_[i].number, asked, __ATOMIC_RELEASE);
      if (!none) {
        ++next_;
      } else if (++ended_ == pullers_) {
        next_ = ended_ = 0;
      }
    }
  }

  const PullAsk* const asks_;
  PullGrant* const grants_;
  const int pullers_, parts_;
  int next_ = 0, ended_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Lists of every second unit of their rows, whose pages lie in any order. There are as many tables
// of pages as fit into the arena.
PullAttentionParams Lists(char* arena, int64_t arena_bytes, std::vector<int32_t*>& tables) {
  std::mt19937_64 random(5);
  std::vector<int32_t> pages(static_cast<size_t>(arena_bytes / kPageBytes));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  for (size_t at = 0; at + kRows * kBlocks <= pages.size(); at += kRows * kBlocks) {
    const auto first = pages.begin() + static_cast<int64_t>(at);
    tables.push_back(DeviceCopy(std::vector<int32_t>(first, first + kRows * kBlocks)));
  }
  std::vector<int32_t> units(kLists * kUnits), slots(kRows);
  for (size_t i = 0; i < units.size(); ++i) units[i] = static_cast<int32_t>(2 * (i % kUnits));
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<float> q(kRows * kHeads * kDim);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (float& v : q) v = normal(random);
  PullAttentionParams p{};
  p.attention.q = DeviceCopy(q);
  p.attention.q_stride = kHeads * kDim;
  p.attention.slots = DeviceCopy(slots);
  p.attention.positions = DeviceCopy(std::vector<int32_t>(kRows, kContext - 1));
  p.attention.cache = {arena,        nullptr,  kBlocks, kPageBytes,
                       kBlockTokens, kKvHeads, kDim,    kernels::DType::kBFloat16};
  p.attention.units = DeviceCopy(units);
  p.attention.counts = DeviceCopy(std::vector<int32_t>(kLists, kUnits));
  p.attention.capacity = kUnits;
  p.attention.unit_tokens = kUnitTokens;
  p.attention.rows = kRows;
  p.attention.heads = kHeads;
  p.attention.kv_head_end = kKvHeads;
  p.attention.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  p.most_parts = kernels::kMostListParts;
  p.deadline_ns = uint64_t{10'000'000'000};
  const int64_t items = int64_t{kLists} * p.most_parts * kHeads / kKvHeads;
  p.part_o = DeviceArray<float>(items * kDim);
  p.part_lse = DeviceArray<float>(items);
  p.taken = DeviceCopy(std::vector<uint32_t>(kLists, 0));
  return p;
}

void Run(PullAttentionParams p, const std::vector<int32_t*>& tables, int part_kib, double ceiling) {
  p.least_units = part_kib * 1024 / kUnitBytes;
  p.asks = PinnedArray<PullAsk>(p.pullers);
  PullGrant* const grants = PinnedArray<PullGrant>(p.pullers);
  p.grants = grants;
  uint32_t* const flags = PinnedArray<uint32_t>(32);
  p.closed = flags;
  p.missed = flags + 16;
  const MergePartsParams m = {p.part_o,
                              p.part_lse,
                              p.taken,
                              p.attention.slots,
                              DeviceArray<float>(kRows * kHeads * kDim),
                              DeviceArray<float>(kRows * kHeads),
                              kRows,
                              kHeads,
                              kKvHeads,
                              kDim,
                              p.most_parts};
  const int launches = static_cast<int>(std::min<size_t>(tables.size(), 8));
  const auto pull = [&](int i, cudaStream_t stream) {
    p.attention.cache.block_table = tables[static_cast<size_t>(i)];
    Check(kernels::cuda::LaunchPullAttention(p, stream), "LaunchPullAttention");
  };
  Timing alone, merged;
  {
    const Arbiter arbiter(p, grants);
    alone = Time(launches, 9, pull);
    merged = Time(launches, 9, [&](int i, cudaStream_t stream) {
      pull(i, stream);
      Check(kernels::cuda::LaunchMergeParts(m, stream), "LaunchMergeParts");
    });
  }
  const double rate = static_cast<double>(kBytes) / alone.median_us / 1e3;
  std::printf(
      "%3d pullers, parts of %4d KiB: %7.1f us [%.1f, %.1f] %5.1f GB/s, reads %5.1f: %5.1f %%; "
      "merge %+.1f us%s\n",
      p.pullers, part_kib, alone.median_us, alone.least_us, alone.most_us, rate, ceiling,
      100 * rate / ceiling, merged.median_us - alone.median_us,
      *p.missed == 0 ? "" : "; A DEADLINE WAS MISSED");
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  int64_t gib = 4;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--gib") == 0) gib = std::atoll(argv[i + 1]);
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s; %d lists of %d tokens, %.1f MB, of a pinned arena of %lld GiB\n", device.name,
              kLists, kListTokens, static_cast<double>(kBytes) / 1e6, static_cast<long long>(gib));
  char* const arena = PinnedArray<char>(gib << 30);
  std::vector<int32_t*> tables;
  PullAttentionParams p = Lists(arena, gib << 30, tables);
  const double ceiling = ReadRate(arena, gib << 30, kBytes);
  for (const int part_kib : {64, 256, 1024}) {
    for (p.pullers = 1; p.pullers <= 32; p.pullers *= 2) Run(p, tables, part_kib, ceiling);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
