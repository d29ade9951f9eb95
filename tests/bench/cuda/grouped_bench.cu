// Times grouped products: fp8 weights, experts and heads, in the shapes of DeepSeek-V3.2, as GB/s
// of weights in a captured graph over weights that are all different. It also checks that they
// are right and that rows keep their bits among any number of others.
//
//   sluice-grouped-bench [check,tiny,times,equal | --only NAME ROWS]
//
// equal: scales are all 2^-8, as those of dummy weights are equal. --only: runs only the shape
// NAME of `times` (such as o) with ROWS rows, for a profiler.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/linear/grouped_product.h"
#include "kernels/fp8_pairs.h"
#include "tests/bench/cuda/bench_support.cuh"

namespace sluice::bench {
namespace {

using kernels::DType;
using kernels::kFp8Pairs;
using kernels::WeightLayout;
using kernels::cuda::GroupedProduct;
using kernels::cuda::LaunchGroupedProduct;

// Fills with scales around 2^-8, some of them far from it and some 0; or all equal.
__global__ void FillScales(float* out, size_t size, uint64_t seed, bool equal) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t hash = HashOf(seed + i);
    const float scale = (0.5f + static_cast<float>(hash >> 8) * 0x1p-24f) * 0x1p-8f;
    out[i] = equal ? 0x1p-8f : hash % 31 == 0 ? 0.0f : hash % 17 == 0 ? scale * 0x1p-6f : scale;
  }
}

__device__ double E4M3Value(uint8_t v) {
  const int exponent = v >> 3 & 0xF, mantissa = v & 7;
  const double magnitude = exponent == 0 ? ldexp(static_cast<double>(mantissa), -9)
                                         : ldexp(8.0 + mantissa, exponent - 10);
  return v & 0x80 ? -magnitude : magnitude;
}

// Returns where column i of a row of kFp8Pairs lies.
__device__ int PairedColumn(int i) {
  const int pair = i / 2 % 8;
  return i / 16 * 16 + (pair < 4 ? 2 * pair : 2 * pair - 7) * 2 + i % 2;
}

// Computes the sums in float64. Grid: (features, rows, groups).
__global__ void Reference(GroupedProduct p, double* y) {
  const int feature = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t group = blockIdx.z;
  if (feature >= p.n) return;
  const int first = p.pairs != nullptr ? p.begins[group] : 0;
  const int end = p.pairs != nullptr ? p.begins[group + 1] : p.rows;
  const int64_t w_row = group * p.n + feature;
  const int64_t columns = (p.w.k + 127) / 128;
  for (int i = first + blockIdx.y; i < end; i += gridDim.y) {
    const int64_t row = p.pairs != nullptr ? p.pairs[i] : i;
    const uint16_t* x = p.x + (p.pairs != nullptr ? row / p.pairs_per_row : row) * p.x_stride +
                        group * p.x_group_stride;
    double sum = p.bias != nullptr ? p.bias[feature] : 0.0;
    for (int j = 0; j < p.w.k; ++j) {
      const double w =
          p.w.layout == WeightLayout::kRowMajor
              ? double{__uint_as_float(uint32_t{p.w.data[w_row * p.w.k + j]} << 16)}
              : E4M3Value(reinterpret_cast<const uint8_t*>(
                    p.w.data)[w_row * p.w.k + (p.w.layout == kFp8Pairs ? PairedColumn(j) : j)]) *
                    p.w.scales[w_row / 32 * columns + j / 128];
      sum += w * __uint_as_float(uint32_t{x[j]} << 16);
    }
    y[row * p.y_stride + group * p.y_group_stride + feature] = sum;
  }
}

template <typename T>
std::vector<T> ToHost(const T* data, size_t count) {
  std::vector<T> host(count);
  Check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

DeviceArray<int32_t> ToDevice(const std::vector<int32_t>& host) {
  DeviceArray<int32_t> device(host.size() + 1);
  Check(cudaMemcpy(device.data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice), "copy");
  return device;
}

struct Shape {
  const char* name;
  WeightLayout layout;
  int groups;
  int n;  // features of a group
  int k;

  bool is_fp8() const { return layout != WeightLayout::kRowMajor; }
  size_t Elements() const { return size_t{1} * groups * n * k; }
  size_t Bytes() const { return Elements() * (is_fp8() ? 1 : 2); }
};

// Matrices of one shape.
struct Matrices {
  Shape shape;
  int copies;
  DeviceArray<uint8_t> bytes;
  DeviceArray<float> scales;

  Matrices(const Shape& s, int count, bool equal_scales = false)
      : shape(s), copies(count), bytes(s.Bytes() * count), scales(ScalesOf(s) * count) {
    const kernels::WeightFormula formula = {0x5EED, 0.1f, 0.0f};
    const auto size = static_cast<int64_t>(s.Elements() * count);
    Check(s.is_fp8() ? kernels::cuda::LaunchFillWeights(formula, size, bytes.data(), nullptr)
                     : kernels::cuda::LaunchFillWeights(
                           formula, size, reinterpret_cast<uint16_t*>(bytes.data()), nullptr),
          "LaunchFillWeights");
    if (s.layout == kFp8Pairs) {
      Check(kernels::cuda::LaunchPairWeights(size, bytes.data(), nullptr), "LaunchPairWeights");
    }
    FillScales<<<256, 256>>>(scales.data(), scales.size(), 77, equal_scales);
  }

  static size_t ScalesOf(const Shape& s) {
    return size_t{1} * ((s.groups * s.n + 31) / 32) * ((s.k + 127) / 128);
  }

  kernels::WeightMatrix Matrix(int copy) const {
    return {reinterpret_cast<const uint16_t*>(bytes.data() + shape.Bytes() * copy),
            shape.groups * shape.n, shape.k, shape.layout, scales.data() + ScalesOf(shape) * copy};
  }
};

// Sizes of the operands that suffice for every case.
constexpr size_t kMostX = size_t{1} << 25;
constexpr size_t kMostY = size_t{1} << 26;
struct Vectors {
  DeviceArray<uint16_t> x = RandomBf16(kMostX, 1, 1.0f);
  DeviceArray<float> y{kMostY};
};

// Returns a product with dense rows. If it has several groups, either each group has all rows
// (heads) or the rows' pairs choose the groups (experts).
GroupedProduct Dense(const Matrices& m, int copy, const Vectors& v, int rows) {
  const Shape& s = m.shape;
  return {.x = v.x.data(),
          .x_stride = int64_t{s.groups} * s.k,
          .x_group_stride = s.k,
          .w = m.Matrix(copy),
          .groups = s.groups,
          .n = s.n,
          .bias = nullptr,
          .y = v.y.data(),
          .y_stride = int64_t{s.groups} * s.n,
          .y_group_stride = s.n,
          .y_type = DType::kFloat32,
          .accumulate = false,
          .rows = rows,
          .pairs = nullptr,
          .begins = nullptr,
          .pairs_per_row = 1};
}

struct Routing {
  DeviceArray<int32_t> pairs, begins;
  int count;
  int per_row;
};

// Routes each row to `k` of the experts. If `skewed`, all rows choose the same, so that other
// experts have none.
Routing Route(int rows, int experts, int k, bool skewed) {
  std::vector<std::vector<int32_t>> of(experts);
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < k; ++j) {
      const int expert = skewed ? j * 2 % experts : (r * 7 + j * (experts / k)) % experts;
      of[expert].push_back(r * k + j);
    }
  }
  std::vector<int32_t> pairs, begins = {0};
  for (const auto& list : of) {
    pairs.insert(pairs.end(), list.begin(), list.end());
    begins.push_back(static_cast<int32_t>(pairs.size()));
  }
  return {ToDevice(pairs), ToDevice(begins), rows * k, k};
}

GroupedProduct Experts(const Matrices& m, int copy, const Vectors& v, const Routing& routing,
                       bool is_first) {
  GroupedProduct p = Dense(m, copy, v, routing.count);
  p.x_stride = m.shape.k;
  p.x_group_stride = 0;
  p.y_stride = m.shape.n;
  p.y_group_stride = 0;
  p.pairs = routing.pairs.data();
  p.begins = routing.begins.data();
  p.pairs_per_row = is_first ? routing.per_row : 1;
  return p;
}

size_t Outputs(const GroupedProduct& p) {
  return size_t{1} * p.rows * p.n * (p.pairs != nullptr ? 1 : p.groups);
}

std::vector<float> Run(const GroupedProduct& p) {
  Check(cudaMemset(p.y, 0xFF, Outputs(p) * sizeof(float)), "cudaMemset");
  Check(LaunchGroupedProduct(p, nullptr), "LaunchGroupedProduct");
  Check(cudaDeviceSynchronize(), "the product");
  return ToHost(static_cast<const float*>(p.y), Outputs(p));
}

// Prints the relative error, and returns the product's values.
std::vector<float> CheckOne(const char* name, const GroupedProduct& p) {
  DeviceArray<double> want_y(Outputs(p));
  Reference<<<dim3((p.n + 127) / 128, std::min(p.rows, 64), p.groups), 128>>>(p, want_y.data());
  const std::vector<double> want = ToHost(want_y.data(), want_y.size());
  const std::vector<float> got = Run(p);
  double error2 = 0, norm2 = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error2 += (got[i] - want[i]) * (got[i] - want[i]);
    norm2 += want[i] * want[i];
  }
  const double error = std::sqrt(error2 / norm2);
  std::printf("%-26s %d x %d x %d, rows %d: relative error %.1e%s\n", name, p.groups, p.n, p.w.k,
              p.rows, error, error < 3e-6 ? "" : "  WRONG");
  return got;
}

void CheckBits(const char* name, int rows, const std::vector<float>& some,
               const std::vector<float>& all) {
  if (std::memcmp(some.data(), all.data(), some.size() * sizeof(float)) != 0) {
    std::printf("%s: bits DIFFER with %d rows\n", name, rows);
  }
}

void CheckProducts(const Vectors& v) {
  constexpr auto kFp8 = kFp8Pairs;
  constexpr auto kBf16 = WeightLayout::kRowMajor;
  for (const Shape& s :
       {Shape{"fp8", kFp8, 1, 2240, 7168}, Shape{"fp8, k cut", kFp8, 1, 96, 912},
        Shape{"fp8, plain", WeightLayout::kFp8Blocks, 1, 37, 129},
        Shape{"fp8, large", kFp8, 1, 9216, 1536}, Shape{"fp8, long", kFp8, 1, 640, 18432},
        Shape{"fp8, wide", kFp8, 1, 32768, 384}, Shape{"heads, n 512", kBf16, 16, 512, 128},
        Shape{"heads, n 128", kBf16, 16, 128, 512}, Shape{"heads, plain", kBf16, 3, 24, 40}}) {
    const Matrices m(s, 1);
    const std::vector<float> all = CheckOne(s.name, Dense(m, 0, v, 300));
    for (int rows : {1, 7, 8, 9, 26, 32, 33, 64, 65, 76, 128, 129}) {
      CheckBits(s.name, rows, Run(Dense(m, 0, v, rows)), all);
    }
  }
  for (const Shape& s :
       {Shape{"experts, fp8", kFp8, 8, 512, 1024}, Shape{"experts, bf16", kBf16, 8, 96, 192},
        Shape{"experts, plain", WeightLayout::kFp8Blocks, 4, 32, 80},
        Shape{"experts, many", kFp8, 64, 128, 256}}) {
    const Matrices m(s, 1);
    for (bool is_first : {true, false}) {
      const int k = std::min(8, s.groups);
      const Routing many = Route(76, s.groups, k, false),
                    skewed = Route(150, s.groups, k / 2, true);
      const std::vector<float> all = CheckOne(s.name, Experts(m, 0, v, many, is_first));
      CheckOne(s.name, Experts(m, 0, v, skewed, is_first));
      for (int rows : {1, 5, 26, 64}) {
        const Routing some = Route(rows, s.groups, k, false);
        CheckBits(s.name, rows, Run(Experts(m, 0, v, some, is_first)), all);
      }
    }
  }
}

void CheckTiny(const Vectors& v) {
  constexpr auto kFp8 = kFp8Pairs;
  for (const auto& [n, k] : {std::pair{800, 192},
                             {192, 256},
                             {768, 192},
                             {192, 384},
                             {128, 192},
                             {192, 64},
                             {512, 96},
                             {1024, 96}}) {
    const Matrices m({"tiny, fp8", kFp8, 1, n, k}, 1);
    for (int rows : {512, 188, 300, 700}) CheckOne("tiny, fp8", Dense(m, 0, v, rows));
  }
  for (const auto& [n, k] : {std::pair{128, 192}, {192, 64}}) {
    const Matrices m({"tiny experts", kFp8, 8, n, k}, 1);
    for (int rows : {512, 188, 300, 700}) {
      for (bool is_first : {true, false}) {
        const Routing even = Route(rows, 8, 2, false), skewed = Route(rows, 8, 2, true);
        CheckOne("tiny experts", Experts(m, 0, v, even, is_first));
        CheckOne("tiny experts, skewed", Experts(m, 0, v, skewed, is_first));
      }
    }
  }
}

// Runs the shape named `only` with `only_rows` rows; all shapes if `only` is empty, all numbers
// of rows if 0.
void Time(const Vectors& v, bool equal_scales, const std::string& only = "", int only_rows = 0) {
  constexpr auto kFp8 = kFp8Pairs;
  constexpr auto kBf16 = WeightLayout::kRowMajor;
  struct Timed {
    Shape shape;
    int chosen;  // experts of a row; 0 for no experts
  };
  const std::vector<int> numbers = only_rows > 0 ? std::vector<int>{only_rows}
                                                 : std::vector<int>{1, 8, 25, 32, 64, 76, 128, 512};
  std::printf("\nGB/s of weights (us)\n%-34s", "rows");
  for (int rows : numbers) std::printf(" %12d", rows);
  for (const Timed& t :
       {Timed{{"q_a+kv_a+wk", kFp8, 1, 2240, 7168}, 0}, Timed{{"wq_b", kFp8, 1, 8192, 1536}, 0},
        Timed{{"q_b", kFp8, 1, 24576, 1536}, 0}, Timed{{"o", kFp8, 1, 7168, 16384}, 0},
        Timed{{"gate+up, dense", kFp8, 1, 36864, 7168}, 0},
        Timed{{"down, dense", kFp8, 1, 7168, 18432}, 0},
        Timed{{"gate+up, shared", kFp8, 1, 4096, 7168}, 0},
        Timed{{"down, shared", kFp8, 1, 7168, 2048}, 0},
        Timed{{"gate+up, 8 experts", kFp8, 8, 4096, 7168}, 8},
        Timed{{"down, 8 experts", kFp8, 8, 7168, 2048}, 8},
        Timed{{"gate+up, 8 of 64", kFp8, 64, 4096, 7168}, 8},
        Timed{{"heads, q", kBf16, 128, 512, 128}, 0},
        Timed{{"heads, v", kBf16, 128, 128, 512}, 0}}) {
    const Shape& s = t.shape;
    if (!only.empty() && only != s.name) continue;
    const int copies = static_cast<int>(std::clamp<size_t>(800'000'000 / s.Bytes(), 2, 40));
    const Matrices m(s, copies, equal_scales);
    std::printf("\n%-18s %3d x %5d x %5d", s.name, s.groups, s.n, s.k);
    for (int rows : numbers) {
      const Routing routing = Route(rows, std::max(1, s.groups), std::max(1, t.chosen), false);
      const Timing timing = TimeGraph(
          [&](cudaStream_t stream) {
            for (int copy = 0; copy < copies; ++copy) {
              Check(LaunchGroupedProduct(t.chosen > 0 ? Experts(m, copy, v, routing, s.k == 7168)
                                                      : Dense(m, copy, v, rows),
                                         stream),
                    "LaunchGroupedProduct");
            }
          },
          7);
      const double us = timing.median_us / copies;
      std::printf(" %5.0f (%4.1f)", static_cast<double>(s.Bytes()) / us * 1e-3, us);
    }
  }
  std::printf("\n");
}

int Main(const std::string& parts) {
  const Vectors v;
  const auto wanted = [&](const char* part) {
    return parts.empty() || parts.find(part) != std::string::npos;
  };
  if (wanted("check")) CheckProducts(v);
  if (wanted("check") || wanted("tiny")) CheckTiny(v);
  if (wanted("times")) {
    const DeviceArray<uint16_t> data = RandomBf16(size_t{1} << 29, 9, 1.0f);
    std::printf("read ceiling %.0f GB/s\n",
                ReadCeiling(data.data(), data.size() * 2, size_t{256} << 20));
    Time(v, false);
  }
  if (wanted("equal")) Time(v, true);
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  if (argc > 3 && std::strcmp(argv[1], "--only") == 0) {
    sluice::bench::Time({}, false, argv[2], std::atoi(argv[3]));
    return 0;
  }
  return sluice::bench::Main(argc > 1 ? argv[1] : "");
}
