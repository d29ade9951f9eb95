// Times gather and scatter between pinned DRAM and HBM at the shapes of the offloading policies,
// beside the copy engine; and pages of a sequence that leaves HBM and comes back.
//
//   sluice-transfer-bench [POOL_GIB [workers | reach | rows]]
//
// With `workers` it measures only the rates that few thread blocks reach with rows of 656 B. With
// `reach` it measures how these depend on the memory that a replay visits, and whether it helps
// that a layer's pages were visited shortly before. With `rows` it measures how they depend on the
// bytes of a row: K or V of a token and KV head apart (256 B at a head_dim of 128), together
// (512 B), and longer ones.
//
// ESS: sequences lie POOL / sequences apart, rows of 656 B of one layer of 32,768 tokens lie
// together, and a sequence's misses are sorted. Each graph replay moves eight layers, one after
// the other (with `reach`, up to as many as a sequence has room for). GB/s count payload only.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/pinned_pool.h"
#include "tests/bench/cuda/stream_timing.h"

namespace sluice::bench {
namespace {

using kernels::TransferParams;
using kernels::cuda::CopyPiece;

constexpr int64_t kTokens = 32768;  // tokens of a sequence
constexpr int kLayers = 8;          // moved by one replay, except with `reach`
constexpr int kRepeats = 5;

template <typename T>
T* NewDevice(size_t count) {
  void* data = nullptr;
  SLUICE_BENCH_CHECK(cudaMalloc(&data, count * sizeof(T)));
  return static_cast<T*>(data);
}

template <typename T>
T* ToDevice(const std::vector<T>& values) {
  T* data = NewDevice<T>(values.size());
  SLUICE_BENCH_CHECK(
      cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// Returns `count` distinct numbers below `below`, sorted or shuffled.
std::vector<int32_t> Distinct(int64_t count, int64_t below, bool sorted, std::mt19937_64& random) {
  std::vector<int32_t> all(static_cast<size_t>(below));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    std::swap(all[i], all[i + random() % (all.size() - i)]);
  }
  all.resize(static_cast<size_t>(count));
  if (sorted) std::sort(all.begin(), all.end());
  return all;
}

uint32_t Pattern(uint64_t address) {
  return static_cast<uint32_t>((address * 0x9E3779B97F4A7C15ull) >> 32) | 1u;
}

// One shape: lists of `units` random units out of `home_units` in DRAM, into random slots of HBM.
struct Shape {
  std::string name;
  int64_t unit_bytes;
  int lists;      // sequences, or sequences x heads
  int64_t units;  // moved per list
  int64_t home_units;
  int64_t slots;  // slots of a list in HBM
  // If > 0, lists have from this many to `units`, in equal ratios, shuffled.
  int64_t least_units = 0;
  // If > 0, a unit is a token: a row of K and one of V, in blocks of so many tokens. Homes and
  // slots are counted in rows.
  int32_t block_tokens = 0;

  int parts() const { return block_tokens > 0 ? 2 : 1; }
  // Returns the row at which a unit begins.
  int32_t RowOf(int32_t unit) const {
    return block_tokens > 0 ? unit / block_tokens * 2 * block_tokens + unit % block_tokens : unit;
  }
};

// Returns the units of each list.
std::vector<int32_t> CountsOf(const Shape& shape) {
  std::vector<int32_t> counts(static_cast<size_t>(shape.lists), static_cast<int32_t>(shape.units));
  if (shape.least_units == 0) return counts;
  const double ratio = static_cast<double>(shape.units) / static_cast<double>(shape.least_units);
  for (size_t i = 0; i < counts.size(); ++i) {
    const double share = static_cast<double>(i) / static_cast<double>(counts.size() - 1);
    counts[i] =
        static_cast<int32_t>(static_cast<double>(shape.least_units) * std::pow(ratio, share));
  }
  std::shuffle(counts.begin(), counts.end(), std::mt19937_64(5));
  return counts;
}

// Reads a word of every `step` bytes of each list's home, which fetches its pages' translations.
__global__ void TouchKernel(const char* pool, const int64_t* offsets, int64_t home_bytes,
                            int64_t step, uint32_t* sink) {
  const char* const home = pool + offsets[blockIdx.x];
  uint32_t sum = 0;
  for (int64_t at = threadIdx.x * step; at < home_bytes; at += blockDim.x * step) {
    sum ^= *reinterpret_cast<const volatile uint32_t*>(home + at);
  }
  if (sum == 0x12345678u) *sink = sum;
}

class Case {
 public:
  Case(const Shape& shape, const PinnedPool& pool, cudaStream_t stream, int layers = kLayers)
      : shape_(shape), pool_(pool), stream_(stream), lists_(static_cast<size_t>(layers)) {
    std::mt19937_64 random(7);
    const int64_t home_bytes = shape.home_units * shape.unit_bytes;
    const int64_t apart = static_cast<int64_t>(pool.bytes()) / shape.lists / 4096 * 4096;
    const int64_t homes = apart / home_bytes;  // layers that a sequence has room for
    if (homes < 1) {
      std::printf("%s: the pool is too small\n", shape.name.c_str());
      std::exit(1);
    }
    hbm_ = NewDevice<char>(static_cast<size_t>(shape.lists * shape.slots * shape.unit_bytes));
    for (int layer = 0; layer < layers; ++layer) {
      Lists& l = lists_[static_cast<size_t>(layer)];
      for (int list = 0; list < shape.lists; ++list) {
        auto units = Distinct(shape.units, shape.home_units / shape.parts(), true, random);
        auto slots = Distinct(shape.units, shape.slots / shape.parts(), false, random);
        for (int32_t& unit : units) unit = shape.RowOf(unit);
        for (int32_t& slot : slots) slot = shape.RowOf(slot);
        l.home_units.insert(l.home_units.end(), units.begin(), units.end());
        l.slots.insert(l.slots.end(), slots.begin(), slots.end());
        l.offsets.push_back(list * apart + layer * homes / layers * home_bytes);
      }
      l.device_home_units = ToDevice(l.home_units);
      l.device_slots = ToDevice(l.slots);
      l.device_offsets = ToDevice(l.offsets);
    }
    host_counts_ = CountsOf(shape);
    counts_ = ToDevice(host_counts_);
  }
  ~Case() {
    for (Lists& l : lists_) {
      cudaFree(l.device_home_units);
      cudaFree(l.device_slots);
      cudaFree(l.device_offsets);
    }
    cudaFree(hbm_);
    cudaFree(counts_);
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  TransferParams Params(int layer, bool gather, int max_blocks) const {
    const Lists& l = lists_[static_cast<size_t>(layer)];
    TransferParams p{};
    p.source = gather ? pool_.data() : hbm_;
    p.target = gather ? hbm_ : pool_.data();
    p.source_offsets = gather ? l.device_offsets : nullptr;
    p.target_offsets = gather ? nullptr : l.device_offsets;
    p.source_stride = p.target_stride = shape_.slots * shape_.unit_bytes;
    p.source_pitch = p.target_pitch = shape_.unit_bytes;
    p.source_units = gather ? l.device_home_units : l.device_slots;
    p.target_units = gather ? l.device_slots : l.device_home_units;
    p.counts = counts_;
    p.lists = shape_.lists;
    p.capacity = static_cast<int32_t>(shape_.units);
    p.unit_bytes = static_cast<int32_t>(shape_.unit_bytes);
    p.max_workers = max_blocks;
    p.parts = shape_.parts();
    p.part_pitch = shape_.block_tokens * shape_.unit_bytes;
    return p;
  }

  double bytes() const {
    return static_cast<double>(shape_.unit_bytes * shape_.parts()) *
           static_cast<double>(
               std::accumulate(host_counts_.begin(), host_counts_.end(), int64_t{0}));
  }

  int layers() const { return static_cast<int>(lists_.size()); }

  // Enqueues one launch for each layer, on the case's stream.
  void MoveLayers(bool gather, int max_blocks) {
    for (int layer = 0; layer < layers(); ++layer) {
      SLUICE_BENCH_CHECK(kernels::cuda::LaunchTransfer(Params(layer, gather, max_blocks), stream_));
    }
  }

  Times Time(bool gather, int max_blocks) {
    Graph graph(stream_, [&] { MoveLayers(gather, max_blocks); });
    Times t = TimeOnStream(stream_, kRepeats, [&] { graph.Launch(stream_); });
    return {t.median / layers(), t.low / layers(), t.high / layers()};
  }

  // Gathers with a visit of a layer's homes before each; the times of the gathers alone and of
  // the visits alone, by events between them. One replay counts, after one that does not.
  struct Visited {
    double visits, gathers;  // median of a layer
  };
  Visited TimeVisited(int64_t step, int max_blocks) {
    std::vector<cudaEvent_t> events(2 * lists_.size() + 1);
    for (cudaEvent_t& event : events) SLUICE_BENCH_CHECK(cudaEventCreate(&event));
    const int64_t home_bytes = shape_.home_units * shape_.unit_bytes;
    auto* const sink = reinterpret_cast<uint32_t*>(hbm_);
    for (int replay = 0; replay < 2; ++replay) {
      SLUICE_BENCH_CHECK(cudaEventRecord(events[0], stream_));
      for (int layer = 0; layer < layers(); ++layer) {
        TouchKernel<<<shape_.lists, 64, 0, stream_>>>(
            pool_.data(), lists_[static_cast<size_t>(layer)].device_offsets, home_bytes, step,
            sink);
        SLUICE_BENCH_CHECK(cudaEventRecord(events[static_cast<size_t>(2 * layer + 1)], stream_));
        SLUICE_BENCH_CHECK(kernels::cuda::LaunchTransfer(Params(layer, true, max_blocks), stream_));
        SLUICE_BENCH_CHECK(cudaEventRecord(events[static_cast<size_t>(2 * layer + 2)], stream_));
      }
      SLUICE_BENCH_CHECK(cudaStreamSynchronize(stream_));
    }
    std::vector<double> visits, gathers;
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      float ms = 0;
      SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
      (i % 2 == 0 ? visits : gathers).push_back(ms * 1e-3);
    }
    for (const cudaEvent_t event : events) SLUICE_BENCH_CHECK(cudaEventDestroy(event));
    return {Summary(visits).median, Summary(gathers).median};
  }

  // Gathers the data that the host wrote, scatters it to memory that held none of it, and
  // compares.
  bool Verify() {
    ForEachUnit([&](char* home, int64_t) { Fill(home); });
    SLUICE_BENCH_CHECK(kernels::cuda::LaunchTransfer(Params(0, true, 0), stream_));
    SLUICE_BENCH_CHECK(cudaStreamSynchronize(stream_));
    ForEachUnit([&](char* home, int64_t) {
      std::memset(home, 0xEE, static_cast<size_t>(shape_.unit_bytes));
    });
    SLUICE_BENCH_CHECK(kernels::cuda::LaunchTransfer(Params(0, false, 0), stream_));
    SLUICE_BENCH_CHECK(cudaStreamSynchronize(stream_));
    bool same = true;
    ForEachUnit([&](char* home, int64_t) {
      for (int64_t at = 0; at < shape_.unit_bytes; at += 4) {
        uint32_t word;
        std::memcpy(&word, home + at, 4);
        same = same && word == Pattern(reinterpret_cast<uintptr_t>(home) + at);
      }
    });
    return same;
  }

  // Times the same by one cudaMemcpyAsync a unit, and by cudaMemcpyBatchAsync, for a part of the
  // first layer.
  Times TimeCopies(bool batch, int64_t* count) {
    std::vector<void*> from, to;
    ForEachUnit([&](char* home, int64_t i) {
      if (static_cast<int64_t>(from.size()) >= 4096) return;
      from.push_back(home);
      to.push_back(hbm_ +
                   (i / shape_.units * shape_.slots + lists_[0].slots[i]) * shape_.unit_bytes);
    });
    *count = static_cast<int64_t>(from.size());
    std::vector<size_t> sizes(from.size(), static_cast<size_t>(shape_.unit_bytes));
    return TimeOnStream(stream_, 3, [&] {
      if (batch) {
        cudaMemcpyAttributes attributes{};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        size_t first = 0;
        SLUICE_BENCH_CHECK(cudaMemcpyBatchAsync(
            to.data(), const_cast<const void**>(reinterpret_cast<void**>(from.data())),
            sizes.data(), from.size(), &attributes, &first, 1, stream_));
      } else {
        for (size_t i = 0; i < from.size(); ++i) {
          SLUICE_BENCH_CHECK(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyDefault, stream_));
        }
      }
    });
  }

 private:
  struct Lists {
    std::vector<int32_t> home_units, slots;
    std::vector<int64_t> offsets;
    int32_t* device_home_units;
    int32_t* device_slots;
    int64_t* device_offsets;
  };
  void Fill(char* home) {
    for (int64_t at = 0; at < shape_.unit_bytes; at += 4) {
      const uint32_t word = Pattern(reinterpret_cast<uintptr_t>(home) + at);
      std::memcpy(home + at, &word, 4);
    }
  }
  template <typename F>
  void ForEachUnit(F use) {
    for (int64_t i = 0; i < shape_.lists * shape_.units; ++i) {
      if (i % shape_.units >= host_counts_[static_cast<size_t>(i / shape_.units)]) continue;
      char* const home = pool_.data() + lists_[0].offsets[i / shape_.units] +
                         lists_[0].home_units[i] * shape_.unit_bytes;
      for (int part = 0; part < shape_.parts(); ++part) {
        use(home + part * shape_.block_tokens * shape_.unit_bytes, i);
      }
    }
  }

  const Shape shape_;
  const PinnedPool& pool_;
  const cudaStream_t stream_;
  std::vector<Lists> lists_;
  char* hbm_ = nullptr;
  std::vector<int32_t> host_counts_;
  int32_t* counts_ = nullptr;
};

// Each block reads 64 KiB. There are many short blocks, so that processors which a transfer holds
// just take fewer of them.
constexpr int kReadLoads = 16;
__global__ void __launch_bounds__(256) ReadKernel(const uint4* data, uint32_t* sink) {
  const uint4* mine = data + int64_t{blockIdx.x} * kReadLoads * 256 + threadIdx.x;
  uint4 value[kReadLoads];
#pragma unroll
  for (int i = 0; i < kReadLoads; ++i) value[i] = __ldcs(mine + i * 256);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kReadLoads; ++i) sum += value[i].x ^ value[i].y ^ value[i].z ^ value[i].w;
  if (sum == 0x12345678u) *sink = sum;
}

// A kernel that reads HBM as fast as it can, alone and with a transfer beside it.
class Reader {
 public:
  static constexpr int64_t kBytes = int64_t{1} << 30;
  Reader() : data_(NewDevice<uint4>(kBytes / 16)), sink_(NewDevice<uint32_t>(1)) {
    SLUICE_BENCH_CHECK(cudaMemset(data_, 1, kBytes));
    SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void Enqueue() {
    ReadKernel<<<kBytes / (kReadLoads * 256 * 16), 256, 0, stream_>>>(data_, sink_);
    SLUICE_BENCH_CHECK(cudaGetLastError());
  }
  // Reads until `other`, enqueued on its own stream, is done. Sets *alone and *beside to the
  // seconds of one read alone and beside it, and *other_seconds to those of one `other` beside
  // the reads.
  void Against(cudaStream_t other_stream, const std::function<void()>& other, double* alone,
               double* beside, double* other_seconds) {
    *alone = TimeOnStream(stream_, 20, [&] { Enqueue(); }).median;
    // The others start first, so that they hold their processors; there are enough of them for
    // all the reads.
    cudaEvent_t start, stop;
    SLUICE_BENCH_CHECK(cudaEventCreate(&start));
    SLUICE_BENCH_CHECK(cudaEventCreate(&stop));
    SLUICE_BENCH_CHECK(cudaEventRecord(start, other_stream));
    constexpr int kOthers = 10;
    for (int i = 0; i < kOthers; ++i) other();
    SLUICE_BENCH_CHECK(cudaEventRecord(stop, other_stream));
    std::vector<double> reads;
    while (cudaEventQuery(stop) == cudaErrorNotReady) {
      reads.push_back(TimeOnStream(stream_, 1, [&] { Enqueue(); }).median);
    }
    float ms = 0;
    SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, start, stop));
    *other_seconds = ms * 1e-3 / kOthers;
    if (reads.size() > 2) reads.pop_back();
    *beside = Summary(reads).median;
  }

 private:
  uint4* data_;
  uint32_t* sink_;
  cudaStream_t stream_ = nullptr;
};

void PrintCopyEngine(const PinnedPool& pool, cudaStream_t stream) {
  const size_t bytes = size_t{1} << 30;
  char* hbm = NewDevice<char>(bytes);
  const Times in = TimeOnStream(stream, 5, [&] {
    SLUICE_BENCH_CHECK(cudaMemcpyAsync(hbm, pool.data(), bytes, cudaMemcpyDefault, stream));
  });
  const Times out = TimeOnStream(stream, 5, [&] {
    SLUICE_BENCH_CHECK(cudaMemcpyAsync(pool.data(), hbm, bytes, cudaMemcpyDefault, stream));
  });
  std::printf("copy engine, 1 GiB: %.1f GB/s to HBM, %.1f to DRAM\n", bytes / in.median * 1e-9,
              bytes / out.median * 1e-9);
  cudaFree(hbm);
}

void PrintShape(const Shape& shape, const PinnedPool& pool, cudaStream_t stream, Reader& reader,
                bool peers, bool beside) {
  Case c(shape, pool, stream);
  std::printf("%-34s %s", shape.name.c_str(), c.Verify() ? "" : "WRONG BYTES ");
  for (const bool gather : {true, false}) {
    std::printf(" | %s", gather ? "gather" : "scatter");
    for (const int blocks : {0, 8, 16, 132}) {
      const Times t = c.Time(gather, blocks);
      std::printf(" %.1f (%.1f-%.1f)", c.bytes() / t.median * 1e-9, c.bytes() / t.high * 1e-9,
                  c.bytes() / t.low * 1e-9);
    }
  }
  std::printf("\n");
  if (peers) {
    int64_t count = 0;
    const Times one = c.TimeCopies(false, &count);
    const double bytes = static_cast<double>(count * shape.unit_bytes);
    const Times batch = c.TimeCopies(true, &count);
    std::printf("%-34s  cudaMemcpyAsync a unit %.2f, cudaMemcpyBatchAsync %.2f GB/s\n", "",
                bytes / one.median * 1e-9, bytes / batch.median * 1e-9);
  }
  if (!beside) return;
  for (const bool gather : {true, false}) {
    for (const int blocks : {8, 16}) {
      double alone = 0, with = 0, transfer = 0;
      reader.Against(
          stream, [&] { c.MoveLayers(gather, blocks); }, &alone, &with, &transfer);
      std::printf(
          "%-34s  %s, %d blocks, beside a reader: %.1f GB/s; the reader %.0f -> %.0f GB/s\n", "",
          gather ? "gather" : "scatter", blocks, c.bytes() * kLayers / transfer * 1e-9,
          Reader::kBytes / alone * 1e-9, Reader::kBytes / with * 1e-9);
    }
  }
}

// Gathers by few blocks, alone and beside a kernel that reads HBM.
void PrintWorkers(const Shape& shape, const PinnedPool& pool, cudaStream_t stream, Reader& reader) {
  Case c(shape, pool, stream);
  std::printf("%-26s %s\n", shape.name.c_str(), c.Verify() ? "" : "WRONG BYTES ");
  for (const int blocks : {1, 2, 3, 4, 6, 8, 12, 16}) {
    const Times t = c.Time(true, blocks);
    double alone = 0, with = 0, transfer = 0;
    reader.Against(
        stream, [&] { c.MoveLayers(true, blocks); }, &alone, &with, &transfer);
    std::printf(
        "  %2d blocks: %6.1f us, %.1f GB/s; beside a reader %.1f GB/s, which keeps %.1f %%\n",
        blocks, t.median * 1e6, c.bytes() / t.median * 1e-9, c.bytes() * kLayers / transfer * 1e-9,
        100 * alone / with);
  }
}

// Measures the cost of the number of layers that take turns, that is of homes beyond the reach of
// the GPU's address translation.
void PrintReach(int64_t misses, const PinnedPool& pool, cudaStream_t stream) {
  constexpr int kSequences = 76;
  const Shape shape{"", 656, kSequences, misses, kTokens, 6600};
  const int64_t home_bytes = kTokens * shape.unit_bytes;
  const auto most = static_cast<int>(static_cast<int64_t>(pool.bytes()) / kSequences / home_bytes);
  for (const int layers : {4, 8, 16, 32, 48, 61}) {
    if (layers > most) break;
    Case c(shape, pool, stream, layers);
    std::printf("%d x %d, homes of %2d layers, %5.1f GiB:", kSequences, static_cast<int>(misses),
                layers, static_cast<double>(kSequences * layers * home_bytes) / (1 << 30));
    for (const int blocks : {4, 8, 16}) {
      const Times t = c.Time(true, blocks);
      std::printf(" %2d blocks %.1f", blocks, c.bytes() / t.median * 1e-9);
    }
    for (const int64_t step : {int64_t{2} << 20, int64_t{64} << 10}) {
      const Case::Visited v = c.TimeVisited(step, 4);
      std::printf("; 4 behind a visit each %4d KiB %.1f GB/s (the visit %.0f us)",
                  static_cast<int>(step >> 10), c.bytes() / v.gathers * 1e-9, v.visits * 1e6);
    }
    std::printf("\n");
  }
}

// Gathers rows of one size: ten sequences of 65,536 tokens and 8 KV heads, a list each, which have
// `rows` rows to fetch in every layer; or `pairs` of a row of K and a row of V.
void PrintRows(int64_t row_bytes, int64_t rows, bool pairs, const PinnedPool& pool,
               cudaStream_t stream) {
  constexpr int kLists = 80;
  constexpr int64_t kHomeBytes = int64_t{65536} * 512;
  Shape shape{"", row_bytes, kLists, rows, kHomeBytes / row_bytes, 2 * rows};
  if (pairs) {
    shape.block_tokens = 32;
    shape.slots = (2 * rows + 63) / 64 * 64;
  }
  Case c(shape, pool, stream);
  std::printf("%s%5d B, %d x %4d, %6.2f MB%s:", pairs ? "pairs, " : "", static_cast<int>(row_bytes),
              kLists, static_cast<int>(rows), c.bytes() * 1e-6, c.Verify() ? "" : ", WRONG BYTES");
  for (const int blocks : {2, 4, 8, 16, 32, 0}) {
    const Times t = c.Time(true, blocks);
    std::printf(" %3d blocks %.1f GB/s (%.1f-%.1f)", blocks, c.bytes() / t.median * 1e-9,
                c.bytes() / t.high * 1e-9, c.bytes() / t.low * 1e-9);
  }
  std::printf("\n");
}

// Copies as CudaStream::CopyBatch does.
void CopyByBatches(const CopyPiece* pieces, int64_t count, cudaStream_t stream) {
  constexpr int64_t kBatch = 4096;
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> sizes;
  for (int64_t begin = 0; begin < count; begin += kBatch) {
    targets.clear(), sources.clear(), sizes.clear();
    for (int64_t i = begin; i < std::min(begin + kBatch, count); ++i) {
      targets.push_back(pieces[i].target);
      sources.push_back(pieces[i].source);
      sizes.push_back(pieces[i].bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    SLUICE_BENCH_CHECK(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(),
                                            sizes.size(), &attributes, &first, 1, stream));
  }
}

// Measures a 32K-token sequence of an 8B model: 36 layers x 1024 pages of 128 KiB.
void PrintPages(const PinnedPool& pool, cudaStream_t stream, Reader& reader) {
  constexpr int64_t kPage = 128 << 10, kPages = 36 * 1024, kArena = 40 * 1024;
  char* arena = NewDevice<char>(kPage * kArena);
  std::mt19937_64 random(3);
  const auto slots = Distinct(kPages, kArena, false, random);
  CopyPiece* pieces[2];  // out, in
  for (auto& list : pieces) {
    SLUICE_BENCH_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&list), kPages * sizeof(CopyPiece),
                                     cudaHostAllocDefault));
  }
  // DRAM pages are swapped in pairs, in an order such as a free list has after a while.
  for (int64_t i = 0; i < kPages; ++i) {
    char* home = pool.data() + (i ^ 1) * kPage;
    char* page = arena + slots[static_cast<size_t>(i)] * kPage;
    pieces[0][i] = {home, page, kPage};
    pieces[1][i] = {page, home, kPage};
  }
  for (int64_t at = 0; at < kPages * kPage; at += 4096) {
    const uint32_t word = Pattern(at);
    std::memcpy(pool.data() + at, &word, 4);
  }
  const auto rate = [&](double seconds, int64_t pages) {
    return static_cast<double>(pages * kPage) / seconds * 1e-9;
  };
  for (const int direction : {1, 0}) {
    const CopyPiece* list = pieces[direction];
    const auto by_kernel = [&](int64_t count, int blocks) {
      SLUICE_BENCH_CHECK(kernels::cuda::LaunchCopyBatch(list, count, blocks, stream));
    };
    const auto by_engine = [&](int64_t count) { CopyByBatches(list, count, stream); };
    std::printf("4.8 GB in pages of 128 KiB, %s, GB/s:", direction == 1 ? "restore" : "preempt");
    const Times engine = TimeOnStream(stream, 3, [&] { by_engine(kPages); });
    std::printf(" cudaMemcpyBatchAsync %.1f (%.1f-%.1f)", rate(engine.median, kPages),
                rate(engine.high, kPages), rate(engine.low, kPages));
    for (const int blocks : {8, 16}) {
      const Times t = TimeOnStream(stream, 3, [&] { by_kernel(kPages, blocks); });
      std::printf(", kernel of %d blocks %.1f (%.1f-%.1f)", blocks, rate(t.median, kPages),
                  rate(t.high, kPages), rate(t.low, kPages));
    }
    const Times single = TimeOnStream(stream, 1, [&] {
      for (int64_t i = 0; i < kPages; ++i) {
        SLUICE_BENCH_CHECK(
            cudaMemcpyAsync(list[i].target, list[i].source, kPage, cudaMemcpyDefault, stream));
      }
    });
    std::printf(", cudaMemcpyAsync a page %.1f\n", rate(single.median, kPages));
    for (const int blocks : {0, 8, 16}) {
      double alone = 0, with = 0, seconds = 0;
      reader.Against(
          stream, [&] { blocks == 0 ? by_engine(kPages / 8) : by_kernel(kPages / 8, blocks); },
          &alone, &with, &seconds);
      std::printf("  %s beside a reader: %.1f GB/s; the reader %.0f -> %.0f GB/s\n",
                  blocks == 0 ? "cudaMemcpyBatchAsync"
                              : ("a kernel of " + std::to_string(blocks) + " blocks").c_str(),
                  rate(seconds, kPages / 8), Reader::kBytes / alone * 1e-9,
                  Reader::kBytes / with * 1e-9);
    }
    // The data that comes back must come from HBM.
    if (direction == 1) std::memset(pool.data(), 0, static_cast<size_t>(kPages * kPage));
  }
  bool same = true;
  for (int64_t at = 0; at < kPages * kPage; at += 4096) {
    uint32_t word;
    std::memcpy(&word, pool.data() + at, 4);
    same = same && word == Pattern(at);
  }
  std::printf("  pages came back %s\n", same ? "the same" : "WRONG");
  for (auto* list : pieces) cudaFreeHost(list);
  cudaFree(arena);
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // partial output survives if the program is stopped
  const size_t gib = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 64;
  cudaDeviceProp properties;
  SLUICE_BENCH_CHECK(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const PinnedPool pool(gib << 30);
  std::printf("%s; %zu GiB pinned in %.2f s\n", properties.name, gib, pool.seconds());
  PrintCopyEngine(pool, stream);
  if (argc > 2 && std::strcmp(argv[2], "reach") == 0) {
    for (const int64_t misses : {80, 200, 600}) PrintReach(misses, pool, stream);
    return 0;
  }
  if (argc > 2 && std::strcmp(argv[2], "rows") == 0) {
    const std::vector<int64_t> counts = {16, 64, 256, 655};
    for (const int64_t row_bytes : {256, 512, 656, 1024, 2048, 4096}) {
      for (const int64_t rows : counts) PrintRows(row_bytes, rows, false, pool, stream);
    }
    for (const int64_t rows : counts) PrintRows(256, rows, true, pool, stream);
    return 0;
  }
  Reader reader;
  if (argc > 2 && std::strcmp(argv[2], "workers") == 0) {
    for (const int sequences : {20, 76}) {
      for (const int64_t misses : {64, 256, 605}) {
        PrintWorkers({std::to_string(sequences) + " x " + std::to_string(misses), 656, sequences,
                      misses, kTokens, 6600},
                     pool, stream, reader);
      }
      PrintWorkers(
          {std::to_string(sequences) + " x 17 to 605", 656, sequences, 605, kTokens, 6600, 17},
          pool, stream, reader);
    }
    return 0;
  }
  std::printf("GB/s by default and with at most 8, 16 and 132 blocks (lowest-highest):\n");
  for (const int sequences : {32, 128}) {
    for (const int64_t misses : {64, 256, 605}) {
      PrintShape({"656 B, " + std::to_string(sequences) + " x " + std::to_string(misses), 656,
                  sequences, misses, kTokens, 2048},
                 pool, stream, reader, misses == 256, misses == 605);
    }
  }
  for (const int64_t rows : {64, 256, 605, 2048}) {
    Case one({"one", 656, 1, rows, kTokens, 2048}, pool, stream);
    std::printf("one list of %d rows of 656 B: gather %.1f us, scatter %.1f us\n",
                static_cast<int>(rows), one.Time(true, 0).median * 1e6,
                one.Time(false, 0).median * 1e6);
  }
  // 32 sequences x 8 KV heads, blocks of 32 tokens of 128 dimensions, K and V.
  PrintShape({"16 KiB, 256 x 16", 16 << 10, 256, 16, kTokens / 32, 64}, pool, stream, reader, true,
             true);
  PrintShape({"2 KiB, 128 x 64", 2 << 10, 128, 64, kTokens, 256}, pool, stream, reader, false,
             false);
  PrintPages(pool, stream, reader);
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
