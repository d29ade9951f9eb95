// Counts the streams that wait because other streams do. CUDA divides the streams of a process
// among CUDA_DEVICE_MAX_CONNECTIONS queues, 8 by default and 32 at most, and work at the head of a
// queue that waits holds up all behind it.
//
// The streams that wait are those of links whose other nodes send nothing (nccl_peer_link.cc): one
// of each link has four kernels that spin, and two more have work behind each of them. The others
// are a decode step's: 12 streams, of which one launches a recorded program with three branches.
//
//   sluice-queues-bench
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/bench/cuda/stream_timing.h"

namespace sluice::bench {
namespace {

constexpr int kStreams = 12, kBranches = 3, kMessages = 4;
constexpr int kStartMicroseconds = 20'000, kWaitMicroseconds = 200'000;

__global__ void Spin(const volatile int* go) {
  while (*go == 0) __nanosleep(1000);
}
__global__ void Work(int* count) { atomicAdd(count, 1); }

cudaStream_t NewStream(int priority) {
  cudaStream_t stream;
  SLUICE_BENCH_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}
cudaEvent_t NewEvent() {
  cudaEvent_t event;
  SLUICE_BENCH_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

class Bench {
 public:
  Bench() {
    SLUICE_BENCH_CHECK(cudaMalloc(&count_, sizeof(int)));
    SLUICE_BENCH_CHECK(cudaHostAlloc(&pinned_, sizeof(int), cudaHostAllocDefault));
    SLUICE_BENCH_CHECK(cudaHostAlloc(&go_, sizeof(int), cudaHostAllocDefault));
    SLUICE_BENCH_CHECK(cudaDeviceGetStreamPriorityRange(&least_, &greatest_));
    for (int i = 0; i < kStreams; ++i) step_.push_back(NewStream(least_));
    Record();
    // Both kernels are loaded now: loading waits for the GPU.
    *go_ = 1;
    Spin<<<1, 1, 0, step_[0]>>>(go_);
    LaunchStep();
    SLUICE_BENCH_CHECK(cudaDeviceSynchronize());
  }

  // Returns how many of the step's streams are held up while `links` links wait.
  int HeldUp(size_t links) {
    for (size_t i = 0; i < links; ++i) messages_.push_back(NewStream(least_));
    for (size_t i = 0; i < 2 * links; ++i) behind_.push_back(NewStream(greatest_));
    *go_ = 0;
    for (size_t link = 0; link < links; ++link) {
      for (int i = 0; i < kMessages; ++i) {
        Spin<<<1, 1, 0, messages_[link]>>>(go_);
        const cudaEvent_t arrived = NewEvent();
        SLUICE_BENCH_CHECK(cudaEventRecord(arrived, messages_[link]));
        for (size_t stream : {2 * link, 2 * link + 1}) {
          SLUICE_BENCH_CHECK(cudaStreamWaitEvent(behind_[stream], arrived));
          WorkAndCopy(behind_[stream]);
        }
        SLUICE_BENCH_CHECK(cudaEventDestroy(arrived));
      }
    }
    usleep(kStartMicroseconds);
    LaunchStep();
    usleep(kWaitMicroseconds);
    int held_up = 0;
    for (const cudaStream_t stream : step_) held_up += cudaStreamQuery(stream) != cudaSuccess;
    *go_ = 1;
    SLUICE_BENCH_CHECK(cudaDeviceSynchronize());
    return held_up;
  }

 private:
  void WorkAndCopy(cudaStream_t stream) {
    Work<<<1, 1, 0, stream>>>(count_);
    SLUICE_BENCH_CHECK(
        cudaMemcpyAsync(pinned_, count_, sizeof(int), cudaMemcpyDeviceToHost, stream));
  }
  void LaunchStep() {
    SLUICE_BENCH_CHECK(cudaGraphLaunch(program_, step_[0]));
    for (size_t i = 1; i < step_.size(); ++i) WorkAndCopy(step_[i]);
  }
  void Record() {
    cudaGraph_t graph;
    SLUICE_BENCH_CHECK(cudaStreamBeginCapture(step_[0], cudaStreamCaptureModeThreadLocal));
    Work<<<1, 1, 0, step_[0]>>>(count_);
    const cudaEvent_t fork = NewEvent();
    SLUICE_BENCH_CHECK(cudaEventRecord(fork, step_[0]));
    for (size_t branch = 1; branch <= kBranches; ++branch) {
      SLUICE_BENCH_CHECK(cudaStreamWaitEvent(step_[branch], fork));
      Work<<<1, 1, 0, step_[branch]>>>(count_);
      const cudaEvent_t join = NewEvent();
      SLUICE_BENCH_CHECK(cudaEventRecord(join, step_[branch]));
      SLUICE_BENCH_CHECK(cudaStreamWaitEvent(step_[0], join));
    }
    Work<<<1, 1, 0, step_[0]>>>(count_);
    SLUICE_BENCH_CHECK(cudaStreamEndCapture(step_[0], &graph));
    SLUICE_BENCH_CHECK(cudaGraphInstantiate(&program_, graph, 0));
  }

  int* count_ = nullptr;   // in HBM
  int* pinned_ = nullptr;  // takes copies
  int* go_ = nullptr;      // ends Spin
  int least_ = 0, greatest_ = 0;
  cudaGraphExec_t program_ = nullptr;
  std::vector<cudaStream_t> step_, messages_, behind_;
};

int Main() {
  for (const char* queues : {"8", "32"}) {
    for (const int links : {1, 2, 4, 8, 16}) {
      // A process reads the setting when it first uses CUDA.
      if (fork() != 0) {
        int status = 0;
        wait(&status);
        if (status != 0) return 1;
        continue;
      }
      setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues, 1);
      const int held_up = Bench().HeldUp(static_cast<size_t>(links));
      std::printf("%2s queues, %2d links wait: %2d of %d streams are held up\n", queues, links,
                  held_up, kStreams);
      return 0;
    }
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main() { return sluice::bench::Main(); }
