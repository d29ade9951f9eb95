// Times latent attention over lists of packed entries on a GPU, at DeepSeek-V3.2's shape (128
// heads, rank 512, rope 64), beside its floors. It also checks it against float64, and checks
// that a row's bits are the same alone, with one group of blocks, and in the batch.
//
//   sluice-mla-bench [--gib N] [--quick | --only ROWS [--merged]]
//
// --gib is the size of the arena of entries (default 8): sequences of 32K entries in pages of 64,
// in any order; launches rotate through other sequences. --quick runs fewer cases. --only runs
// ROWS lists of 2,048 alone, unchecked, for a profiler; with --merged the lists have 17 to 216
// entries and are merged with another result. A time is that of one LaunchSparseMla in a graph of
// them, including the combining kernel, with least and most in brackets.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using kernels::DType;
using kernels::SparseMlaParams;

constexpr int kHeads = 128, kRank = 512, kWidth = 576, kEntryBytes = 656;
constexpr int kBlockTokens = 64, kContext = 32768;
constexpr int64_t kPageBytes = int64_t{kBlockTokens} * kEntryBytes;
constexpr double kPeak = 990e12;       // operations a second
constexpr double kReadBytes = 4.2e12;  // bytes of HBM a second

__device__ uint64_t Mix(uint64_t z) {
  z = (z + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ float Uniform(uint64_t i) { return static_cast<float>(Mix(i) >> 40) * 0x1p-23f - 1.0f; }

// Fills with entries of any e4m3 values but NaN, scales about 1 / 200, and RoPE values in [-1,
// 1).
__global__ void FillEntries(unsigned char* data, int64_t entries) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < entries * 164; i += step) {
    const int64_t entry = i / 164;
    const int word = static_cast<int>(i % 164);
    uint32_t bits = static_cast<uint32_t>(Mix(i));
    if (word < 128) {
      for (int b = 0; b < 32; b += 8) {
        if ((bits >> b & 0x7f) == 0x7f) bits ^= 1u << b;
      }
    } else if (word < 132) {
      bits = __float_as_uint(0.005f * (1.5f + Uniform(i)));
    } else {
      bits = (__float_as_uint(Uniform(2 * i)) >> 16) |
             (__float_as_uint(Uniform(2 * i + 1)) & 0xffff0000u);
    }
    *reinterpret_cast<uint32_t*>(data + entry * kEntryBytes + word * 4) = bits;
  }
}

__device__ double ValueOf(const unsigned char* entry, int i) {
  if (i >= kRank) {
    const uint16_t bits = *reinterpret_cast<const uint16_t*>(entry + 528 + (i - kRank) * 2);
    return static_cast<double>(__uint_as_float(static_cast<uint32_t>(bits) << 16));
  }
  const int v = entry[i], exponent = v >> 3 & 15, mantissa = v & 7;
  const double size =
      exponent == 0 ? mantissa * exp2(-9.0) : (8 + mantissa) * exp2(exponent - 10.0);
  const float scale = *reinterpret_cast<const float*>(entry + 512 + i / 128 * 4);
  return (v & 0x80 ? -size : size) * static_cast<double>(scale);
}

// Computes the result of (row, head) = (blockIdx.x, blockIdx.y) in float64. `scores` has room for
// `capacity` scores of each.
__global__ void ExactKernel(SparseMlaParams p, double* scores, double* out) {
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int64_t item = int64_t{row} * p.heads + head;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  double* const score = scores + item * p.capacity;
  const auto entry_of = [&](int e) {
    const int number = p.entries[row * p.capacity + e];
    const int64_t page =
        p.cache.block_table[p.slots[row] * p.cache.table_stride + number / kBlockTokens];
    return static_cast<const unsigned char*>(p.cache.base) + page * kPageBytes +
           number % kBlockTokens * kEntryBytes;
  };
  const auto* q = static_cast<const uint16_t*>(p.q) + item * kWidth;
  for (int e = thread; e < p.counts[row]; e += threads) {
    const unsigned char* entry = entry_of(e);
    double dot = 0;
    for (int i = 0; i < kWidth; ++i) {
      dot += static_cast<double>(__uint_as_float(static_cast<uint32_t>(q[i]) << 16)) *
             ValueOf(entry, i);
    }
    score[e] = dot * static_cast<double>(p.scale);
  }
  __syncthreads();
  double largest = -1e300, sum = 0;
  for (int e = 0; e < p.counts[row]; ++e) largest = fmax(largest, score[e]);
  for (int e = 0; e < p.counts[row]; ++e) sum += exp(score[e] - largest);
  for (int i = thread; i < kRank; i += threads) {
    double o = 0;
    for (int e = 0; e < p.counts[row]; ++e) o += exp(score[e] - largest) * ValueOf(entry_of(e), i);
    out[item * kRank + i] = o / sum;
  }
}

class Case {
 public:
  // `then` has the number of entries of each row's second list, or is empty. If `merges`, the
  // result is merged with another one, of any values.
  Case(char* arena, int64_t arena_bytes, int rows, const std::vector<int32_t>& counts,
       const std::vector<int32_t>& then, bool merges, int capacity, int copies,
       std::mt19937_64& random)
      : rows_(rows) {
    const int blocks = kContext / kBlockTokens;
    std::vector<int32_t> pages(static_cast<size_t>(arena_bytes / kPageBytes));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    size_t next = 0;
    for (int copy = 0; copy < copies; ++copy) {
      std::vector<int32_t> table;
      for (int i = 0; i < rows * blocks; ++i) table.push_back(pages[next++ % pages.size()]);
      tables_.push_back(DeviceCopy(table));
    }
    std::vector<int32_t> entries, slots(static_cast<size_t>(rows)), all(kContext);
    std::iota(all.begin(), all.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < capacity; ++i) {
        std::swap(all[static_cast<size_t>(i)],
                  all[static_cast<size_t>(i) + random() % static_cast<size_t>(kContext - i)]);
      }
      entries.insert(entries.end(), all.begin(), all.begin() + capacity);
    }
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<uint16_t> q(static_cast<size_t>(rows) * kHeads * kWidth);
    for (uint16_t& v : q) {
      const float x = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      v = static_cast<uint16_t>(bits >> 16);
    }
    params_.q = DeviceCopy(q);
    params_.slots = DeviceCopy(slots);
    params_.cache = {arena,        nullptr, blocks, kPageBytes,
                     kBlockTokens, kRank,   64,     DType::kFloat8E4M3};
    params_.entries = DeviceCopy(entries);
    params_.counts = DeviceCopy(counts);
    if (!then.empty()) {
      params_.then_entries = DeviceCopy(entries);
      params_.then_counts = DeviceCopy(then);
    }
    if (merges || !then.empty()) {
      params_.other_o = DeviceArray<float>(int64_t{rows} * kHeads * kRank);
      params_.other_lse = DeviceArray<float>(int64_t{rows} * kHeads);
      Check(cudaMemset(params_.other_o, 0, static_cast<size_t>(rows) * kHeads * kRank * 4), "o");
      Check(cudaMemset(params_.other_lse, 0, static_cast<size_t>(rows) * kHeads * 4), "lse");
    }
    params_.capacity = capacity;
    params_.out = DeviceArray<float>(int64_t{rows} * kHeads * kRank);
    params_.lse = DeviceArray<float>(int64_t{rows} * kHeads);
    params_.scratch_bytes = kernels::cuda::SparseMlaScratchBytes(rows, kHeads, kRank, capacity);
    params_.scratch = DeviceArray<char>(params_.scratch_bytes);
    params_.rows = rows;
    params_.decode_rows = rows;
    params_.heads = kHeads;
    params_.scale = 1.0f / std::sqrt(192.0f);
    params_.q_type = DType::kBFloat16;
    params_.out_type = DType::kBFloat16;
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;
  ~Case() {
    for (int32_t* table : tables_) cudaFree(table);
    for (const void* p :
         {params_.q, static_cast<const void*>(params_.slots),
          static_cast<const void*>(params_.entries), static_cast<const void*>(params_.counts),
          static_cast<const void*>(params_.then_entries),
          static_cast<const void*>(params_.then_counts), static_cast<const void*>(params_.other_o),
          static_cast<const void*>(params_.other_lse), static_cast<const void*>(params_.out),
          static_cast<const void*>(params_.lse), static_cast<const void*>(params_.scratch)}) {
      cudaFree(const_cast<void*>(p));
    }
  }

  Timing Measure(int launches, int samples) const {
    return Time(launches, samples, [&](int i, cudaStream_t stream) {
      SparseMlaParams p = params_;
      p.cache.block_table = tables_[static_cast<size_t>(i) % tables_.size()];
      Check(kernels::cuda::LaunchSparseMla(p, stream), "LaunchSparseMla");
    });
  }

  // Returns the results of rows [first, first + rows), with float32 outputs.
  std::vector<float> Run(int first, int rows, int64_t scratch_bytes) const {
    const SparseMlaParams p = RowsOf(first, rows, scratch_bytes);
    std::vector<float> out(static_cast<size_t>(rows) * kHeads * kRank);
    Check(cudaMemset(p.out, 0xFF, out.size() * sizeof(float)), "poison");
    Check(kernels::cuda::LaunchSparseMla(p, nullptr), "LaunchSparseMla");
    Check(cudaDeviceSynchronize(), "sparse MLA");
    Check(cudaMemcpy(out.data(), p.out, out.size() * sizeof(float), cudaMemcpyDeviceToHost),
          "copy");
    return out;
  }

  // Returns the relative L2 error of a row of `all`.
  double Error(const std::vector<float>& all, int row) const {
    const SparseMlaParams p = RowsOf(row, 1, params_.scratch_bytes);
    double* scores = DeviceArray<double>(kHeads * p.capacity);
    double* exact = DeviceArray<double>(kHeads * kRank);
    ExactKernel<<<dim3(1, kHeads), 256>>>(p, scores, exact);
    std::vector<double> want(kHeads * kRank);
    Check(cudaMemcpy(want.data(), exact, want.size() * sizeof(double), cudaMemcpyDeviceToHost),
          "exact");
    cudaFree(scores);
    cudaFree(exact);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double d =
          static_cast<double>(all[static_cast<size_t>(row) * want.size() + i]) - want[i];
      error += d * d;
      norm += want[i] * want[i];
    }
    return std::sqrt(error / norm);
  }

  // Returns true if a row has the same bits alone, and on one group of blocks, as in `all`.
  bool HasSameBits(const std::vector<float>& all, int row) const {
    const int64_t one_group = kernels::cuda::SparseMlaScratchBytes(1, kHeads, kRank, 513) / 4 *
                              ((params_.capacity + 511) / 512);
    for (const int64_t bytes :
         {params_.scratch_bytes, std::min(params_.scratch_bytes, one_group)}) {
      const std::vector<float> alone = Run(row, 1, bytes);
      if (std::memcmp(alone.data(), all.data() + static_cast<size_t>(row) * kHeads * kRank,
                      alone.size() * sizeof(float)) != 0) {
        return false;
      }
    }
    return true;
  }

  int64_t scratch_bytes() const { return params_.scratch_bytes; }

 private:
  SparseMlaParams RowsOf(int first, int rows, int64_t scratch_bytes) const {
    SparseMlaParams p = params_;
    p.cache.block_table = tables_[0];
    p.q = static_cast<const uint16_t*>(p.q) + int64_t{first} * kHeads * kWidth;
    p.slots += first;
    p.entries += first * p.capacity;
    p.counts += first;
    p.out_type = DType::kFloat32;
    p.rows = p.decode_rows = rows;
    p.scratch_bytes = scratch_bytes;
    return p;
  }

  const int rows_;
  SparseMlaParams params_{};
  std::vector<int32_t*> tables_;
};

// Runs one case. `capacity` is that of the lists; 0 means the longest one's length. Second lists
// and merges are timed only.
void RunCase(char* arena, int64_t arena_bytes, const char* name, const std::vector<int32_t>& counts,
             int capacity, bool check, std::mt19937_64& random,
             const std::vector<int32_t>& then = {}, bool merges = false) {
  capacity = std::max({1, capacity, *std::max_element(counts.begin(), counts.end())});
  const int rows = static_cast<int>(counts.size());
  const double entries = std::accumulate(counts.begin(), counts.end(), 0.0) +
                         std::accumulate(then.begin(), then.end(), 0.0);
  const int64_t sequences = arena_bytes / kPageBytes * kBlockTokens / kContext;
  // There are as many launches as have sequences of their own, and at least a few.
  const int launches = static_cast<int>(std::clamp<int64_t>(sequences / rows, 2, 16));
  const Case c(arena, arena_bytes, rows, counts, then, merges, capacity, launches, random);
  std::string verdict;
  if (check) {
    const std::vector<float> out = c.Run(0, rows, c.scratch_bytes());
    char text[96];
    std::snprintf(text, sizeof(text), "error %.1e %.1e bits %s", c.Error(out, 0),
                  c.Error(out, rows - 1),
                  c.HasSameBits(out, rows - 1) && c.HasSameBits(out, 0) ? "same" : "DIFFER");
    verdict = text;
  }
  const Timing t = c.Measure(launches, 9);
  const double operations = 2.0 * entries * kHeads * (kWidth + kRank);
  const double floor_us = std::max(operations / kPeak, entries * kEntryBytes / kReadBytes) * 1e6;
  std::printf(
      "%-17s %8.1f us [%.1f, %.1f], floor %5.1f: %4.1f %%; %6.1f TFLOP/s, %5.0f GB/s of entries  "
      "%s\n",
      name, t.median_us, t.least_us, t.most_us, floor_us, 100 * floor_us / t.median_us,
      operations / t.median_us * 1e-6, entries * kEntryBytes / t.median_us * 1e-3, verdict.c_str());
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  int64_t gib = 8;
  int only = 0;
  bool quick = false, merged = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--merged") == 0) merged = true;
    if (std::strcmp(argv[i], "--gib") == 0 && i + 1 < argc) gib = std::atoll(argv[++i]);
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %d SMs; arena %lld GiB\n", device.name, device.multiProcessorCount,
              static_cast<long long>(gib));
  char* arena = DeviceArray<char>(gib << 30);
  FillEntries<<<4096, 256>>>(reinterpret_cast<unsigned char*>(arena), (gib << 30) / kEntryBytes);
  Check(cudaDeviceSynchronize(), "fill");
  std::mt19937_64 random(5);
  if (only > 0) {
    std::vector<int32_t> counts(static_cast<size_t>(only), 2048);
    if (merged) {
      for (int32_t& count : counts) count = 17 + static_cast<int32_t>(random() % 200);
    }
    RunCase(arena, gib << 30, "only", counts, 2048, false, random, {}, merged);
    return 0;
  }
  struct Shape {
    int batch, entries, capacity;
  };
  for (const Shape& shape : std::vector<Shape>{{1, 2048, 2048},
                                               {8, 2048, 2048},
                                               {25, 2048, 2048},
                                               {32, 2048, 2048},
                                               {64, 2048, 2048},
                                               {128, 2048, 2048},
                                               {256, 2048, 2048},
                                               {1, 300, 2048},
                                               {64, 300, 2048},
                                               {64, 300, 300},
                                               {64, 1000, 2048},
                                               {128, 300, 2048}}) {
    if (quick && (shape.batch == 256 || (shape.entries != 2048 && shape.batch != 64))) continue;
    char name[48];
    std::snprintf(name, sizeof(name), "%d x %d of %d", shape.batch, shape.entries, shape.capacity);
    RunCase(arena, gib << 30, name,
            std::vector<int32_t>(static_cast<size_t>(shape.batch), shape.entries), shape.capacity,
            !quick || shape.batch <= 32, random);
  }
  std::vector<int32_t> uneven;
  for (int i = 0; i < 76; ++i) uneven.push_back(17 + static_cast<int32_t>(random() % 589));
  RunCase(arena, gib << 30, "76 x 17-605", uneven, 0, true, random);
  RunCase(arena, gib << 30, "76 x 17-605, merged", uneven, 2048, false, random, {}, true);
  std::vector<int32_t> few = uneven;
  for (int32_t& count : few) count = 17 + count % 200;
  RunCase(arena, gib << 30, "76 x 17-216, merged", few, 2048, false, random, {}, true);
  std::vector<int32_t> resident;
  for (const int32_t arriving : uneven) resident.push_back(2048 - arriving);
  RunCase(arena, gib << 30, "76 x 2,048 in two", resident, 2048, false, random, uneven);
  RunCase(arena, gib << 30, "76 x 2048 of 2048", std::vector<int32_t>(76, 2048), 2048, false,
          random);
  if (!quick) {
    std::vector<int32_t> mixed(48, 64);
    mixed[7] = 20000;
    mixed[20] = 0;
    mixed[47] = 1;
    RunCase(arena, gib << 30, "20000+47x64", mixed, 0, true, random);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
