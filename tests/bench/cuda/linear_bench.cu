// Times the products of Qwen3-8B on this GPU, ours and cuBLASLt's, as shares of the speed at
// which a plain kernel reads.
//
//   sluice-linear-bench [check,shapes,steps,prompts[,ours]]
//
// Every figure is the median of 15 replays of one captured graph over weights that are all
// different, so that none is found in the L2 cache.
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/bench_support.cuh"
#include "tests/bench/cuda/cublaslt_peer.h"

namespace sluice::bench {
namespace {

using kernels::DType;
using kernels::LinearParams;
using kernels::WeightLayout;
using kernels::cuda::LaunchKernel;
using kernels::cuda::LaunchLinear;
using kernels::cuda::LetNextKernelStart;
using kernels::cuda::WaitForPriorKernels;

constexpr int kLayers = 36;
constexpr int kMostRows = 8192;

struct Shape {
  const char* name;
  int n;
  int k;
  int copies;  // matrices of this shape
  bool accumulate;

  size_t Bytes() const { return size_t{2} * n * k; }
};

constexpr Shape kShapes[] = {{"qkv", 6144, 4096, kLayers, false},
                             {"o", 4096, 4096, kLayers, true},
                             {"gate+up", 24576, 4096, kLayers, false},
                             {"down", 4096, 12288, kLayers, true},
                             {"head", 151936, 4096, 1, false}};
constexpr int kHead = 4;

enum class Who { kOurs, kPeer };

// The model's weights, and x and y large enough for any of its products.
struct Model {
  std::vector<DeviceArray<uint16_t>> weights;  // weights of kShapes, the copies one after the other
  DeviceArray<uint16_t> x = RandomBf16(size_t{kMostRows} * 12288, 1, 1.0f);
  DeviceArray<float> y{size_t{kMostRows} * 24576};

  Model() {
    for (const Shape& s : kShapes) {
      weights.push_back(RandomBf16(s.Bytes() / 2 * s.copies, 2 + weights.size(), 0.05f));
    }
  }

  LinearParams Product(int shape, int copy, int rows, int decode_rows) const {
    const Shape& s = kShapes[shape];
    return {x.data(),
            {weights[shape].data() + s.Bytes() / 2 * copy, s.n, s.k, WeightLayout::kRowMajor},
            nullptr,
            y.data(),
            rows,
            decode_rows,
            DType::kBFloat16,
            s.accumulate};
  }
};

// The peer's products by (shape, rows), each with the fastest of its algorithms.
class Peers {
 public:
  Peers(const Model& model, bool wanted) : wanted(wanted), model_(model) {}

  const bool wanted;  // if false, only our products are measured

  const CublasLtProduct& Best(int shape, int rows) {
    auto& product = products_[{shape, rows}];
    if (product != nullptr) return *product;
    product = std::make_unique<CublasLtProduct>(model_.Product(shape, 0, rows, rows));
    int best = 0;
    double best_us = 1e30;
    for (int i = 0; i < product->algorithms(); ++i) {
      product->Use(i);
      const double us =
          TimeGraph([&](cudaStream_t s) { All(*product, shape, rows, s); }, 3).least_us;
      if (us < best_us) best_us = us, best = i;
    }
    product->Use(best);
    return *product;
  }

  void All(const CublasLtProduct& product, int shape, int rows, cudaStream_t stream) const {
    const int copies = rows > 128 ? std::min(4, kShapes[shape].copies) : kShapes[shape].copies;
    for (int copy = 0; copy < copies; ++copy) {
      product.Launch(model_.Product(shape, copy, rows, rows), stream);
    }
  }

 private:
  const Model& model_;
  std::map<std::pair<int, int>, std::unique_ptr<CublasLtProduct>> products_;
};

// Stands for the operators between two products of a layer: x = bf16(y), cut to [-1, 1], one
// small kernel.
__global__ void __launch_bounds__(256) Between(const float* y, uint16_t* x, int count) {
  LetNextKernelStart();
  WaitForPriorKernels();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    x[i] = static_cast<uint16_t>(__float_as_uint(fminf(fmaxf(y[i], -1.0f), 1.0f)) >> 16);
  }
}

// Computes sums in float64, to check the float32 ones.
__global__ void ReferenceProduct(LinearParams p, double* y) {
  const int feature = blockIdx.x * blockDim.x + threadIdx.x;
  if (feature >= p.w.n) return;
  const uint16_t* w = p.w.data + int64_t{feature} * p.w.k;
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + int64_t{blockIdx.y} * p.w.k;
  double sum = 0;
  for (int i = 0; i < p.w.k; ++i) {
    sum += double{__uint_as_float(uint32_t{w[i]} << 16)} * __uint_as_float(uint32_t{x[i]} << 16);
  }
  y[int64_t{blockIdx.y} * p.w.n + feature] = sum;
}

template <typename T>
std::vector<T> ToHost(const T* data, size_t count) {
  std::vector<T> host(count);
  Check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

std::vector<float> Run(const Model& model, int shape, int rows, int decode_rows) {
  LinearParams p = model.Product(shape, 0, rows, decode_rows);
  p.accumulate = false;
  const size_t count = size_t{1} * rows * p.w.n;
  Check(cudaMemset(p.y, 0xFF, count * sizeof(float)), "cudaMemset");
  Check(LaunchLinear(p, nullptr), "LaunchLinear");
  return ToHost(p.y, count);
}

// Checks that the products are right, and that rows keep their bits among any number of others.
void CheckProducts(const Model& model) {
  for (int shape = 0; shape < kHead; ++shape) {
    const Shape& s = kShapes[shape];
    LinearParams p = model.Product(shape, 0, 128, 128);
    DeviceArray<double> want_y(size_t{128} * s.n);
    ReferenceProduct<<<dim3((s.n + 127) / 128, 128), 128>>>(p, want_y.data());
    const std::vector<double> want = ToHost(want_y.data(), want_y.size());
    for (bool decode : {true, false}) {
      const auto all = Run(model, shape, decode ? 128 : 2048, decode ? 128 : 0);
      double error2 = 0, norm2 = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        error2 += (all[i] - want[i]) * (all[i] - want[i]);
        norm2 += want[i] * want[i];
      }
      std::string differ;
      const std::vector<int> counts = decode ? std::vector{1, 7, 8, 9, 31, 33, 64, 65, 100, 128}
                                             : std::vector{1, 17, 64, 65, 200, 512, 1000};
      for (int rows : counts) {
        const auto some = Run(model, shape, rows, decode ? rows : 0);
        if (std::memcmp(some.data(), all.data(), some.size() * 4) != 0) {
          differ += " " + std::to_string(rows);
        }
      }
      std::printf("%-8s %-6s relative error %.1e, bits of other row counts: %s\n", s.name,
                  decode ? "decode" : "prompt", std::sqrt(error2 / norm2),
                  differ.empty() ? "equal" : ("DIFFER at" + differ).c_str());
    }
  }
}

void BenchShapes(const Model& model, Peers& peers, double ceiling) {
  std::printf("\nGB/s of weights, ours / cuBLASLt's best of 8 (ours of the ceiling)\n%-8s", "rows");
  for (const Shape& s : kShapes) std::printf(" %22s", s.name);
  for (int rows : {1, 8, 32, 64, 128}) {
    std::printf("\n%-8d", rows);
    for (int shape = 0; shape <= kHead; ++shape) {
      const Shape& s = kShapes[shape];
      const Timing ours = TimeGraph([&](cudaStream_t stream) {
        for (int copy = 0; copy < s.copies; ++copy) {
          Check(LaunchLinear(model.Product(shape, copy, rows, rows), stream), "LaunchLinear");
        }
      });
      Timing theirs = {1e30, 0, 0};
      if (peers.wanted) {
        const CublasLtProduct& peer = peers.Best(shape, rows);
        theirs = TimeGraph([&](cudaStream_t stream) { peers.All(peer, shape, rows, stream); });
      }
      const double kb = static_cast<double>(s.Bytes()) * s.copies * 1e-3;
      std::printf("    %5.0f / %4.0f (%3.0f %%)", kb / ours.median_us, kb / theirs.median_us,
                  kb / ours.median_us / ceiling * 100);
    }
  }
  std::printf("\n");
}

// Enqueues one decode step's products in order. Each reads the output that a small kernel made of
// the one before.
void EnqueueStep(const Model& model, Peers& peers, Who who, bool between, int rows,
                 cudaStream_t stream) {
  const auto product = [&](int shape, int copy) {
    const LinearParams p = model.Product(shape, copy, rows, rows);
    if (who == Who::kOurs) {
      Check(LaunchLinear(p, stream), "LaunchLinear");
    } else {
      peers.Best(shape, rows).Launch(p, stream);
    }
    if (!between) return;
    const int count = rows * p.w.k;
    Check(LaunchKernel(Between, dim3(std::min((count + 1023) / 1024, 264)), dim3(256), 0, stream,
                       p.y, model.x.data(), count),
          "Between");
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int shape = 0; shape < kHead; ++shape) product(shape, layer);
  }
  product(kHead, 0);
}

void BenchSteps(const Model& model, Peers& peers, double ceiling) {
  double bytes = 0;
  for (const Shape& s : kShapes) bytes += static_cast<double>(s.Bytes()) * s.copies;
  std::printf(
      "\nA step's %d products, %.2f GB of weights; ms median (least - most), share of the "
      "ceiling\n",
      kLayers * 4 + 1, bytes * 1e-9);
  for (bool between : {false, true}) {
    for (int rows : {1, 8, 32, 64, 128}) {
      std::printf("%-22s rows %3d:", between ? "small kernels between" : "products only", rows);
      for (Who who : {Who::kOurs, Who::kPeer}) {
        if (who == Who::kPeer && !peers.wanted) continue;
        for (int shape = 0; shape <= kHead && who == Who::kPeer; ++shape) peers.Best(shape, rows);
        const Timing t =
            TimeGraph([&](cudaStream_t s) { EnqueueStep(model, peers, who, between, rows, s); });
        std::printf("  %s %.3f (%.3f - %.3f) %.1f %%", who == Who::kOurs ? "ours" : "cuBLASLt",
                    t.median_us * 1e-3, t.least_us * 1e-3, t.most_us * 1e-3,
                    bytes / t.median_us * 1e-3 / ceiling * 100);
      }
      std::printf("\n");
    }
  }
}

void BenchPrompts(const Model& model, Peers& peers) {
  std::printf(
      "\nPrompt rows, TFLOP/s, one algorithm for all / cuBLASLt's best of 8 for these rows\n");
  for (int rows : {64, 512, 2048, 8192}) {
    std::printf("rows %4d:", rows);
    for (int shape = 0; shape < kHead; ++shape) {
      const Shape& s = kShapes[shape];
      constexpr int kCopies = 4;
      const Timing ours = TimeGraph(
          [&](cudaStream_t stream) {
            for (int copy = 0; copy < kCopies; ++copy) {
              Check(LaunchLinear(model.Product(shape, copy, rows, 0), stream), "LaunchLinear");
            }
          },
          7);
      const CublasLtProduct& peer = peers.Best(shape, rows);
      const Timing theirs = TimeGraph(
          [&](cudaStream_t stream) {
            for (int copy = 0; copy < kCopies; ++copy) {
              peer.Launch(model.Product(shape, copy, rows, 0), stream);
            }
          },
          7);
      const double mflop = 2e-6 * s.n * s.k * rows * kCopies;
      std::printf("  %s %.0f / %.0f", s.name, mflop / ours.median_us, mflop / theirs.median_us);
    }
    std::printf("\n");
  }
}

int Main(const std::string& parts) {
  const auto wanted = [&](const char* part) {
    return parts.empty() || parts == "ours" || parts.find(part) != std::string::npos;
  };
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  const Model model;
  Peers peers(model, parts.find("ours") == std::string::npos);
  const auto ceiling_at = [&](size_t mib) {
    return ReadCeiling(model.weights[2].data(), model.weights[2].size() * 2, mib << 20);
  };
  const double ceiling = ceiling_at(256);
  std::printf(
      "%s: reads %.0f GB/s 4 GiB at a time, %.0f 256 MiB at a time (the ceiling below), %.0f "
      "32 MiB at a time\n",
      device.name, ceiling_at(4096), ceiling, ceiling_at(32));
  if (wanted("check")) CheckProducts(model);
  if (wanted("shapes")) BenchShapes(model, peers, ceiling);
  if (wanted("steps")) BenchSteps(model, peers, ceiling);
  if (wanted("prompts")) BenchPrompts(model, peers);
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc > 1 ? argv[1] : ""); }
