// Times attention on a GPU against the rate of plain reads of as many bytes (decode) and cuBLAS's
// bf16 rate (prefill), all measured in this run. It also checks the results at contexts too long
// for the unit tests.
//
//   sluice-attention-bench [--gib N] [--quick] [--only decode|drafts|prefill]
//
// --gib is the size of the KV arena (default 20); cases that need more are left out. --quick runs
// fewer cases. Buffers rotate, so that no launch finds its K and V in L2. A time is that of one
// LaunchAttention in a graph of them, including the combination of partial results, with the
// least and most of the replays in brackets.
#include <cublas_v2.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/common/launch.h"
#include "tests/bench/cuda/timing.cuh"

namespace sluice::bench {
namespace {

using kernels::AttentionParams;
using kernels::DType;

constexpr int kBlockTokens = 32;

struct Shape {
  const char* name;
  int heads;
  int kv_heads;
  int head_dim;

  int64_t TokenBytes() const { return int64_t{4} * kv_heads * head_dim; }
  int64_t PageBytes() const { return TokenBytes() * kBlockTokens; }
};

constexpr Shape kEightB = {"Llama-3-8B, Qwen3-8B: 32/8 heads of 128", 32, 8, 128};
constexpr Shape kOneB = {"Llama-3.2-1B: 32/8 heads of 64", 32, 8, 64};
// Shapes whose rows of drafts are timed: groups of 4, 5, 7 and 8 query heads.
constexpr Shape kDraftShapes[] = {kEightB,
                                  {"Qwen3-14B: 40/8 heads of 128", 40, 8, 128},
                                  {"Qwen2.5-7B: 28/4 heads of 128", 28, 4, 128},
                                  {"Qwen3-32B: 64/8 heads of 128", 64, 8, 128}};

// Fills with bf16 of roughly normal values: sums of four uniform ones, from a hash of the index.
__global__ void FillKernel(uint16_t* data, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    float sum = -2.0f;
    for (int k = 0; k < 4; ++k) sum += static_cast<float>(z >> (16 * k) & 0xffff) * 0x1p-16f;
    data[i] = static_cast<uint16_t>(__float_as_uint(sum * 1.7f) >> 16);
  }
}

// Computes the scores of (row, head) = (blockIdx.x, blockIdx.y) and their result, in float64.
__global__ void ExactKernel(AttentionParams p, double* scores, int64_t score_stride, double* out) {
  const kernels::PagedCache& c = p.cache;
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int dim = c.head_dim, kv_head = head / (p.heads / c.kv_heads);
  const int tokens = p.positions[row] + 1;
  const int64_t item = int64_t{row} * p.heads + head;
  double* const score = scores + item * score_stride;
  const auto key_of = [&](int t) {
    const int64_t page = c.block_table[p.slots[row] * c.table_stride + t / c.block_tokens];
    return reinterpret_cast<const uint16_t*>(static_cast<const char*>(c.base) +
                                             page * c.page_bytes) +
           (2 * kv_head * c.block_tokens + t % c.block_tokens) * dim;
  };
  const auto value_of = [](uint16_t bits) {
    return static_cast<double>(__uint_as_float(static_cast<uint32_t>(bits) << 16));
  };
  __shared__ double parts[1024];
  double largest = -1e300;
  for (int t = thread; t < tokens; t += threads) {
    const uint16_t* key = key_of(t);
    double dot = 0;
    for (int i = 0; i < dim; ++i) {
      dot += static_cast<double>(p.q[row * p.q_stride + head * dim + i]) * value_of(key[i]);
    }
    score[t] = dot * static_cast<double>(p.scale);
    largest = fmax(largest, score[t]);
  }
  parts[thread] = largest;
  __syncthreads();
  for (int i = 0; i < threads; ++i) largest = fmax(largest, parts[i]);
  __syncthreads();
  // Thread (part, i) computes element i of the sum over tokens part, part + step, ...
  const int part = thread / dim, step = threads / dim, i = thread % dim;
  double sum = 0, weights = 0;
  for (int t = part; t < tokens; t += step) {
    const double weight = exp(score[t] - largest);
    weights += weight;
    sum += weight * value_of(key_of(t)[c.block_tokens * dim + i]);
  }
  parts[thread] = sum;
  __syncthreads();
  for (int k = 1; k < step && part == 0; ++k) sum += parts[k * dim + i];
  __syncthreads();
  parts[thread] = weights;
  __syncthreads();
  for (int k = 1; k < step && part == 0; ++k) weights += parts[k * dim + i];
  if (part == 0) out[item * dim + i] = sum / weights;
}

struct Arena {
  char* data;
  int64_t bytes;
};

// Rows and their caches: `copies` block tables, over disjoint pages if the arena has enough.
class Case {
 public:
  Case(const Shape& shape, const Arena& arena, const std::vector<int32_t>& slots,
       const std::vector<int32_t>& positions, bool decode, int copies, std::mt19937_64& random,
       int32_t sequence_rows = 1)
      : shape_(shape), rows_(static_cast<int32_t>(slots.size())) {
    int32_t most = 0, sequences = 0;
    for (size_t r = 0; r < slots.size(); ++r) {
      most = std::max(most, positions[r]);
      sequences = std::max(sequences, slots[r] + 1);
    }
    std::vector<int32_t> blocks(static_cast<size_t>(sequences), 0);
    for (size_t r = 0; r < slots.size(); ++r) {
      int32_t& of = blocks[static_cast<size_t>(slots[r])];
      of = std::max(of, positions[r] / kBlockTokens + 1);
    }
    const int64_t stride = most / kBlockTokens + 1;
    std::vector<int32_t> pages(static_cast<size_t>(arena.bytes / shape.PageBytes()));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    size_t next = 0;
    for (int copy = 0; copy < copies; ++copy) {
      std::vector<int32_t> table(static_cast<size_t>(stride) * blocks.size(), 0);
      for (size_t s = 0; s < blocks.size(); ++s) {
        for (int32_t b = 0; b < blocks[s]; ++b) {
          table[s * static_cast<size_t>(stride) + static_cast<size_t>(b)] =
              pages[next++ % pages.size()];
        }
      }
      tables_.push_back(DeviceCopy(table));
    }
    const int width = shape.heads * shape.head_dim;
    std::vector<float> q(static_cast<size_t>(rows_) * static_cast<size_t>(width));
    std::normal_distribution<float> normal(0.0f, 1.5f);
    for (float& v : q) v = normal(random);
    params_.q = DeviceCopy(q);
    params_.q_stride = width;
    params_.slots = DeviceCopy(slots);
    params_.positions = DeviceCopy(positions);
    params_.cache = {arena.data,   nullptr,        stride,         shape.PageBytes(),
                     kBlockTokens, shape.kv_heads, shape.head_dim, DType::kBFloat16};
    params_.out = DeviceArray<float>(int64_t{rows_} * width);
    params_.lse = DeviceArray<float>(int64_t{rows_} * shape.heads);
    const int64_t scratch = kernels::cuda::AttentionScratchBytes(
        128, shape.heads, shape.kv_heads, shape.head_dim, most + 1, sequence_rows);
    params_.partial = reinterpret_cast<float*>(DeviceArray<char>(scratch));
    params_.partial_rows = scratch / (int64_t{4} * shape.heads * (shape.head_dim + 1));
    params_.rows = rows_;
    params_.decode_rows = decode ? rows_ : 0;
    params_.heads = shape.heads;
    params_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    params_.out_type = DType::kFloat32;
    params_.sequence_rows = sequence_rows;
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;
  ~Case() {
    for (int32_t* table : tables_) cudaFree(table);
    for (const void* p :
         {static_cast<const void*>(params_.q), static_cast<const void*>(params_.slots),
          static_cast<const void*>(params_.positions), static_cast<const void*>(params_.out),
          static_cast<const void*>(params_.lse), static_cast<const void*>(params_.partial)}) {
      cudaFree(const_cast<void*>(p));
    }
  }

  AttentionParams Params(int copy) const {
    AttentionParams p = params_;
    p.cache.block_table = tables_[static_cast<size_t>(copy) % tables_.size()];
    return p;
  }

  Timing Measure(int launches, int samples) const {
    return Time(launches, samples, [&](int i, cudaStream_t stream) {
      Check(kernels::cuda::LaunchAttention(Params(i), stream), "LaunchAttention");
    });
  }

  std::vector<float> Run(const AttentionParams& p) const {
    std::vector<float> out(static_cast<size_t>(p.rows) * static_cast<size_t>(Width()));
    Check(cudaMemset(p.out, 0xFF, out.size() * sizeof(float)), "poison");
    Check(kernels::cuda::LaunchAttention(p, nullptr), "LaunchAttention");
    Check(cudaDeviceSynchronize(), "attention");
    Check(cudaMemcpy(out.data(), p.out, out.size() * sizeof(float), cudaMemcpyDeviceToHost),
          "copy");
    return out;
  }

  // Returns the relative L2 error of rows [first, first + rows).
  double Error(const std::vector<float>& all, int32_t first, int32_t rows, int64_t tokens) const {
    AttentionParams p = RowsOf(first, rows);
    double* scores = DeviceArray<double>(int64_t{rows} * shape_.heads * tokens);
    double* exact = DeviceArray<double>(int64_t{rows} * Width());
    ExactKernel<<<dim3(rows, shape_.heads), 1024>>>(p, scores, tokens, exact);
    std::vector<double> want(static_cast<size_t>(rows) * static_cast<size_t>(Width()));
    Check(cudaMemcpy(want.data(), exact, want.size() * sizeof(double), cudaMemcpyDeviceToHost),
          "exact");
    cudaFree(scores);
    cudaFree(exact);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double d =
          static_cast<double>(all[static_cast<size_t>(first) * static_cast<size_t>(Width()) + i]) -
          want[i];
      error += d * d;
      norm += want[i] * want[i];
    }
    return std::sqrt(error / norm);
  }

  // Returns true if row `row` has the same bits alone, as a row without drafts, and so without
  // scratch, as in `all`.
  bool HasSameBits(const std::vector<float>& all, int32_t row) const {
    AttentionParams p = RowsOf(row, 1);
    p.sequence_rows = 1;
    for (const int64_t partial_rows : {p.partial_rows, int64_t{0}}) {
      p.partial_rows = partial_rows;
      const std::vector<float> alone = Run(p);
      if (std::memcmp(alone.data(),
                      all.data() + static_cast<size_t>(row) * static_cast<size_t>(Width()),
                      alone.size() * sizeof(float)) != 0) {
        return false;
      }
    }
    return true;
  }

  int32_t rows() const { return rows_; }

 private:
  int64_t Width() const { return int64_t{shape_.heads} * shape_.head_dim; }
  AttentionParams RowsOf(int32_t first, int32_t rows) const {
    AttentionParams p = Params(0);
    p.q += first * p.q_stride;
    p.slots += first;
    p.positions += first;
    p.rows = rows;
    p.decode_rows = p.decode_rows > 0 ? rows : 0;
    return p;
  }

  const Shape shape_;
  const int32_t rows_;
  AttentionParams params_{};
  std::vector<int32_t*> tables_;
};

std::vector<int32_t> Numbers(int32_t first, int32_t count) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Runs `rows` rows per entry of `contexts`, in slots 0, 1, ..., which read K and V once for a
// sequence or, if `apart`, once for each row.
void RunDecode(const Shape& shape, const Arena& arena, const char* name,
               const std::vector<int32_t>& contexts, std::mt19937_64& random, int32_t rows = 1,
               bool apart = false) {
  int64_t tokens = 0;
  std::vector<int32_t> slots, positions;
  for (int32_t context : contexts) {
    for (int32_t row = rows; row > 0; --row) {
      slots.push_back(static_cast<int32_t>(slots.size()) / rows);
      positions.push_back(context - row);
    }
    tokens += context;
  }
  const int64_t bytes = tokens * shape.TokenBytes();
  if (bytes > arena.bytes) return;
  const int launches = static_cast<int>(std::clamp<int64_t>((int64_t{2} << 30) / bytes, 2, 32));
  const Case c(shape, arena, slots, positions, true, launches, random, apart ? 1 : rows);
  const Timing t = c.Measure(launches, 7);
  const double ceiling = ReadRate(arena.data, arena.bytes, bytes);
  const double rate = static_cast<double>(bytes) / t.median_us / 1e3;
  const std::vector<float> out = c.Run(c.Params(0));
  const int32_t last = c.rows() - 1;
  std::printf(
      "%-19s %9.1f MB %9.1f us [%.1f, %.1f] %6.0f GB/s, reads %6.0f: %5.1f %%  "
      "error %.1e bits %s\n",
      name, static_cast<double>(bytes) / 1e6, t.median_us, t.least_us, t.most_us, rate, ceiling,
      100 * rate / ceiling, c.Error(out, last, 1, positions.back() + 1),
      c.HasSameBits(out, last) && c.HasSameBits(out, 0) ? "same" : "DIFFER");
  std::fflush(stdout);
}

// Runs `rows` tokens of one prompt that end a context of `context`.
void RunPrefill(const Shape& shape, const Arena& arena, int32_t rows, int32_t context,
                double product_rate, std::mt19937_64& random) {
  if (int64_t{context} * shape.TokenBytes() > arena.bytes) return;
  const Case c(shape, arena, std::vector<int32_t>(static_cast<size_t>(rows), 0),
               Numbers(context - rows, rows), false, 2, random);
  const Timing t = c.Measure(4, 5);
  double operations = 0;
  for (int32_t r = 0; r < rows; ++r) {
    operations += 4.0 * shape.head_dim * shape.heads * (context - rows + r + 1);
  }
  const double rate = operations / t.median_us / 1e6;
  const std::vector<float> out = c.Run(c.Params(0));
  std::printf(
      "%6d rows to context %6d %10.1f us [%.1f, %.1f] %6.1f TFLOP/s, products %.0f: "
      "%4.1f %%  error %.1e bits %s\n",
      rows, context, t.median_us, t.least_us, t.most_us, rate, product_rate,
      100 * rate / product_rate, c.Error(out, rows - 1, 1, context),
      c.HasSameBits(out, rows - 1) && c.HasSameBits(out, rows / 2 + 1) ? "same" : "DIFFER");
  std::fflush(stdout);
}

// Returns the TFLOP/s of cuBLAS's bf16 product of two n x n matrices.
double ProductRate(const Arena& arena, int n) {
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) return NAN;
  const int64_t matrix = int64_t{2} * n * n;
  void* workspace = DeviceArray<char>(64 << 20);
  void* product = DeviceArray<char>(matrix);
  cublasSetWorkspace(handle, workspace, 64 << 20);
  const float one = 1, zero = 0;
  const auto multiply = [&](int i, cudaStream_t stream) {
    cublasSetStream(handle, stream);
    const char* a = arena.data + i % 2 * 2 * matrix;
    cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_16BF, n, a + matrix,
                 CUDA_R_16BF, n, &zero, product, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                 CUBLAS_GEMM_DEFAULT);
  };
  multiply(0, nullptr);  // loads its kernels
  const Timing t = Time(4, 5, multiply);
  cublasDestroy(handle);
  cudaFree(workspace);
  cudaFree(product);
  return 2.0 * n * n * n / t.median_us / 1e6;
}

void BenchDecode(const Arena& arena, bool quick, std::mt19937_64& random) {
  std::printf("\nDecode, %s. batch x context, KV read\n", kEightB.name);
  for (const int32_t batch : {1, 8, 32, 64, 128}) {
    for (const int32_t context : {1024, 8192, 32768, 131072}) {
      if (quick && (batch == 8 || batch == 32 || batch * context > (8 << 20))) continue;
      char name[32];
      std::snprintf(name, sizeof(name), "%d x %dK", batch, context / 1024);
      RunDecode(kEightB, arena, name, std::vector<int32_t>(static_cast<size_t>(batch), context),
                random);
    }
  }
  std::vector<int32_t> mixed(64, 1024);
  mixed[20] = 131072;
  RunDecode(kEightB, arena, "1x128K+63x1K", mixed, random);
  std::vector<int32_t> uneven;
  for (int32_t i = 0; i < 48; ++i) uneven.push_back(1 + i * 411);
  RunDecode(kEightB, arena, "48 x 1-19K", uneven, random);
  std::printf("Decode, %s\n", kOneB.name);
  RunDecode(kOneB, arena, "1 x 16K", {16384}, random);
  RunDecode(kOneB, arena, "64 x 8K", std::vector<int32_t>(64, 8192), random);
}

// Rows of drafts, together and apart, and each sequence's last row alone.
void BenchDrafts(const Shape& shape, const Arena& arena, std::mt19937_64& random) {
  std::printf("\nRows of drafts, %s. batch x context x rows, KV read once a sequence\n",
              shape.name);
  for (const int32_t batch : {1, 8, 24}) {
    const std::vector<int32_t> contexts(static_cast<size_t>(batch), 32768);
    for (const int32_t rows : {1, 2, 3, 4}) {
      for (const bool apart : {false, true}) {
        if (rows == 1 && apart) continue;
        char name[32];
        std::snprintf(name, sizeof(name), "%d x 32K x %d%s", batch, rows, apart ? " apart" : "");
        RunDecode(shape, arena, name, contexts, random, rows, apart);
      }
    }
  }
}

void BenchPrefill(const Arena& arena, std::mt19937_64& random) {
  const double product_rate = ProductRate(arena, 8192);
  std::printf("\nPrefill, %s; cuBLAS, bf16 8192^3: %.0f TFLOP/s\n", kEightB.name, product_rate);
  RunPrefill(kEightB, arena, 8192, 8192, product_rate, random);
  RunPrefill(kEightB, arena, 2048, 2048, product_rate, random);
  for (const int32_t context : {8192, 32768, 131072}) {
    RunPrefill(kEightB, arena, 512, context, product_rate, random);
  }
  std::printf("Prefill, %s\n", kOneB.name);
  RunPrefill(kOneB, arena, 8192, 8192, product_rate, random);
}

int Main(int argc, char** argv) {
  int64_t gib = 20;
  bool quick = false;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    if (std::strcmp(argv[i], "--gib") == 0 && i + 1 < argc) gib = std::atoll(argv[++i]);
  }
  cudaDeviceProp device;
  Check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %d SMs; arena %lld GiB\n", device.name, device.multiProcessorCount,
              static_cast<long long>(gib));
  const Arena arena = {DeviceArray<char>(gib << 30), gib << 30};
  FillKernel<<<4096, 256>>>(reinterpret_cast<uint16_t*>(arena.data), arena.bytes / 2);
  Check(cudaDeviceSynchronize(), "fill");
  std::mt19937_64 random(5);

  if (only.empty() || only == "decode") BenchDecode(arena, quick, random);
  if (only.empty() || only == "drafts") {
    for (const Shape& shape : kDraftShapes) BenchDrafts(shape, arena, random);
  }
  if (only.empty() || only == "prefill") BenchPrefill(arena, random);
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
