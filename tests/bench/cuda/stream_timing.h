// Timing that the benches of a GPU share: work on a stream, or recorded as a graph, is timed by
// events, as median and extremes. Every error ends the program.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace sluice::bench {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define SLUICE_BENCH_CHECK(call) ::sluice::bench::Check((call), #call)

struct Times {
  double median, low, high;  // seconds
};

inline Times Summary(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back()};
}

// Times the work that `enqueue` puts on the stream, `repeats` times after one that does not
// count.
inline Times TimeOnStream(cudaStream_t stream, int repeats, const std::function<void()>& enqueue) {
  cudaEvent_t start, stop;
  SLUICE_BENCH_CHECK(cudaEventCreate(&start));
  SLUICE_BENCH_CHECK(cudaEventCreate(&stop));
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    SLUICE_BENCH_CHECK(cudaEventRecord(start, stream));
    enqueue();
    SLUICE_BENCH_CHECK(cudaEventRecord(stop, stream));
    SLUICE_BENCH_CHECK(cudaEventSynchronize(stop));
    float ms = 0;
    SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (i > 0) seconds.push_back(ms * 1e-3);
  }
  SLUICE_BENCH_CHECK(cudaEventDestroy(start));
  SLUICE_BENCH_CHECK(cudaEventDestroy(stop));
  return Summary(seconds);
}

// A captured graph of the work that `enqueue` puts on the stream.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
    cudaGraph_t graph;
    SLUICE_BENCH_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    SLUICE_BENCH_CHECK(cudaStreamEndCapture(stream, &graph));
    SLUICE_BENCH_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
    SLUICE_BENCH_CHECK(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void Launch(cudaStream_t stream) { SLUICE_BENCH_CHECK(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

struct Timing {
  double median_us, least_us, most_us;
};

// Captures the work that `enqueue` puts on a stream, and times `replays` runs of it, after two
// untimed ones.
inline Timing TimeGraph(const std::function<void(cudaStream_t)>& enqueue, int replays = 15) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t program;
  cudaEvent_t begin, end;
  Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  enqueue(stream);
  Check(cudaStreamEndCapture(stream, &graph), "end capture");
  Check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  std::vector<double> us;
  for (int i = -2; i < replays; ++i) {
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "graph");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= 0) us.push_back(ms * 1e3);
  }
  std::sort(us.begin(), us.end());
  Check(cudaGraphExecDestroy(program), "cudaGraphExecDestroy");
  Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
  Check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return {us[us.size() / 2], us.front(), us.back()};
}

// Times one run, with nothing run before, for work that changes its own inputs.
inline Timing TimeOnce(const std::function<void(cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  double us = 0;
  {
    Graph graph(stream, [&] { enqueue(stream); });
    cudaEvent_t begin, end;
    SLUICE_BENCH_CHECK(cudaEventCreate(&begin));
    SLUICE_BENCH_CHECK(cudaEventCreate(&end));
    SLUICE_BENCH_CHECK(cudaEventRecord(begin, stream));
    graph.Launch(stream);
    SLUICE_BENCH_CHECK(cudaEventRecord(end, stream));
    SLUICE_BENCH_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
    us = ms * 1e3;
    SLUICE_BENCH_CHECK(cudaEventDestroy(begin));
    SLUICE_BENCH_CHECK(cudaEventDestroy(end));
  }
  SLUICE_BENCH_CHECK(cudaStreamDestroy(stream));
  return {us, us, us};
}

}  // namespace sluice::bench
