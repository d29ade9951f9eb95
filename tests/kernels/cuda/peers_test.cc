// Collectives among GPUs that reach one another's memory. The ranks are streams of one GPU, whose
// kernels run at one time, and the areas of all ranks lie in its memory.
#include "kernels/cuda/ranks/peers.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/peer_params.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

constexpr int64_t kMostBytes = 120'000;
constexpr auto kMostTime = std::chrono::seconds(60);

// The ranks of a group, each with a stream. What they enqueue has to be enqueued operation by
// operation, since a stream takes only so many launches while its first one waits.
class Ranks {
 public:
  explicit Ranks(int size) : size_(size), stop_(1) {
    stop_[0] = 0;
    const int64_t slot = PeerSlotBytes(kMostBytes);
    const auto bytes = static_cast<size_t>(PeerAreaBytes(size, slot));
    for (int rank = 0; rank < size; ++rank) {
      void* area = nullptr;
      REQUIRE(cudaMalloc(&area, bytes) == cudaSuccess);
      REQUIRE(cudaMemset(area, 0, bytes) == cudaSuccess);
      areas_.push_back(area);
      streams_.emplace_back();
      REQUIRE(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking) == cudaSuccess);
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  ~Ranks() {
    Stop();
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    for (void* area : areas_) cudaFree(area);
  }
  Ranks(const Ranks&) = delete;

  int size() const { return size_; }
  cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)]; }
  PeerGroup Of(int rank) const {
    PeerGroup group{};
    std::copy(areas_.begin(), areas_.end(), group.areas);
    group.stop = stop_.data();
    group.slot_bytes = PeerSlotBytes(kMostBytes);
    group.rank = rank;
    group.size = size_;
    return group;
  }
  void Stop() { std::atomic_ref<uint32_t>(stop_[0]).store(1); }

  // Makes the ranks' next operation that of number + 1.
  void SetNumber(uint32_t number) {
    for (void* area : areas_) {
      REQUIRE(cudaMemcpy(&static_cast<PeerWords*>(area)->operations, &number, sizeof(number),
                         cudaMemcpyHostToDevice) == cudaSuccess);
    }
  }

  // Waits for all streams. Ends what does not end by itself, and fails the test then.
  void Await() {
    const auto give_up = std::chrono::steady_clock::now() + kMostTime;
    for (cudaStream_t stream : streams_) {
      cudaError_t error = cudaErrorNotReady;
      while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (std::chrono::steady_clock::now() < give_up) continue;
        Stop();
        cudaDeviceSynchronize();
        FAIL("an operation did not end");
      }
      REQUIRE(error == cudaSuccess);
    }
  }

 private:
  const int size_;
  Guarded<uint32_t> stop_;
  std::vector<void*> areas_;
  std::vector<cudaStream_t> streams_;
};

// Different ranks may take different numbers of blocks. All of them have to run at one time.
int32_t SomeBlocks(Random& random) { return std::array<int32_t, 4>{1, 3, 17, 60}[random() % 4]; }

template <typename T>
constexpr DType kTypeOf = std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16;
float Widened(float v) { return v; }
float Widened(uint16_t v) { return Bf16ToFloat(v); }
void Round(float sum, float* out) { *out = sum; }
void Round(float sum, uint16_t* out) { *out = FloatToBf16(sum); }

// Returns the sum in float32, rank 0 first, rounded once.
template <typename T>
std::vector<T> SumOf(const std::vector<Guarded<T>>& parts) {
  std::vector<T> sums(static_cast<size_t>(parts[0].size()));
  for (int64_t i = 0; i < parts[0].size(); ++i) {
    float sum = Widened(parts[0][i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) sum += Widened(parts[rank][i]);
    Round(sum, &sums[static_cast<size_t>(i)]);
  }
  return sums;
}

// Returns the stages in which the ranks sum so many bytes: at random, where two are possible.
int SomeStages(const Ranks& ranks, int64_t bytes, Random& random) {
  const bool both = bytes >= LeastStagedPacks(ranks.size()) * kPackDataBytes;
  return both ? 1 + static_cast<int>(random() % 2) : 1;
}

template <typename T>
void CheckSums(Ranks& ranks, int64_t count, bool in_place, Random& random) {
  const int stages = SomeStages(ranks, count * static_cast<int64_t>(sizeof(T)), random);
  INFO(ranks.size() << " ranks, " << count << " elements of " << sizeof(T) << " bytes, " << stages
                    << " stages");
  std::vector<Guarded<T>> in, out;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    in.push_back(NormalBuffer<T>(count, random));
    out.emplace_back(count);
  }
  const std::vector<T> want = SumOf(in);
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    T* const to = in_place ? in[r].data() : out[r].data();
    const PeerAllReduceParams p{ranks.Of(rank), in[r].data(),       to,    count,
                                kTypeOf<T>,     SomeBlocks(random), stages};
    REQUIRE(cuda::LaunchPeerAllReduce(p, ranks.stream(rank)) == cudaSuccess);
  }
  ranks.Await();
  for (size_t r = 0; r < in.size(); ++r) {
    CHECK(in[r].Damage() + out[r].Damage() == "");
    CHECK(BitDifference((in_place ? in[r] : out[r]).span(), std::span<const T>(want), count) == "");
  }
}

TEST_CASE("sums over GPUs' memory have the bits of sums in the order of ranks", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  for (const int size : {2, 3, 4, 6}) {
    Ranks ranks(size);
    for (const int64_t count : {1, 2, 3, 4, 7, 768, 1000, 4096, 4099, 30'000}) {
      for (const bool in_place : {false, true}) {
        for (int i = 0; i < 3; ++i) {  // of one stage or two
          CheckSums<float>(ranks, count, in_place, random);
          CheckSums<uint16_t>(ranks, count, in_place, random);
        }
      }
    }
  }
}

TEST_CASE("numbers of operations among GPUs wrap", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  Ranks ranks(3);
  ranks.SetNumber(0xFFFFFFF8u);
  for (int i = 0; i < 20; ++i) CheckSums<float>(ranks, 1 + i * 500, true, random);
}

void CheckGather(Ranks& ranks, int64_t bytes, int64_t offset, bool in_place, Random& random) {
  INFO(ranks.size() << " ranks, " << bytes << " bytes at " << offset);
  std::vector<Guarded<uint8_t>> in, out;
  Guarded<uint8_t> want(ranks.size() * bytes);
  for (uint8_t& byte : want) byte = static_cast<uint8_t>(random());
  for (int rank = 0; rank < ranks.size(); ++rank) {
    in.emplace_back(bytes + offset);
    out.emplace_back(ranks.size() * bytes + offset);
    uint8_t* const own =
        in_place ? out.back().data() + offset + rank * bytes : in.back().data() + offset;
    std::copy_n(want.data() + rank * bytes, bytes, own);
    const PeerAllGatherParams p{ranks.Of(rank), own, out.back().data() + offset, bytes,
                                SomeBlocks(random)};
    REQUIRE(cuda::LaunchPeerAllGather(p, ranks.stream(rank)) == cudaSuccess);
  }
  ranks.Await();
  for (Guarded<uint8_t>& all : out) {
    CHECK(all.Damage() == "");
    CHECK(BitDifference(all.span().subspan(static_cast<size_t>(offset)),
                        std::span<const uint8_t>(want.span()), bytes) == "");
  }
}

TEST_CASE("all-gathers over GPUs' memory give every byte", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  for (const int size : {2, 4}) {
    Ranks ranks(size);
    for (const int64_t bytes : {1, 4, 11, 12, 13, 4096, 5000, 119'999, 120'000}) {
      for (const int64_t offset : {0, 1, 4}) {
        for (const bool in_place : {false, true}) {
          CheckGather(ranks, bytes, offset, in_place, random);
        }
      }
    }
  }
}

// The memory of one rank for exchanges.
struct Exchange {
  Exchange(int size, int64_t block)
      : send(size * block), receive(size * block), send_counts(size), receive_counts(size) {}
  Guarded<uint8_t> send, receive;
  Guarded<int32_t> send_counts, receive_counts;
};

void CheckExchange(Ranks& ranks, int32_t capacity, int32_t unit, Random& random) {
  INFO(ranks.size() << " ranks, " << capacity << " units of " << unit << " bytes");
  const int size = ranks.size();
  const int64_t block = int64_t{capacity} * unit;
  std::vector<Exchange> each;
  for (int rank = 0; rank < size; ++rank) {
    Exchange& own = each.emplace_back(size, block);
    for (uint8_t& byte : own.send) byte = static_cast<uint8_t>(random());
    for (int32_t& count : own.send_counts) {
      const auto any = static_cast<int32_t>(random() % static_cast<uint64_t>(capacity + 1));
      count = std::array<int32_t, 3>{0, capacity, any}[random() % 3];
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    Exchange& own = each[static_cast<size_t>(rank)];
    PeerAllToAllParams p{};
    p.group = ranks.Of(rank);
    p.send = own.send.data();
    p.send_counts = own.send_counts.data();
    for (int to = 0; to < size; ++to) p.receives[to] = each[static_cast<size_t>(to)].receive.data();
    p.receive_counts = own.receive_counts.data();
    p.capacity = capacity;
    p.unit_bytes = unit;
    REQUIRE(cuda::LaunchPeerAllToAll(p, ranks.stream(rank)) == cudaSuccess);
  }
  ranks.Await();
  for (int to = 0; to < size; ++to) {
    const Exchange& own = each[static_cast<size_t>(to)];
    CHECK(own.receive.Damage() + own.receive_counts.Damage() == "");
    for (int from = 0; from < size; ++from) {
      const Exchange& other = each[static_cast<size_t>(from)];
      const int32_t count = other.send_counts[to];
      INFO("from rank " << from << " to rank " << to);
      CHECK(own.receive_counts[from] == count);
      const auto bytes = static_cast<size_t>(int64_t{count} * unit);
      CHECK(BitDifference(own.receive.span().subspan(static_cast<size_t>(from * block), bytes),
                          other.send.span().subspan(static_cast<size_t>(to * block), bytes),
                          unit) == "");
    }
  }
}

TEST_CASE("exchanges over GPUs' memory move as many units as the device's counts say",
          "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  for (const int size : {2, 3, 4}) {
    Ranks ranks(size);
    for (const auto& [capacity, unit] :
         {std::pair{1, 16}, {4, 12}, {8, 14'400}, {76, 14'400}, {76, 28'672}, {1000, 48}}) {
      CheckExchange(ranks, capacity, unit, random);
    }
  }
}

// Each rank records sums of two sizes and a gather, over data that the sums change in every run.
TEST_CASE("recorded collectives over GPUs' memory run again and again", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  constexpr int64_t kCount = 5'001, kFew = 700;
  constexpr int kRuns = 24;  // 4^48 times 1e-6 is a float
  for (const int size : {2, 4}) {
    Ranks ranks(size);
    CheckSums<float>(ranks, 1, true, random);  // loads the kernels
    CheckGather(ranks, 4, 0, false, random);
    std::vector<Guarded<float>> x, gathered;
    std::vector<cudaGraphExec_t> programs;
    for (int rank = 0; rank < size; ++rank) {
      x.push_back(NormalBuffer<float>(kCount, random, 1e-6f));
      gathered.emplace_back(size * kFew);
      const cudaStream_t stream = ranks.stream(rank);
      REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      float* const own = x.back().data();
      const PeerAllReduceParams all{ranks.Of(rank), own, own, kCount, DType::kFloat32, 16};
      PeerAllReduceParams few = all;
      few.count = kFew;
      const PeerAllGatherParams gather{ranks.Of(rank), own, gathered.back().data(), kFew * 4, 16};
      REQUIRE(cuda::LaunchPeerAllReduce(all, stream) == cudaSuccess);
      REQUIRE(cuda::LaunchPeerAllReduce(few, stream) == cudaSuccess);
      REQUIRE(cuda::LaunchPeerAllGather(gather, stream) == cudaSuccess);
      cudaGraph_t graph = nullptr;
      REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
      REQUIRE(cudaGraphInstantiate(&programs.emplace_back(), graph, 0) == cudaSuccess);
      REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
      REQUIRE(cudaGraphUpload(programs.back(), stream) == cudaSuccess);
    }
    ranks.Await();
    std::vector<float> want = SumOf(x);
    for (int run = 0; run < kRuns; ++run) {
      for (int rank = 0; rank < size; ++rank) {
        REQUIRE(cudaGraphLaunch(programs[static_cast<size_t>(rank)], ranks.stream(rank)) ==
                cudaSuccess);
      }
      // All ranks have the same, which is added to itself.
      for (int64_t i = 0; i < kCount; ++i) {
        for (int time = 0; time < (run > 0) + (i < kFew); ++time) {
          const float one = want[static_cast<size_t>(i)];
          for (int rank = 1; rank < size; ++rank) want[static_cast<size_t>(i)] += one;
        }
      }
      if (run % 8 == 7) ranks.Await();  // else the runs follow each other at once
    }
    ranks.Await();
    for (int rank = 0; rank < size; ++rank) {
      const auto r = static_cast<size_t>(rank);
      CHECK(x[r].Damage() + gathered[r].Damage() == "");
      CHECK(BitDifference(x[r].span(), std::span<const float>(want), kCount) == "");
      for (int from = 0; from < size; ++from) {
        CHECK(BitDifference(gathered[r].span().subspan(static_cast<size_t>(from * kFew), kFew),
                            std::span<const float>(want).subspan(0, kFew), kFew) == "");
      }
      REQUIRE(cudaGraphExecDestroy(programs[r]) == cudaSuccess);
    }
  }
}

TEST_CASE("collectives that wait for a rank in vain end when they are stopped", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  for (const int which : {0, 1, 2}) {
    Ranks ranks(2);
    Guarded<float> in(1000), out(2000);
    Guarded<int32_t> counts(2), received(2);
    counts[0] = counts[1] = 10;
    const auto launch = [&] {
      if (which == 0) {
        return cuda::LaunchPeerAllReduce(
            {ranks.Of(0), in.data(), out.data(), 1000, DType::kFloat32, 0}, ranks.stream(0));
      }
      if (which == 1) {
        return cuda::LaunchPeerAllGather({ranks.Of(0), in.data(), out.data(), 4000, 0},
                                         ranks.stream(0));
      }
      PeerAllToAllParams p{};
      p.group = ranks.Of(0);
      p.send = in.data();
      p.send_counts = counts.data();
      p.receives[0] = p.receives[1] = out.data();
      p.receive_counts = received.data();
      p.capacity = 10;
      p.unit_bytes = 16;
      return cuda::LaunchPeerAllToAll(p, ranks.stream(0));
    };
    REQUIRE(launch() == cudaSuccess);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(cudaStreamQuery(ranks.stream(0)) == cudaErrorNotReady);
    ranks.Stop();
    ranks.Await();
    std::fill(in.begin(), in.end(), 1.0f);
    std::fill(out.begin(), out.end(), 2.0f);
    REQUIRE(launch() == cudaSuccess);  // a later one does nothing
    ranks.Await();
    CHECK(std::all_of(out.begin(), out.end(), [](float v) { return v == 2.0f; }));
  }
}

TEST_CASE("collectives over GPUs' memory of a wrong shape are refused", "[kernels][cuda]") {
  uint32_t stop = 0;
  PeerGroup group{};
  group.stop = &stop;
  group.slot_bytes = PeerSlotBytes(120);
  group.size = 2;
  alignas(16) float data[64] = {};
  const auto sum = [&](const PeerGroup& g, int64_t count, DType type) {
    return cuda::LaunchPeerAllReduce({g, data, data, count, type, 0}, nullptr);
  };
  CHECK(sum(group, 49, DType::kFloat32) == cudaErrorInvalidValue);  // a slot takes 16 packs
  CHECK(sum(group, 3, DType::kFloat8E4M3) == cudaErrorInvalidValue);
  CHECK(sum(group, 0, DType::kFloat32) == cudaSuccess);
  for (const int size : {1, kMaxPeerRanks + 1}) {
    PeerGroup other = group;
    other.size = size;
    CHECK(sum(other, 3, DType::kFloat32) == cudaErrorInvalidValue);
  }
  CHECK(cuda::LaunchPeerAllGather({group, data, data, 1000, 0}, nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::LaunchPeerAllGather({group, data, data, 0, 0}, nullptr) == cudaSuccess);
  PeerAllToAllParams p{};
  p.group = group;
  p.send = p.receives[0] = p.receives[1] = data;
  p.capacity = 3;
  p.unit_bytes = 12;  // a block is no multiple of 16 bytes
  CHECK(cuda::LaunchPeerAllToAll(p, nullptr) == cudaErrorInvalidValue);
  p.capacity = 4;
  p.send = data + 1;
  CHECK(cuda::LaunchPeerAllToAll(p, nullptr) == cudaErrorInvalidValue);
}

}  // namespace
}  // namespace sluice::kernels
