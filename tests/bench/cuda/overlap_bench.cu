// Measures a Transfer beside the operators that it runs beneath in a step: rows of 656 B come out
// of pinned DRAM by index lists (FlashTrans), while a product with fp8 weights, latent attention
// over packed entries, the indexer's scores or plain reads of HBM run on another stream. A few
// thread blocks move less; many take multiprocessors and bandwidth.
//
//   sluice-overlap-bench [POOL_GIB]
//
// Each line has the GB/s alone and beside the other, and the share of its speed that the other
// keeps. Both run all the time, in launches of their own.
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/linear/grouped_product.h"
#include "kernels/fp8_pairs.h"
#include "tests/bench/cuda/pinned_pool.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: this file is about them

constexpr int kRows = 76, kMisses = 605, kTokens = 32768, kPlaces = 6600;
constexpr int kSpare = 4;  // processors that attention and scores leave, as in a step

// Returns lists of misses of all sequences, sorted, with sequences as far apart as the pool
// allows.
TransferParams Misses(const PinnedPool& pool) {
  std::mt19937_64 random(7);
  const int64_t apart = static_cast<int64_t>(pool.bytes()) / kRows / 4096 * 4096;
  std::vector<int32_t> units, places, counts(kRows, kMisses), all(kTokens), targets(kPlaces);
  std::vector<int64_t> offsets;
  std::iota(all.begin(), all.end(), 0);
  std::iota(targets.begin(), targets.end(), 0);
  for (int row = 0; row < kRows; ++row) {
    std::shuffle(all.begin(), all.end(), random);
    std::shuffle(targets.begin(), targets.end(), random);
    std::sort(all.begin(), all.begin() + kMisses);
    units.insert(units.end(), all.begin(), all.begin() + kMisses);
    places.insert(places.end(), targets.begin(), targets.begin() + kMisses);
    offsets.push_back(row * apart);
  }
  TransferParams p{};
  p.source = pool.data();
  p.target = DeviceArray<char>(int64_t{kRows} * kPlaces * kPackedEntryBytes);
  p.source_offsets = DeviceCopy(offsets);
  p.target_stride = int64_t{kPlaces} * kPackedEntryBytes;
  p.source_pitch = p.target_pitch = p.unit_bytes = kPackedEntryBytes;
  p.source_units = DeviceCopy(units);
  p.target_units = DeviceCopy(places);
  p.counts = DeviceCopy(counts);
  p.lists = kRows;
  p.capacity = kMisses;
  return p;
}

// Enqueues one launch of a neighbour; `i` counts them.
using Neighbour = std::function<void(int i, cudaStream_t stream)>;

// The output projection, with one of four matrices in turn.
Neighbour Product() {
  constexpr int kMatrices = 4;
  constexpr int64_t kN = 7168, kK = 16384;
  auto* const weights = DeviceArray<uint8_t>(kMatrices * kN * kK);
  auto* const scales = DeviceArray<float>(kMatrices * kN / 32 * kK / 128);
  auto* const x = DeviceArray<uint16_t>(kRows * kK);
  Check(cudaMemset(weights, 0x31, kMatrices * kN * kK), "memset");
  Check(cudaMemset(scales, 0, kMatrices * kN / 32 * kK / 128 * 4), "memset");
  Check(cudaMemset(x, 0x3C, kRows * kK * 2), "memset");
  cuda::GroupedProduct p{};
  p.x = x;
  p.x_stride = kK;
  p.w.layout = kFp8Pairs;
  p.w.n = kN;
  p.w.k = kK;
  p.groups = 1;
  p.n = kN;
  p.y = DeviceArray<float>(kRows * kN);
  p.y_stride = kN;
  p.y_type = DType::kFloat32;
  p.rows = kRows;
  p.pairs_per_row = 1;
  return [=](int i, cudaStream_t stream) {
    cuda::GroupedProduct of_call = p;
    of_call.w.data = reinterpret_cast<const uint16_t*>(weights + i % kMatrices * kN * kK);
    of_call.w.scales = scales + i % kMatrices * kN / 32 * kK / 128;
    Check(cuda::LaunchGroupedProduct(of_call, stream), "product");
  };
}

// Attention of 76 rows to 2,048 entries, anywhere in their pools.
Neighbour Attention() {
  constexpr int kHeads = 128, kSelected = 2048, kBlock = 64;
  constexpr int64_t kPages = kPlaces / kBlock + 1;
  std::mt19937_64 random(8);
  std::vector<int32_t> pages(kRows * kPages), slots(kRows), entries, counts(kRows, kSelected),
      all(kPlaces);
  std::iota(pages.begin(), pages.end(), 0);
  std::iota(slots.begin(), slots.end(), 0);
  std::iota(all.begin(), all.end(), 0);
  for (int row = 0; row < kRows; ++row) {
    std::shuffle(all.begin(), all.end(), random);
    entries.insert(entries.end(), all.begin(), all.begin() + kSelected);
  }
  const int64_t bytes = kRows * kPages * kBlock * kPackedEntryBytes;
  const int64_t q_elements = int64_t{kRows} * kHeads * (kPackedRank + kPackedRope);
  SparseMlaParams p{};
  auto* const base = DeviceArray<uint8_t>(bytes);
  auto* const q = DeviceArray<uint16_t>(q_elements);
  Check(cudaMemset(base, 0x31, static_cast<size_t>(bytes)), "memset");
  Check(cudaMemset(q, 0x3C, static_cast<size_t>(q_elements) * 2), "memset");
  p.q = q;
  p.slots = DeviceCopy(slots);
  p.cache = {base,   DeviceCopy(pages), kPages,      int64_t{kBlock} * kPackedEntryBytes,
             kBlock, kPackedRank,       kPackedRope, DType::kFloat8E4M3};
  p.entries = DeviceCopy(entries);
  p.counts = DeviceCopy(counts);
  p.capacity = kSelected;
  p.out = DeviceArray<uint16_t>(int64_t{kRows} * kHeads * kPackedRank);
  p.scratch_bytes = cuda::SparseMlaScratchBytes(kRows, kHeads, kPackedRank, kSelected);
  p.scratch = DeviceArray<char>(p.scratch_bytes);
  p.rows = p.decode_rows = kRows;
  p.heads = kHeads;
  p.spare_processors = kSpare;
  p.scale = 0.1f;
  p.q_type = p.out_type = DType::kBFloat16;
  return [=](int /*i*/, cudaStream_t stream) {
    Check(cuda::LaunchSparseMla(p, stream), "sparse_mla");
  };
}

// The indexer's scores of half as many rows, which a schedule in two halves runs beside a
// transfer.
Neighbour Scores() {
  constexpr int kHeads = 64, kBlock = 64, kScored = kRows / 2;
  constexpr int64_t kPages = kTokens / kBlock, kKeyBytes = 132;
  std::mt19937_64 random(9);
  std::vector<int32_t> pages(kScored * kPages), slots(kScored), positions(kScored, kTokens - 1);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  std::iota(slots.begin(), slots.end(), 0);
  const int64_t bytes = kScored * kPages * kBlock * kKeyBytes;
  auto* const base = DeviceArray<uint8_t>(bytes);
  auto* const q = DeviceArray<uint8_t>(int64_t{kScored} * kHeads * kIndexDim);
  auto* const weights = DeviceArray<float>(int64_t{kScored} * kHeads);
  Check(cudaMemset(base, 0x31, static_cast<size_t>(bytes)), "memset");
  Check(cudaMemset(q, 0x31, size_t{kScored} * kHeads * kIndexDim), "memset");
  Check(cudaMemset(weights, 0, size_t{kScored} * kHeads * sizeof(float)), "memset");
  IndexLogitsParams p{};
  p.q = q;
  p.weights = weights;
  p.slots = DeviceCopy(slots);
  p.positions = DeviceCopy(positions);
  p.cache = {base,   DeviceCopy(pages), kPages, int64_t{kBlock} * kKeyBytes,
             kBlock, DType::kFloat8E4M3};
  p.score_stride = kTokens;
  p.scores = DeviceArray<float>(int64_t{kScored} * kTokens);
  p.rows = kScored;
  p.heads = kHeads;
  p.spare_processors = kSpare;
  return [=](int /*i*/, cudaStream_t stream) {
    Check(cuda::LaunchIndexLogits(p, stream), "index_logits");
  };
}

Neighbour Reads() {
  constexpr int64_t kBytes = int64_t{1} << 28;
  auto* const data = DeviceArray<char>(kBytes);
  auto* const sink = DeviceArray<uint32_t>(1);
  Check(cudaMemset(data, 1, kBytes), "memset");
  return [=](int /*i*/, cudaStream_t stream) {
    Check(cuda::LaunchReadProbe(data, kBytes, sink, stream), "read");
  };
}

double Seconds(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return ms * 1e-3;
}

// The seconds of each of `times` replays of `graph`. They begin when `begin` has passed, if
// given.
class Replays {
 public:
  Replays(Graph& graph, cudaStream_t stream, int times) : events_(static_cast<size_t>(times) + 1) {
    for (cudaEvent_t& event : events_) SLUICE_BENCH_CHECK(cudaEventCreate(&event));
    SLUICE_BENCH_CHECK(cudaEventRecord(events_[0], stream));
    for (int i = 0; i < times; ++i) {
      graph.Launch(stream);
      SLUICE_BENCH_CHECK(cudaEventRecord(events_[static_cast<size_t>(i) + 1], stream));
    }
  }
  ~Replays() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  cudaEvent_t first() const { return events_.front(); }
  cudaEvent_t last() const { return events_.back(); }
  void Wait() const { SLUICE_BENCH_CHECK(cudaEventSynchronize(last())); }
  // Returns the median of the replays that lie between `from` and `to`.
  double Median(cudaEvent_t from, cudaEvent_t to) const {
    std::vector<double> inside;
    for (size_t i = 1; i < events_.size(); ++i) {
      if (Seconds(from, events_[i - 1]) >= 0 && Seconds(events_[i], to) >= 0) {
        inside.push_back(Seconds(events_[i - 1], events_[i]));
      }
    }
    return inside.empty() ? 0 : Summary(inside).median;
  }

 private:
  std::vector<cudaEvent_t> events_;
};

void Run(const char* name, const TransferParams& misses, const Neighbour& neighbour,
         cudaStream_t transfers, cudaStream_t others) {
  constexpr int kLaunches = 8;
  constexpr double kSeconds = 0.012;  // both run for that long
  int launched = 0;
  Graph other(others, [&] {
    for (int i = 0; i < kLaunches; ++i) neighbour(launched++, others);
  });
  Replays(other, others, 2).Wait();
  const Replays other_alone(other, others, 5);
  other_alone.Wait();
  const double neighbour_alone = other_alone.Median(other_alone.first(), other_alone.last());
  std::printf("beside %s, %.1f us alone\n", name, neighbour_alone / kLaunches * 1e6);
  // A graph has one transfer: with two in a row the second's blocks would wait on processors of
  // their own while the first one's run.
  const double bytes = double{kPackedEntryBytes} * kMisses * kRows;
  for (const int blocks : {1, 2, 3, 4, 8}) {
    TransferParams p = misses;
    p.max_workers = blocks;
    Graph graph(transfers, [&] { Check(cuda::LaunchTransfer(p, transfers), "transfer"); });
    Replays(graph, transfers, 1).Wait();
    const Replays alone(graph, transfers, 5);
    alone.Wait();
    const double transfer_alone = alone.Median(alone.first(), alone.last());
    const Replays beside(graph, transfers, static_cast<int>(kSeconds / transfer_alone) + 2);
    const Replays with(other, others, static_cast<int>(kSeconds / neighbour_alone) + 2);
    beside.Wait();
    with.Wait();
    const double of_transfer = beside.Median(with.first(), with.last());
    const double of_neighbour = with.Median(beside.first(), beside.last());
    std::printf("  %2d blocks: %5.1f GB/s alone, %5.1f beside; it keeps %5.1f %%\n", blocks,
                bytes / transfer_alone * 1e-9, of_transfer > 0 ? bytes / of_transfer * 1e-9 : 0.0,
                of_neighbour > 0 ? 100 * neighbour_alone / of_neighbour : 0.0);
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const size_t gib = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 48;
  const PinnedPool pool(gib << 30);
  const TransferParams misses = Misses(pool);
  cudaStream_t transfers, others;
  SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&transfers, cudaStreamNonBlocking));
  SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&others, cudaStreamNonBlocking));
  Run("output projection, 7168 x 16384 in fp8, 76 rows", misses, Product(), transfers, others);
  Run("latent attention, 76 rows x 2,048 entries", misses, Attention(), transfers, others);
  Run("the indexer's scores, 38 rows of 32K", misses, Scores(), transfers, others);
  Run("plain reads of 256 MiB", misses, Reads(), transfers, others);
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
