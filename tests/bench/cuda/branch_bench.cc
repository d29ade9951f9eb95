// Measures the cost of branches to the stream that they leave and rejoin, inside a recorded
// program: the time of a layer of small kernels, with forks and joins and without, and the kinds
// of edges that the recording has.
//
//   sluice-branch-bench
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_device.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/device_health.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"
#include "src/device/mailbox_team.h"

namespace sluice {
namespace {

constexpr int kLayers = 40;
constexpr int kKernels = 50;  // kernels of a layer
constexpr int kRuns = 200;
constexpr int kRows = 10, kDim = 5120;

class Bench {
 public:
  explicit Bench(Device& device) : device_(device) {
    for (Buffer* buffer : {&x_, &weight_, &out_, &side_}) {
      auto memory = device.Allocate(MemoryKind::kDevice, size_t{kRows} * kDim * 4, "a benchmark");
      SLUICE_CHECK(memory.ok());
      *buffer = *std::move(memory);
    }
    auto mailbox = device.NewMailbox({.channels = kLayers, .workers = 2, .slots = 8});
    SLUICE_CHECK(mailbox.ok(), mailbox.status().message());
    mailbox_ = *std::move(mailbox);
    team_ =
        std::make_unique<MailboxTeam>(mailbox_.get(), [](int, int) { return absl::OkStatus(); });
  }

  void Norm(Stream& stream, const Buffer& out) {
    kernels::RmsNormParams norm{};
    norm.x = x_.as<float>();
    norm.weight = weight_.as<float>();
    norm.out = out.data();
    norm.x_stride = norm.dim = kDim;
    norm.rows = kRows;
    norm.epsilon = 1e-6f;
    norm.out_type = kernels::DType::kBFloat16;
    device_.kernels().RmsNorm(stream, norm);
  }
  void Main(Stream& stream, int kernels) {
    for (int i = 0; i < kernels; ++i) Norm(stream, out_);
  }
  void Side(Stream& stream, int kernels) {
    for (int i = 0; i < kernels; ++i) Norm(stream, side_);
  }

  // Measures `layer(stream, i)`, which enqueues kKernels kernels on the stream itself.
  double Measure(const char* what, const std::function<void(Stream&, int)>& layer) {
    const auto stream = device_.NewStream(Device::StreamKind::kCompute);
    auto program = device_.Record(*stream, [&](Stream& s) {
      for (int i = 0; i < kLayers; ++i) layer(s, i);
      for (int i = 0; i < Stream::kBranches; ++i) s.After(s.Branch(i));
    });
    SLUICE_CHECK(program.ok(), program.status().message());
    const auto start = device_.NewTimedEvent(), stop = device_.NewTimedEvent();
    std::vector<double> us;
    for (int run = 0; run < kRuns; ++run) {
      stream->Record(*start);
      (*program)->Run(*stream);
      stream->Record(*stop);
      stop->Wait();
      if (run >= kRuns / 10) {
        us.push_back(absl::ToDoubleMicroseconds(stop->Since(*start)) / kLayers);
      }
    }
    std::sort(us.begin(), us.end());
    SLUICE_CHECK(device_.Health().ok() && mailbox_->error(0) == MailboxError::kNone);
    const double median = us[us.size() / 2];
    if (plain_ == 0) plain_ = median;
    std::printf("%6.2f us a layer (%.2f-%.2f), %+5.2f: %s\n", median, us.front(), us.back(),
                median - plain_, what);
    return median;
  }

  Mailbox& mailbox() { return *mailbox_; }

 private:
  Device& device_;
  Buffer x_, weight_, out_, side_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<MailboxTeam> team_;
  double plain_ = 0;
};

// Lists the kinds of edges that a layer with branches is recorded as.
void ListEdges(Device& device, Bench& bench) {
  DeviceHealth health;
  CudaStream stream(&health, Device::StreamKind::kCompute);
  const auto graph = stream.Capture([&](Stream& s) {
    bench.Main(s, 2);
    s.Branch(0).After(s);
    bench.Side(s.Branch(0), 2);
    bench.Main(s, 2);
    s.After(s.Branch(0));
    bench.Main(s, 2);
    s.Branch(1).After(s);
    bench.mailbox().Raise(s.Branch(1), 0);
    bench.mailbox().Await(s.Branch(1), 0);
    bench.Side(s.Branch(1), 2);
    s.After(s.Branch(1));
    bench.Main(s, 2);
  });
  SLUICE_CHECK(graph.ok() && device.Health().ok());
  size_t count = 0;
  SLUICE_CHECK(cudaGraphGetEdges(*graph, nullptr, nullptr, nullptr, &count) == cudaSuccess);
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> data(count);
  SLUICE_CHECK(cudaGraphGetEdges(*graph, from.data(), to.data(), data.data(), &count) ==
               cudaSuccess);
  std::map<cudaGraphNode_t, size_t> number;
  std::vector<cudaGraphNode_t> nodes(64);
  size_t node_count = nodes.size();
  SLUICE_CHECK(cudaGraphGetNodes(*graph, nodes.data(), &node_count) == cudaSuccess);
  for (size_t i = 0; i < node_count; ++i) number[nodes[i]] = i;
  for (size_t i = 0; i < count; ++i) {
    cudaGraphNodeType a{}, b{};
    cudaGraphNodeGetType(from[i], &a);
    cudaGraphNodeGetType(to[i], &b);
    std::printf("  node %zu (type %d) -> node %zu (type %d): %s, port %d\n", number[from[i]], a,
                number[to[i]], b,
                data[i].type == cudaGraphDependencyTypeProgrammatic ? "programmatic" : "full",
                data[i].from_port);
  }
  cudaGraphDestroy(*graph);
}

int Run() {
  const auto device = NewCudaDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  Bench bench(**device);
  std::printf("%d layers of %d RMSNorms of %d x %d, medians of %d runs\n", kLayers, kKernels, kRows,
              kDim, kRuns);
  bench.Measure("nothing beside it", [&](Stream& s, int) { bench.Main(s, kKernels); });
  bench.Measure("a fork, joined at the end alone", [&](Stream& s, int) {
    bench.Main(s, 2);
    s.Branch(0).After(s);
    bench.Side(s.Branch(0), 1);
    bench.Main(s, kKernels - 2);
  });
  bench.Measure("a fork of 3, a join 6 kernels later", [&](Stream& s, int) {
    bench.Main(s, 2);
    s.Branch(0).After(s);
    bench.Side(s.Branch(0), 3);
    bench.Main(s, 6);
    s.After(s.Branch(0));
    bench.Main(s, kKernels - 8);
  });
  const auto fork_two = [&](Stream& s) {
    bench.Main(s, 2);
    s.Branch(0).After(s);
    s.Branch(1).After(s);
    bench.Side(s.Branch(0), 2);
    bench.Side(s.Branch(1), 3);
  };
  bench.Measure("the same with two branches and joins", [&](Stream& s, int) {
    fork_two(s);
    bench.Main(s, 4);
    s.After(s.Branch(0));
    bench.Main(s, 2);
    s.After(s.Branch(1));
    bench.Main(s, kKernels - 8);
  });
  bench.Measure("two forks, one join of both", [&](Stream& s, int) {
    fork_two(s);
    bench.Main(s, 6);
    s.After(s.Branch(0));
    s.After(s.Branch(1));
    bench.Main(s, kKernels - 8);
  });
  bench.Measure("a mailbox's round trip on the stream itself", [&](Stream& s, int layer) {
    bench.Main(s, 4);
    bench.mailbox().Raise(s, layer);
    bench.mailbox().Await(s, layer);
    bench.Main(s, kKernels - 4);
  });
  bench.Measure("raised and awaited on a branch, joined 26 kernels later",
                [&](Stream& s, int layer) {
                  bench.Main(s, 2);
                  s.Branch(0).After(s);
                  bench.mailbox().Raise(s.Branch(0), layer);
                  bench.mailbox().Await(s.Branch(0), layer);
                  bench.Side(s.Branch(0), 1);
                  bench.Main(s, 26);
                  s.After(s.Branch(0));
                  bench.Main(s, kKernels - 28);
                });
  bench.Measure("raised on one branch, awaited on another, joined a layer later",
                [&](Stream& s, int layer) {
                  Stream &ahead = s.Branch(0), &answer = s.Branch(1 + layer % 2);
                  bench.Main(s, 1);
                  if (layer > 0) s.After(s.Branch(1 + (layer - 1) % 2));
                  bench.Main(s, 1);
                  ahead.After(s);
                  bench.Side(ahead, 4);
                  bench.mailbox().Raise(ahead, layer);
                  answer.After(ahead);
                  bench.mailbox().Await(answer, layer);
                  bench.Side(answer, 1);
                  bench.Main(s, kKernels - 2);
                });
  ListEdges(**device, bench);
  return 0;
}

}  // namespace
}  // namespace sluice

int main() { return sluice::Run(); }
