// The prediction of Fluxion's budgets, in one kernel: a block takes eight query heads of a row and
// runs their features through all layers of the network. The weights of a layer come from L2, each
// once for the eight heads: a thread has four columns, so that it multiplies more than it loads
// from shared memory, and the inputs are cut into slices. A sum is that of its slices in order, and
// a slice is one chain, so its bits depend on the layer's shape alone. A block takes 19 us on an
// H200 with the typical network of 0.11 M weights, of which 6 us are features and launch, and 16
// rows of 32 heads are 64 blocks. The floor is 4 us: that is how long a multiprocessor reads the
// weights from L2, and how long it multiplies them for eight heads.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/fluxion/budget_features.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kColumns = 4;  // of a thread
// Threads that take the slices of a layer, of which narrow layers have more. Together they have all
// columns of a layer, or go through them in steps.
constexpr int kNarrow = 32, kWide = 64;
constexpr int kPartsOfHead = kBudgetThreads * kColumns;

// Layers with fewer columns have a warp for every sum, as most threads would have none.
constexpr int kFewColumns = 16;
// Floats between an input's numbers for all heads and those of the next input. Each begins on 16
// bytes, and neighbours do not share all banks of shared memory.
constexpr int kStride = kBudgetHeads + 4;

// Lies before the values of inputs and outputs, [2][widest layer][kStride] floats.
struct Shared {
  BudgetFeatures features;
  // [slices][kBudgetHeads][columns]; slices * columns is always kPartsOfHead
  float parts[kBudgetHeads * kPartsOfHead];
  alignas(16) float values[1];
};

__device__ __forceinline__ float BudgetGelu(float x) {
  return x * 0.5f * (1.0f + erff(x * 0.707106781186547524f));
}

struct LayerShape {
  const float* weights;  // [in][out]
  const float* bias;
  int in, out;
  bool last;  // has no GELU
};

// Sums a slice of the inputs into the parts of the columns from `column` on. kThreads threads take
// a slice.
template <int kThreads>
__device__ __forceinline__ void SumSlice(const LayerShape& layer, int column, const float* x,
                                         float* parts) {
  constexpr int kSlices = kBudgetThreads / kThreads;
  const int slice = static_cast<int>(threadIdx.x) / kThreads;
  const int first = static_cast<int>(threadIdx.x) % kThreads;
  const int begin = layer.in * slice / kSlices, end = layer.in * (slice + 1) / kSlices;
  const float* const weights = layer.weights + column + first;
  const int columns = layer.out - column - first;  // of the layer from this thread's first one on
  float sums[kColumns][kBudgetHeads] = {};
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    float w[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      w[c] = c * kThreads < columns ? weights[i * layer.out + c * kThreads] : 0;
    }
    const float4 low = *reinterpret_cast<const float4*>(x + i * kStride);
    const float4 high = *reinterpret_cast<const float4*>(x + i * kStride + 4);
    const float of_heads[kBudgetHeads] = {low.x,  low.y,  low.z,  low.w,
                                          high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int h = 0; h < kBudgetHeads; ++h) sums[c][h] = fmaf(w[c], of_heads[h], sums[c][h]);
    }
  }
#pragma unroll
  for (int h = 0; h < kBudgetHeads; ++h) {
    float* const to = parts + (slice * kBudgetHeads + h) * kThreads * kColumns + first;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) to[c * kThreads] = sums[c][h];
  }
}

template <int kThreads>
__device__ __forceinline__ void RunLayer(const LayerShape& layer, const float* x, float* y,
                                         float* parts) {
  constexpr int kStep = kThreads * kColumns, kSlices = kBudgetThreads / kThreads;
  for (int column = 0; column < layer.out; column += kStep) {
    SumSlice<kThreads>(layer, column, x, parts);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBudgetHeads * kStep; i += kBudgetThreads) {
      const int h = i / kStep, c = i % kStep;
      if (column + c >= layer.out) continue;
      float sum = layer.bias[column + c];
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) sum += parts[slice * kBudgetHeads * kStep + i];
      y[(column + c) * kStride + h] = layer.last ? sum : BudgetGelu(sum);
    }
    __syncthreads();
  }
}

// Does the same for a layer of few columns.
__device__ __forceinline__ void RunFewColumns(const LayerShape& layer, const float* x, float* y) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = warp; i < kBudgetHeads * layer.out; i += kBudgetWarps) {
    const int h = i % kBudgetHeads, column = i / kBudgetHeads;
    float sum = 0;
#pragma unroll 4
    for (int k = lane; k < layer.in; k += 32) {
      sum = fmaf(layer.weights[k * layer.out + column], x[k * kStride + h], sum);
    }
    sum = BudgetSum(sum) + layer.bias[column];
    if (lane == 0) y[column * kStride + h] = layer.last ? sum : BudgetGelu(sum);
  }
  __syncthreads();
}

// Writes the budgets of a head and whether it streams. An infinite logit is a sum that went wrong,
// so the head does not stream.
__device__ __forceinline__ void Judge(const PredictBudgetsParams& p, int64_t i,
                                      const BudgetFeatures& features, int h, const float* outputs) {
  bool all_finite = true;
#pragma unroll
  for (int f = 0; f < kFluxionFeatures; ++f) all_finite &= isfinite(features.of[h][f]);
  const bool line = p.network.form == FluxionForm::kLine;
  const float logit = outputs[(line ? 2 : kFluxionLevels) * kStride];
  bool streams =
      all_finite && isfinite(logit) && 1.0f / (1.0f + expf(-logit)) > p.network.threshold;
#pragma unroll
  for (int level = 0; level < kFluxionLevels; ++level) {
    const float own = line ? 0 : outputs[level * kStride];
    const float slope = line ? outputs[kStride] * static_cast<float>(4 + level) : 0;
    const float budget = line ? outputs[0] + slope : exp2f(own);
    const bool finite = all_finite && isfinite(own) && isfinite(budget);
    streams = streams && finite;
    p.budgets[i * kFluxionLevels + level] = !finite || budget > 1 ? 1 : budget < 0 ? 0 : budget;
  }
  p.streaming[i] = streams ? 1 : 0;
}

// Grid: blocks of heads of a row, rows.
__global__ void __launch_bounds__(kBudgetThreads, 1)
    PredictBudgetsKernel(const __grid_constant__ PredictBudgetsParams p, int widest) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const float* const mean = p.network.values;
  const float* const deviation = mean + kFluxionFeatures;
  const int thread = static_cast<int>(threadIdx.x);
  // No kernel writes the network, so its first numbers may come before the wait.
  static_assert(kBudgetHeads * kFluxionFeatures <= kBudgetThreads, "a thread takes a feature");
  const int of_head = thread / kFluxionFeatures, f = thread % kFluxionFeatures;
  const float mean_of_f = mean[f], deviation_of_f = deviation[f];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.y);
  if (p.slots[row] < 0) return;
  const int first = static_cast<int>(blockIdx.x) * kBudgetHeads;
  const int heads = min(kBudgetHeads, p.heads - first);
  const int64_t first_i = int64_t{row} * p.heads + first;
  WriteFeatures(p, row, first, heads, shared.features);

  float* x = shared.values;
  float* y = shared.values + widest * kStride;
  if (of_head < kBudgetHeads) {
    const float feature = of_head < heads ? shared.features.of[of_head][f] : 0;
    x[f * kStride + of_head] = (feature - mean_of_f) / deviation_of_f;
    if (of_head < heads && p.features != nullptr) {
      p.features[first_i * kFluxionFeatures + thread] = feature;
    }
  }
  __syncthreads();
  const float* weights = deviation + kFluxionFeatures;
  for (int l = 0; l < p.network.layers; ++l) {
    const int in = p.network.widths[l], out = p.network.widths[l + 1];
    const LayerShape layer = {weights, weights + in * out, in, out, l + 1 == p.network.layers};
    if (out <= kFewColumns) {
      RunFewColumns(layer, x, y);
    } else if (out <= kNarrow * kColumns) {
      RunLayer<kNarrow>(layer, x, y, shared.parts);
    } else {
      RunLayer<kWide>(layer, x, y, shared.parts);
    }
    weights = layer.bias + out;
    float* const next = x;
    x = y;
    y = next;
  }
  if (thread < heads) Judge(p, first_i + thread, shared.features, thread, x + thread);
}

// Returns the width of the widest layer, or 0 if the network is outside the contract.
int WidestLayer(const FluxionNetwork& network) {
  const int outputs = network.form == FluxionForm::kLine ? 3 : kFluxionLevels + 1;
  if (network.layers < 1 || network.layers > kFluxionMostLayers ||
      network.widths[0] != kFluxionFeatures || network.widths[network.layers] != outputs) {
    return 0;
  }
  int widest = 0;
  for (int l = 0; l <= network.layers; ++l) {
    const int width = network.widths[l];
    if (width < 1 || width > kFluxionMostWidth) return 0;
    widest = width > widest ? width : widest;
  }
  return widest;
}

constexpr size_t SharedBytes(int widest) {
  return offsetof(Shared, values) + sizeof(float) * 2 * kStride * static_cast<size_t>(widest);
}

}  // namespace

cudaError_t LaunchPredictBudgets(const PredictBudgetsParams& p, cudaStream_t stream) {
  const int widest = WidestLayer(p.network);
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0 ||
      p.head_dim < 1 || widest == 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(PredictBudgetsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(SharedBytes(kFluxionMostWidth)));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((p.heads + kBudgetHeads - 1) / kBudgetHeads),
                  static_cast<unsigned>(p.rows));
  return LaunchKernel(PredictBudgetsKernel, grid, dim3(kBudgetThreads), SharedBytes(widest), stream,
                      p, widest);
}

}  // namespace sluice::kernels::cuda
