// sluice-step-bench: decode steps of a whole model beside the floor that memory sets.
//
// Floor of a step: the weights once and every sequence's cache once, over the read bandwidth
// measured in the same run. Caches are empty pages (zeros), since a step's time does not depend on
// values; the steps are launched as the engine launches them, one ahead of the results.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/kernel_set.h"
#include "src/engine/batch_state.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "tests/bench/bench_support.h"

namespace sluice {
namespace {

constexpr char kHelp[] =
    R"(sluice-step-bench: decode steps of a whole model, measured over floor

  --model DIR        Hugging Face directory (config.json alone with --dummy)
  --dummy            weights by formula
  --kernels NAME     auto, portable, avx2, avx512bf16, amx
  --threads N        default: as the server chooses
  --contexts A,B     default 64,512,2048
  --batches A,B      default 1,8,32
  --steps N          measured steps of each figure (default 40)
  --json             one JSON object instead of the table
  --help             this text

Example: sluice-step-bench --model models/smollm2-135m-instruct --batches 1 --contexts 64,2048
)";

struct Options {
  std::string model, kernels = "auto";
  bool dummy = false, json = false;
  int threads = 0, steps = 40;
  std::vector<int> contexts = {64, 512, 2048}, batches = {1, 8, 32};
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "sluice-step-bench: %s (see --help)\n", message.c_str());
  std::exit(2);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(std::string(value.status().message()));
  return *std::move(value);
}

int Number(const std::string& text) {
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 1) Fail("'" + text + "' is not a positive number");
  return value;
}

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> values;
  for (const auto& part : absl::StrSplit(text, ',')) values.push_back(Number(std::string(part)));
  return values;
}

Options Parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) Fail(flag + " needs a value");
      return argv[++i];
    };
    if (flag == "--model") {
      o.model = value();
    } else if (flag == "--dummy") {
      o.dummy = true;
    } else if (flag == "--kernels") {
      o.kernels = value();
    } else if (flag == "--threads") {
      o.threads = Number(value());
    } else if (flag == "--steps") {
      o.steps = Number(value());
    } else if (flag == "--contexts") {
      o.contexts = Numbers(value());
    } else if (flag == "--batches") {
      o.batches = Numbers(value());
    } else if (flag == "--json") {
      o.json = true;
    } else if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    } else {
      Fail("unknown flag " + flag);
    }
  }
  if (o.model.empty()) Fail("--model is missing");
  return o;
}

struct Figure {
  int batch, context;
  double median, low, high;  // seconds per step
  double floor;
};

class Bench {
 public:
  explicit Bench(const Options& o) : options_(o) {
    device_ = OrFail(NewCpuDevice({o.kernels, o.threads}));
    max_batch_ = *std::max_element(o.batches.begin(), o.batches.end());
    max_context_ = *std::max_element(o.contexts.begin(), o.contexts.end()) + o.steps + 8;
    Model::Options model;
    model.directory = o.model;
    model.load_format = o.dummy ? "dummy" : "auto";
    model.max_context = max_context_;
    model.max_rows = max_batch_;
    model.max_logits = max_batch_;
    model_ = OrFail(Model::Load(model, device_.get()));
    const int64_t bytes =
        (model_->cache_layout().BytesFor(max_context_) + 4096) * max_batch_ + 8192;
    pool_ = OrFail(PagePool::Create(
        "hbm", model_->cache_layout(),
        OrFail(device_->Allocate(MemoryKind::kDevice, static_cast<size_t>(bytes), "caches"))));
    policy_ = OrFail(NewFullPolicy({device_.get(), pool_.get(), max_batch_, max_context_}));
    batch_ = OrFail(BatchState::Create({max_batch_, max_context_}, device_.get(), *model_));
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
  }

  // Bytes of weights that a step reads: all but an embedding that is not also the head.
  int64_t weight_bytes() const {
    const ModelConfig& c = model_->config();
    const int64_t table = c.tie_word_embeddings ? 0 : int64_t{c.vocab_size} * c.hidden_size * 2;
    return model_->weight_bytes() - table;
  }
  const Model& model() const { return *model_; }
  Device& device() { return *device_; }

  Figure Run(int batch, int context, double bytes_per_second) {
    const std::vector<int32_t> tokens(static_cast<size_t>(context), 1);
    SamplingParams greedy;
    greedy.temperature = 0;
    StepPlan plan;
    for (int slot = 0; slot < batch; ++slot) {
      std::unique_ptr<SequenceCache> none;
      if (!policy_->Admit(slot, 0, max_context_, none)) Fail("the caches do not fit");
      policy_->WarmEvent(slot).Wait();
      policy_->Grow(slot, max_context_, *stream_);
      batch_->Join(*stream_, slot, tokens, greedy, 1, context, {});
      plan.rows.push_back({slot, 0, 1, true});
    }
    plan.row_count = plan.sample_count = batch;
    std::vector<double> seconds;
    absl::Time last = absl::Now();
    constexpr int kWarmUp = 4;
    for (int step = 0; step < options_.steps + kWarmUp; ++step) {
      for (PlanRow& row : plan.rows) row.first_position = context - 1 + step;
      batch_->Launch(*stream_, step % 2, plan, *model_, *policy_);
      if (step == 0) continue;
      batch_->event((step - 1) % 2).Wait();
      const absl::Time now = absl::Now();
      if (step > kWarmUp) seconds.push_back(absl::ToDoubleSeconds(now - last));
      last = now;
    }
    for (int b = 0; b < 2; ++b) batch_->event(b).Wait();
    for (int slot = 0; slot < batch; ++slot) policy_->Release(slot);
    std::sort(seconds.begin(), seconds.end());
    const auto at = [&](double q) {
      return seconds[static_cast<size_t>(q * static_cast<double>(seconds.size() - 1))];
    };
    const CacheKind& kv = model_->cache_layout().kinds[0];
    const double cache = static_cast<double>(model_->cache_layout().layers) * kv.heads *
                         static_cast<double>(kv.bytes_per_token) * context * batch;
    const double floor = (static_cast<double>(weight_bytes()) + cache) / bytes_per_second;
    return {batch, context, at(0.5), at(0.1), at(0.9), floor};
  }

 private:
  const Options options_;
  int max_batch_ = 0, max_context_ = 0;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<FullPolicy> policy_;
  std::unique_ptr<BatchState> batch_;
  std::unique_ptr<Stream> stream_;
};

int Main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  const int threads = options.threads > 0 ? options.threads : DefaultThreads();
  double bytes_per_second = 0;
  {
    Crew crew(threads);
    const HugeBuffer buffer(size_t{512} << 20);
    bytes_per_second = static_cast<double>(buffer.bytes()) / MeasureRead(crew, buffer, 1.0).median;
  }
  if (bytes_per_second < 1e6) Fail("the bandwidth probe gave no figure");
  Bench bench(options);
  nlohmann::json json = {{"model", bench.model().config().name},
                         {"kernels", bench.device().kernels().name()},
                         {"threads", threads},
                         {"read_gb_per_second", bytes_per_second / 1e9},
                         {"weight_bytes", bench.weight_bytes()},
                         {"steps", nlohmann::json::array()}};
  if (!options.json) {
    std::printf("%s, %s kernels, %d threads; reads %.1f GB/s; weights %.1f MB a step\n",
                bench.model().config().name.c_str(), bench.device().kernels().name().c_str(),
                threads, bytes_per_second / 1e9, static_cast<double>(bench.weight_bytes()) / 1e6);
    std::printf("%6s %8s %12s %17s %11s %12s %14s\n", "batch", "context", "ms a step", "10th-90th",
                "tokens/s", "floor ms", "measured/floor");
  }
  for (const int batch : options.batches) {
    for (const int context : options.contexts) {
      const Figure f = bench.Run(batch, context, bytes_per_second);
      if (!options.json) {
        std::printf("%6d %8d %12.2f %8.2f-%8.2f %11.1f %12.2f %14.2f\n", batch, context,
                    f.median * 1e3, f.low * 1e3, f.high * 1e3, batch / f.median, f.floor * 1e3,
                    f.median / f.floor);
        std::fflush(stdout);
      }
      json["steps"].push_back({{"batch", batch},
                               {"context", context},
                               {"seconds", f.median},
                               {"seconds_10th", f.low},
                               {"seconds_90th", f.high},
                               {"tokens_per_second", batch / f.median},
                               {"floor_seconds", f.floor},
                               {"measured_over_floor", f.median / f.floor}});
    }
  }
  if (options.json) std::cout << json.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
