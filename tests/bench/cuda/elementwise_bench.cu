// Times the small operators on a GPU: embedding, norms, rotary embedding, SwiGLU and sampling, in
// the geometry of Qwen3-8B (hidden 4096, intermediate 12288, 32 + 8 heads of 128, a vocabulary of
// 151,936), as they run inside a step: enqueued one after the other in a graph.
//
//   sluice-elementwise-bench [SUBSTRING OF A CASE'S NAME [ROWS]]
//
// Each line has the microseconds per launch, which is the median of kRounds replays of a graph of
// kLaunches launches over several sets of operands (and the least and the most); the bytes that
// one launch must move; the time that these take at the speed of a large copy in the same run;
// and the ratio of the two times.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/common/launch.h"

namespace sluice::kernels {
namespace {

constexpr int kLaunches = 100;
constexpr int kRounds = 11;
constexpr int kSets = 4;  // sets of operands, used in turn
constexpr int kHidden = 4096, kIntermediate = 12288, kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr int kVocab = 151936;
constexpr int kBlockTokens = 64, kBlocksPerSlot = 4;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Device memory for the life of the program, zeroed.
template <typename T>
T* NewArray(int64_t size) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(size) * sizeof(T)), "cudaMalloc");
  Check(cudaMemset(data, 0, static_cast<size_t>(size) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(data);
}

template <typename T>
T* NewArray(const std::vector<T>& values) {
  T* data = NewArray<T>(static_cast<int64_t>(values.size()));
  Check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return data;
}

// Returns normally distributed numbers, a million different ones.
std::vector<float> Normal(int64_t size) {
  static const std::vector<float> pool = [] {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> values((1 << 20) - 3);
    for (float& v : values) v = normal(random);
    return values;
  }();
  static size_t next = 0;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& v : values) v = pool[next++ % pool.size()];
  return values;
}

std::vector<int32_t> Counting(int32_t size) {
  std::vector<int32_t> values;
  for (int32_t i = 0; i < size; ++i) values.push_back(i);
  return values;
}

// Returns the microseconds of one run of `graph`, measured by events.
double Microseconds(cudaGraphExec_t graph, cudaStream_t stream) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    Check(cudaEventCreate(&begin), "event");
    Check(cudaEventCreate(&end), "event");
  }
  Check(cudaEventRecord(begin, stream), "record");
  Check(cudaGraphLaunch(graph, stream), "graph");
  Check(cudaEventRecord(end, stream), "record");
  Check(cudaEventSynchronize(end), "graph");
  float ms = 0;
  Check(cudaEventElapsedTime(&ms, begin, end), "events");
  return 1e3 * ms;
}

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    cudaDeviceProp device;
    Check(cudaGetDeviceProperties(&device, 0), "device");
    copy_gbs_ = CopySpeed();
    std::printf("%s; copy of 1 GiB %.0f GB/s (read + write)\n", device.name, copy_gbs_);
    std::printf("%-44s %5s %8s %8s %8s %10s %8s %6s\n", "case", "rows", "us", "min", "max", "bytes",
                "floor us", "ratio");
  }

  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  // Times `launch(set)`, which enqueues the operator on the set of operands of that number.
  void Time(const std::string& name, int rows, double bytes,
            const std::function<cudaError_t(int set, cudaStream_t)>& launch) {
    if (!Wants(name)) return;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kLaunches; ++i) Check(launch(i % kSets, stream_), name.c_str());
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (int i = 0; i < 3; ++i) Microseconds(exec, stream_);
    std::vector<double> us;
    for (int i = 0; i < kRounds; ++i) us.push_back(Microseconds(exec, stream_) / kLaunches);
    std::sort(us.begin(), us.end());
    const double median = us[us.size() / 2];
    const double floor = bytes / copy_gbs_ * 1e-3;
    std::printf("%-44s %5d %8.2f %8.2f %8.2f %10.0f %8.2f %6.1f\n", name.c_str(), rows, median,
                us.front(), us.back(), bytes, floor, median / floor);
    Check(cudaGraphExecDestroy(exec), "destroy");
    Check(cudaGraphDestroy(graph), "destroy");
  }

 private:
  double CopySpeed() {
    constexpr size_t kBytes = size_t{1} << 30;
    void *from = nullptr, *to = nullptr;
    Check(cudaMalloc(&from, kBytes), "cudaMalloc");
    Check(cudaMalloc(&to, kBytes), "cudaMalloc");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    Check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, stream_), "copy");
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    double best = 1e30;
    for (int i = 0; i < 6; ++i) best = std::min(best, Microseconds(exec, stream_));
    Check(cudaGraphExecDestroy(exec), "destroy");
    Check(cudaGraphDestroy(graph), "destroy");
    Check(cudaFree(from), "free");
    Check(cudaFree(to), "free");
    return 2.0 * kBytes / best * 1e-3;
  }

  const std::string filter_;
  cudaStream_t stream_ = nullptr;
  double copy_gbs_ = 0;
};

void TimeElementwise(Bench& bench, int rows) {
  const int32_t* rows_in_order = NewArray(Counting(rows));
  const int32_t* positions = NewArray(std::vector<int32_t>(static_cast<size_t>(rows), 70));
  const int32_t* tokens = NewArray(std::vector<int32_t>(static_cast<size_t>(rows) * 128, 9));
  const float* weight = NewArray(Normal(kIntermediate));
  const auto sets = [&](int64_t size) {
    std::vector<float*> arrays;
    for (int i = 0; i < kSets; ++i) arrays.push_back(NewArray(Normal(rows * size)));
    return arrays;
  };

  const auto hidden = sets(kHidden);
  uint16_t* table = NewArray<uint16_t>(int64_t{64} * kHidden);
  bench.Time("embedding", rows, rows * 6.0 * kHidden, [&](int set, cudaStream_t stream) {
    const EmbeddingParams p = {
        tokens,      128, rows_in_order, positions, {table, 64, kHidden, WeightLayout::kRowMajor},
        hidden[set], rows};
    return cuda::LaunchEmbedding(p, stream);
  });

  uint16_t* out = NewArray<uint16_t>(rows * int64_t{kIntermediate});
  bench.Time("rms_norm", rows, rows * 6.0 * kHidden, [&](int set, cudaStream_t stream) {
    const RmsNormParams p = {hidden[set], nullptr, weight,          out, kHidden, rows,
                             kHidden,     1e-6f,   DType::kBFloat16};
    return cuda::LaunchRmsNorm(p, stream);
  });

  float* cos_sin = NewArray<float>(rows * int64_t{kHeadDim});
  bench.Time("rope_table", rows, rows * 4.0 * kHeadDim, [&](int, cudaStream_t stream) {
    const RopeTableParams p = {positions, weight, 1.0f, cos_sin, rows, kHeadDim / 2};
    return cuda::LaunchRopeTable(p, stream);
  });

  constexpr int kAllHeads = kHeads + 2 * kKvHeads;
  const auto qkv = sets(kAllHeads * kHeadDim);
  const int64_t page = int64_t{kKvHeads} * 2 * kBlockTokens * kHeadDim;
  uint16_t* cache = NewArray<uint16_t>(rows * kBlocksPerSlot * page);
  const int32_t* blocks = NewArray(Counting(rows * kBlocksPerSlot));
  uint16_t* written = NewArray<uint16_t>(rows * int64_t{kKvHeads} * 2 * kHeadDim);
  for (uint16_t* copy : {static_cast<uint16_t*>(nullptr), written}) {
    const double bytes =
        rows * kHeadDim * (8.0 * kHeads + 2 * kKvHeads * (copy != nullptr ? 8 : 6));
    bench.Time(copy != nullptr ? "rope_append and copy" : "rope_append", rows, bytes,
               [&](int set, cudaStream_t stream) {
                 const RopeAppendParams p = {qkv[set],
                                             weight,
                                             weight,
                                             cos_sin,
                                             rows_in_order,
                                             positions,
                                             {cache, blocks, kBlocksPerSlot, 2 * page, kBlockTokens,
                                              kKvHeads, kHeadDim, DType::kBFloat16},
                                             copy,
                                             rows,
                                             kHeads,
                                             1e-6f};
                 return cuda::LaunchRopeAppend(p, stream);
               });
  }

  const auto gate_up = sets(2 * kIntermediate);
  bench.Time("silu_mul", rows, rows * 10.0 * kIntermediate, [&](int set, cudaStream_t stream) {
    const SiluMulParams p = {gate_up[set], out, rows, kIntermediate, DType::kBFloat16};
    return cuda::LaunchSiluMul(p, stream);
  });
}

struct SampleSetting {
  const char* name;
  SamplingSlot slot;
};

std::vector<SampleSetting> SampleSettings(int prompt_length) {
  SamplingSlot greedy = {};
  greedy.top_p = 1;
  greedy.repetition_penalty = 1;
  greedy.prompt_length = prompt_length;
  SamplingSlot plain = greedy;
  plain.temperature = 0.8f;
  SamplingSlot top_k = plain;
  top_k.top_k = 50;
  SamplingSlot top_p = plain;
  top_p.top_p = 0.95f;
  SamplingSlot both = top_k;
  both.top_p = 0.95f;
  SamplingSlot all = both;
  all.min_p = 0.02f;
  all.repetition_penalty = 1.1f;
  all.frequency_penalty = 0.2f;
  all.presence_penalty = 0.1f;
  all.logprobs = 1;
  all.top_logprobs = 5;
  return {{"sample, greedy", greedy},
          {"sample, temperature", plain},
          {"sample, top_k 50", top_k},
          {"sample, top_p 0.95", top_p},
          {"sample, top_k 50, top_p 0.95", both},
          {"sample, those, penalties of 8K, top 5 logprobs", all}};
}

// Uses logits of two kinds: normal ones, whose nucleus is wide, and ones as peaked as a model's.
void TimeSample(Bench& bench, int rows, bool peaked) {
  constexpr int kHistory = 8192;
  std::vector<float*> logits;
  for (int set = 0; set < kSets; ++set) {
    std::vector<float> values = Normal(int64_t{rows} * kVocab);
    for (float& v : values) v = peaked ? 1.5f * v * std::fabs(v) : 2.0f * v;
    logits.push_back(NewArray(values));
  }
  std::vector<int32_t> history(static_cast<size_t>(rows) * kHistory);
  for (size_t i = 0; i < history.size(); ++i) history[i] = static_cast<int32_t>(i * 7919 % 3001);
  int32_t* tokens = NewArray(history);
  const int32_t* slots = NewArray(Counting(rows));
  const int32_t* positions =
      NewArray(std::vector<int32_t>(static_cast<size_t>(rows), kHistory - 2));
  const int32_t* stop_ids = NewArray<int32_t>(int64_t{rows} * kMaxStopIds);
  const int32_t* bias_ids = NewArray<int32_t>(int64_t{rows} * kMaxLogitBias);
  const float* bias_values = NewArray<float>(int64_t{rows} * kMaxLogitBias);
  int32_t* out_tokens = NewArray<int32_t>(rows);
  float* out_logprobs = NewArray<float>(rows);
  int32_t* top_ids = NewArray<int32_t>(int64_t{rows} * kMaxTopLogprobs);
  float* top_logprobs = NewArray<float>(int64_t{rows} * kMaxTopLogprobs);
  for (const SampleSetting& setting : SampleSettings(kHistory / 2)) {
    std::vector<SamplingSlot> table;
    for (int i = 0; i < rows; ++i) {
      table.push_back(setting.slot);
      table.back().seed = static_cast<uint64_t>(i);
    }
    const SamplingSlot* sampling = NewArray(table);
    bench.Time(std::string(setting.name) + (peaked ? " (peaked)" : ""), rows, rows * 4.0 * kVocab,
               [&](int set, cudaStream_t stream) {
                 const SampleParams p = {logits[set],  slots,      positions,    sampling,
                                         stop_ids,     bias_ids,   bias_values,  tokens,
                                         kHistory,     out_tokens, out_logprobs, top_ids,
                                         top_logprobs, nullptr,    rows,         kVocab};
                 return cuda::LaunchSample(p, stream);
               });
  }
}

}  // namespace
}  // namespace sluice::kernels

int main(int argc, char** argv) {
  using namespace sluice::kernels;
  Bench bench(argc > 1 ? argv[1] : "");
  std::vector<int> all_rows = {1, 8, 32, 64};
  if (argc > 2) all_rows = {std::atoi(argv[2])};
  for (int rows : all_rows) TimeElementwise(bench, rows);
  if (argc > 1 && std::string(argv[1]).find("sample") != 0) return 0;
  for (int rows : all_rows) {
    for (bool peaked : {false, true}) TimeSample(bench, rows, peaked);
  }
}
