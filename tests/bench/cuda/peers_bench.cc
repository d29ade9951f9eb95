// Times the collectives of kernels/peer_params.h by themselves:
//
//   sluice-peers-bench
//
// The ranks are streams of one GPU, and the areas of all ranks lie in its memory. So this is what
// launching, numbering, writing and polling cost, without a link between GPUs: the way over NVLink
// comes on top. sluice-ranks-bench times the same operations among GPUs. A line has the
// microseconds of an operation, which is the median (the least, the most) of replays of a graph of
// so many of them in each stream as fit the GPU at one time, 64 at most: kernels of a graph begin
// early, and those of one rank must not keep out another's.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda/ranks/peers.h"
#include "kernels/peer_params.h"
#include "tests/bench/cuda/stream_timing.h"

namespace sluice::bench {
namespace {

using kernels::PeerGroup;

constexpr int kMostOperations = 64;
constexpr int64_t kMostThreads = 132 * 1024;  // half of what an H200 runs at one time
constexpr int kReplays = 30;
constexpr int64_t kMostBytes = int64_t{1} << 20;
constexpr int64_t kExchangeThreads = 32 * 512;
constexpr int kExpertRows[] = {8, 32, 76};
constexpr int kUnits[] = {7168 * 2 + 64, 7168 * 4};  // DeepSeek-V3.2's dispatch and combine

// Device memory for the life of the program, zeroed.
void* NewMemory(int64_t bytes) {
  void* data = nullptr;
  SLUICE_BENCH_CHECK(cudaMalloc(&data, static_cast<size_t>(bytes)));
  SLUICE_BENCH_CHECK(cudaMemset(data, 0, static_cast<size_t>(bytes)));
  return data;
}

class Ranks {
 public:
  explicit Ranks(int size) : size_(size), streams_(static_cast<size_t>(size)) {
    const int64_t slot = kernels::PeerSlotBytes(kMostBytes);
    for (cudaStream_t& stream : streams_) {
      SLUICE_BENCH_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      areas_.push_back(NewMemory(kernels::PeerAreaBytes(size, slot)));
    }
    void* stop = nullptr;
    SLUICE_BENCH_CHECK(cudaHostAlloc(&stop, sizeof(uint32_t), cudaHostAllocMapped));
    stop_ = static_cast<uint32_t*>(stop);
    *stop_ = 0;
  }
  int size() const { return size_; }

  PeerGroup Of(int rank) const {
    PeerGroup group{};
    for (size_t i = 0; i < areas_.size(); ++i) group.areas[i] = areas_[i];
    group.stop = stop_;
    group.slot_bytes = kernels::PeerSlotBytes(kMostBytes);
    group.rank = rank;
    group.size = size_;
    return group;
  }

  // Times one of the operations that `enqueue` puts on a rank's stream.
  // `threads`: of one.
  Timing Time(int64_t threads, const std::function<void(int, cudaStream_t)>& enqueue) {
    const auto operations =
        static_cast<int>(std::clamp<int64_t>(kMostThreads / (threads * size_), 1, kMostOperations));
    std::vector<std::unique_ptr<Graph>> graphs;
    for (int rank = 0; rank < size_; ++rank) {
      cudaStream_t stream = streams_[static_cast<size_t>(rank)];
      graphs.push_back(std::make_unique<Graph>(stream, [&] {
        for (int i = 0; i < operations; ++i) enqueue(rank, stream);
      }));
    }
    cudaEvent_t begin, end;
    SLUICE_BENCH_CHECK(cudaEventCreate(&begin));
    SLUICE_BENCH_CHECK(cudaEventCreate(&end));
    std::vector<double> us;
    for (int replay = -2; replay < kReplays; ++replay) {
      // The first graph gets all streams going; the second one is timed.
      for (int turn = 0; turn < 2; ++turn) {
        for (size_t rank = 0; rank < streams_.size(); ++rank) {
          if (turn == 1 && rank == 0) SLUICE_BENCH_CHECK(cudaEventRecord(begin, streams_[0]));
          graphs[rank]->Launch(streams_[rank]);
          if (turn == 1 && rank == 0) SLUICE_BENCH_CHECK(cudaEventRecord(end, streams_[0]));
        }
      }
      SLUICE_BENCH_CHECK(cudaDeviceSynchronize());
      float ms = 0;
      SLUICE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (replay >= 0) us.push_back(ms * 1e3 / operations);
    }
    SLUICE_BENCH_CHECK(cudaEventDestroy(begin));
    SLUICE_BENCH_CHECK(cudaEventDestroy(end));
    const Times times = Summary(us);
    return {times.median, times.low, times.high};
  }

 private:
  const int size_;
  std::vector<cudaStream_t> streams_;
  std::vector<void*> areas_;
  uint32_t* stop_ = nullptr;
};

void Print(const Ranks& ranks, const char* what, int64_t bytes, const Timing& t) {
  std::printf("%d ranks  %-10s %8.1f KiB  %7.2f us (%.2f, %.2f)\n", ranks.size(), what,
              static_cast<double>(bytes) / 1024, t.median_us, t.least_us, t.most_us);
  std::fflush(stdout);
}

void TimeSums(Ranks& ranks) {
  for (int64_t bytes = int64_t{8} << 10; bytes <= kMostBytes / (ranks.size() - 1); bytes *= 2) {
    std::vector<void*> in, out;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      in.push_back(NewMemory(bytes));
      out.push_back(NewMemory(bytes * ranks.size()));
    }
    Print(ranks, "all-reduce", bytes, ranks.Time(bytes / 12, [&](int rank, cudaStream_t stream) {
      void* const data = in[static_cast<size_t>(rank)];
      SLUICE_BENCH_CHECK(kernels::cuda::LaunchPeerAllReduce(
          {ranks.Of(rank), data, data, bytes / 4, kernels::DType::kFloat32, 0}, stream));
    }));
    Print(ranks, "all-gather", bytes, ranks.Time(bytes / 12, [&](int rank, cudaStream_t stream) {
      const auto r = static_cast<size_t>(rank);
      SLUICE_BENCH_CHECK(
          kernels::cuda::LaunchPeerAllGather({ranks.Of(rank), in[r], out[r], bytes, 0}, stream));
    }));
  }
}

// Times exchanges in which every rank sends `rows` units to every rank.
void TimeExchanges(Ranks& ranks) {
  for (const int unit : kUnits) {
    for (const int rows : kExpertRows) {
      const int64_t bytes = int64_t{rows} * unit * ranks.size();
      std::vector<void*> send, receive, counts, arrived;
      const std::vector<int32_t> all(static_cast<size_t>(ranks.size()), rows);
      for (int rank = 0; rank < ranks.size(); ++rank) {
        send.push_back(NewMemory(bytes));
        receive.push_back(NewMemory(bytes));
        counts.push_back(NewMemory(int64_t{ranks.size()} * 4));
        arrived.push_back(NewMemory(int64_t{ranks.size()} * 4));
        SLUICE_BENCH_CHECK(
            cudaMemcpy(counts.back(), all.data(), all.size() * 4, cudaMemcpyHostToDevice));
      }
      Print(ranks, "all-to-all", bytes,
            ranks.Time(kExchangeThreads, [&](int rank, cudaStream_t stream) {
              const auto r = static_cast<size_t>(rank);
              kernels::PeerAllToAllParams p{};
              p.group = ranks.Of(rank);
              p.send = send[r];
              p.send_counts = static_cast<const int32_t*>(counts[r]);
              for (size_t i = 0; i < receive.size(); ++i) p.receives[i] = receive[i];
              p.receive_counts = static_cast<int32_t*>(arrived[r]);
              p.capacity = rows;
              p.unit_bytes = unit;
              SLUICE_BENCH_CHECK(kernels::cuda::LaunchPeerAllToAll(p, stream));
            }));
    }
  }
}

int Main() {
  for (const int size : {2, 4}) {
    Ranks ranks(size);
    TimeSums(ranks);
    TimeExchanges(ranks);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main() { return sluice::bench::Main(); }
