// sluice-metrics-bench measures the cost of metrics in a decode step.
//
// An engine runs batches of the same requests; the step's time is the median over all of its runs.
// Beside it, the metric updates of one step and its marks on the stream are each timed in a loop of
// their own: a busy machine hardly disturbs those figures.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/kernel_set.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"

namespace sluice {
namespace {

constexpr char kHelp[] =
    R"(sluice-metrics-bench measures the cost of metrics in a decode step.

  --model DIR        Hugging Face directory
  --batch N          sequences (default 8)
  --context N        tokens of each prompt (default 64)
  --runs N           runs of the batch (default 20)
  --steps N          decode steps of a run (default 50)
  --help             this text

Example: sluice-metrics-bench --model models/smollm2-135m-instruct
)";

struct Options {
  std::string model;
  int batch = 8, context = 64, runs = 20, steps = 50;
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "sluice-metrics-bench: %s (see --help)\n", message.c_str());
  std::exit(2);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(std::string(value.status().message()));
  return *std::move(value);
}

Options Parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (i + 1 >= argc) Fail(flag + " needs a value");
    const std::string value = argv[++i];
    int* const number = flag == "--batch"     ? &o.batch
                        : flag == "--context" ? &o.context
                        : flag == "--runs"    ? &o.runs
                        : flag == "--steps"   ? &o.steps
                                              : nullptr;
    if (flag == "--model") {
      o.model = value;
    } else if (number == nullptr) {
      Fail("unknown flag " + flag);
    } else if (!absl::SimpleAtoi(value, number) || *number < 1) {
      Fail(absl::StrCat(flag, ": '", value, "' is not a positive number"));
    }
  }
  if (o.model.empty()) Fail("--model is missing");
  return o;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// An engine, its pools and its policy.
class Node {
 public:
  Node(const Options& o, Device* device, Model* model, Metrics* metrics)
      : options_(o), vocab_(model->config().vocab_size) {
    const int64_t tokens = int64_t{o.batch} * model->max_context();
    const CacheLayout& layout = model->cache_layout();
    const auto bytes = static_cast<size_t>(layout.BytesFor(tokens) + (int64_t{8} << 20));
    hbm_ = OrFail(PagePool::Create("hbm", layout,
                                   OrFail(device->Allocate(MemoryKind::kDevice, bytes, "hbm"))));
    dram_ = OrFail(PagePool::Create(
        "dram", layout, OrFail(device->Allocate(MemoryKind::kPinned, size_t{8} << 20, "dram"))));
    policy_ = OrFail(NewFullPolicy(PolicyOver(device, hbm_.get(), o.batch, model->max_context())));
    transfers_ = std::make_unique<TransferTable>(TransferTable::Options{}, dram_.get(), hbm_.get(),
                                                 RealClock());
    Engine::Options engine;
    engine.max_sequences = static_cast<uint32_t>(o.batch);
    engine.max_context = static_cast<uint32_t>(model->max_context());
    engine.local_prefill = LocalPrefill::kAlways;
    engine.seed = 1;
    Engine::Parts parts;
    parts.device = device;
    parts.model = model;
    parts.policy = policy_.get();
    parts.transfers = transfers_.get();
    parts.metrics = metrics;
    parts.clock = RealClock();
    engine_ = OrFail(Engine::Create(engine, parts));
  }

  // Runs one batch to its end and returns the seconds of its decode steps.
  std::vector<double> Run() {
    const uint64_t first = engine_->times().steps;
    for (int i = 0; i < options_.batch; ++i) {
      Request request;
      request.request_id = absl::StrCat("r", i);
      for (int t = 0; t < options_.context; ++t) {
        request.prompt.push_back((7 * i + 13 * t + 1) % vocab_);
      }
      request.sampling.temperature = 0;
      request.sampling.max_tokens = static_cast<uint32_t>(options_.steps);
      request.sampling.ignore_eos = true;
      request.sink = std::make_shared<TokenStream>(static_cast<size_t>(options_.steps) + 1);
      OrFail(engine_->Submit(std::move(request)));
    }
    std::vector<double> seconds;
    absl::Time last;
    for (uint64_t seen = first;;) {
      const Engine::Next next = engine_->Turn();
      if (const uint64_t steps = engine_->times().steps; steps > seen) {
        const absl::Time now = absl::Now();
        // Leaves out the prompt's steps and those around the ends.
        const uint64_t step = steps - first;
        if (step > 5 && step + 5 < static_cast<uint64_t>(options_.steps)) {
          seconds.push_back(absl::ToDoubleSeconds(now - last));
        }
        last = now;
        seen = steps;
      }
      if (next.kind == Engine::Next::Kind::kEvent) next.event->Wait();
      if (next.kind == Engine::Next::Kind::kInbox) return seconds;
    }
  }

 private:
  const Options options_;
  const int vocab_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<FullPolicy> policy_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
};

// Returns the seconds of one call out of `calls`: the best of 20 loops, which nothing interrupted.
template <typename F>
double BestSeconds(int calls, F loop) {
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    const absl::Time start = absl::Now();
    loop(calls);
    best = std::min(best, absl::ToDoubleSeconds(absl::Now() - start) / calls);
  }
  return best;
}

// Makes the metric updates of `steps` steps of `batch` sequences.
void Update(const Metrics& metrics, int batch, int steps) {
  for (int step = 0; step < steps; ++step) {
    metrics.SetRunning(batch);
    metrics.waiting.Set(0);
    metrics.step_sequences.Observe(batch);
    for (size_t phase = 0; phase < kStepPhases; ++phase) {
      metrics.step_seconds(static_cast<StepPhase>(phase)).Observe(0.01 + 1e-7 * step);
    }
    for (int sequence = 0; sequence < batch; ++sequence) {
      metrics.inter_token_latency.Observe(0.01 + 1e-7 * step);
      metrics.tokens(TokenKind::kOutput).Add();
    }
  }
}

// Returns the seconds that the four marks of a timed step take, host and stream together.
double MarkSeconds(Device& device) {
  const std::unique_ptr<Stream> stream = device.NewStream(Device::StreamKind::kCompute);
  std::vector<std::unique_ptr<TimedEvent>> marks;
  for (int i = 0; i < 4; ++i) marks.push_back(device.NewTimedEvent());
  return BestSeconds(1000, [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      for (const auto& mark : marks) stream->Record(*mark);
    }
    marks.back()->Wait();
  });
}

int Main(int argc, char** argv) {
  const Options o = Parse(argc, argv);
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice({}));
  Model::Options load;
  load.directory = o.model;
  load.max_context = o.context + o.steps + 8;
  load.max_rows = o.batch + 512;
  load.max_logits = o.batch;
  const std::unique_ptr<Model> model = OrFail(Model::Load(load, device.get()));
  Metrics metrics;
  Node node(o, device.get(), model.get(), &metrics);
  node.Run();  // Warms caches and pages.
  std::vector<double> seconds;
  for (int run = 0; run < o.runs; ++run) {
    const std::vector<double> steps = node.Run();
    seconds.insert(seconds.end(), steps.begin(), steps.end());
  }
  const double step = Median(std::move(seconds));
  const double updates = BestSeconds(1000, [&](int steps) { Update(metrics, o.batch, steps); });
  const double marks = MarkSeconds(*device);
  std::printf("%s, %s kernels, batch %d, context %d, %d runs of %d steps each\n",
              model->config().name.c_str(), device->kernels().name().c_str(), o.batch, o.context,
              o.runs, o.steps);
  std::printf(
      "step %.3f ms; its metric updates %.2f us, its marks on the stream %.2f us: %.3f %%\n",
      step * 1e3, updates * 1e6, marks * 1e6, (updates + marks) / step * 100);
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
