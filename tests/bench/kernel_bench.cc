// sluice-kernel-bench: what the CPU kernels reach beside what the machine could.
//
// The floor of an operator is the larger of its bytes over the measured read bandwidth and, for
// many rows, nothing: arithmetic has no floor here, its rate is printed as it is. Operands cycle
// through enough copies that weights come from memory, as they do in a step of a whole model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "kernels/kernel_table.h"
#include "kernels/scalar.h"
#include "tests/bench/bench_support.h"
#include "tests/kernels/kernel_cases.h"

namespace sluice {
namespace {

using namespace kernels;  // NOLINT: a program about them

constexpr char kHelp[] =
    R"(sluice-kernel-bench: rates of the CPU kernels beside the machine's read bandwidth

  --threads N    workers (default: every core)
  --path NAME    only that path (portable, avx2, avx512bf16, amx); default: all this machine has
  --seconds S    time per figure (default 0.3)
  --only WHAT    linear or attention
  --json         one JSON object instead of the table
  --help         this text

Columns: median time, its 10th-90th percentile spread, GB/s of weights or caches, GFLOP/s, and
measured/floor, the floor being those bytes over the bandwidth that all workers reach reading.
)";

struct Options {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::string path;
  std::string only;
  double seconds = 0.3;
  bool json = false;
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "sluice-kernel-bench: %s (see --help)\n", message.c_str());
  std::exit(2);
}

Options Parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) Fail(flag + " needs a value");
      return argv[++i];
    };
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    } else if (flag == "--json") {
      o.json = true;
    } else if (flag == "--threads") {
      o.threads = std::atoi(value().c_str());
      if (o.threads < 1 || o.threads > 1024) Fail("--threads takes 1 to 1024");
    } else if (flag == "--seconds") {
      o.seconds = std::atof(value().c_str());
      if (!(o.seconds > 0 && o.seconds <= 60)) Fail("--seconds takes a number above 0, up to 60");
    } else if (flag == "--path") {
      o.path = value();
      if (FindKernelTable(o.path.c_str()) == nullptr) Fail("this machine has no path " + o.path);
    } else if (flag == "--only") {
      o.only = value();
      if (o.only != "linear" && o.only != "attention") Fail("--only takes linear or attention");
    } else {
      Fail("unknown argument " + flag);
    }
  }
  return o;
}

// Collects figures as JSON, and prints them as they come unless the whole is to be JSON.
class Report {
 public:
  Report(bool json, double bytes_per_second) : json_(json), bandwidth_(bytes_per_second) {}

  void Add(const char* path, const std::string& what, const Timing& t, double bytes, double flops) {
    const double floor = bytes / bandwidth_;
    results_.push_back({{"path", path},
                        {"case", what},
                        {"median_seconds", t.median},
                        {"p10_seconds", t.low},
                        {"p90_seconds", t.high},
                        {"samples", t.samples},
                        {"bytes", bytes},
                        {"flops", flops},
                        {"gb_per_second", bytes / t.median * 1e-9},
                        {"gflop_per_second", flops / t.median * 1e-9},
                        {"floor_seconds", floor},
                        {"measured_over_floor", t.median / floor}});
    if (json_) return;
    std::printf("%-11s %-34s %9.1f us %8.1f-%-9.1f %7.1f GB/s %8.1f GFLOP/s %7.2f x floor\n", path,
                what.c_str(), t.median * 1e6, t.low * 1e6, t.high * 1e6, bytes / t.median * 1e-9,
                flops / t.median * 1e-9, t.median / floor);
    std::fflush(stdout);
  }

  const nlohmann::json& results() const { return results_; }

 private:
  const bool json_;
  const double bandwidth_;
  nlohmann::json results_ = nlohmann::json::array();
};

// Random bf16 of magnitude about 1, cheaply.
void FillBf16(uint16_t* out, size_t count) {
  uint32_t state = 12345;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    out[i] = static_cast<uint16_t>((state >> 16 & 0x8000u) | (0x3F00u + (state >> 24 & 0x7Fu)));
  }
}

void FillFloat(float* out, size_t count) {
  uint32_t state = 54321;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    out[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1.0p-31f;
  }
}

void BenchLinear(const KernelTable& table, const Options& options, const HugeBuffer& arena,
                 Crew& crew, Report& report) {
  for (const LinearCase& shape : ModelLinearCases()) {
    const auto panel_elements = static_cast<size_t>(PanelElements(shape.n, shape.k));
    const size_t copies = arena.bytes() / (panel_elements * 2);
    for (int32_t rows : {1, 8, 32, 512}) {
      if (rows == 512 && shape.n > 10000) continue;  // prefill needs the head for its last row only
      const auto x_elements = static_cast<size_t>(rows) * static_cast<size_t>(shape.k);
      HugeBuffer x(x_elements * 4);
      if (table.activation_type == DType::kFloat32) {
        FillFloat(x.as<float>(), x_elements);
      } else {
        FillBf16(x.as<uint16_t>(), x_elements);
      }
      HugeBuffer y(static_cast<size_t>(rows) * static_cast<size_t>(shape.n) * 4);
      size_t turn = 0;
      LinearParams p = {x.data(), {nullptr, shape.n, shape.k, table.weight_layout},
                        nullptr,  y.as<float>(),
                        rows,     table.activation_type,
                        false};
      const std::function<void(int)> job = [&](int i) { table.linear(p, {i, crew.count()}); };
      const Timing t = Measure(options.seconds, [&] {
        p.w.data = arena.as<uint16_t>() + turn++ % copies * panel_elements;
        crew.Run(job);
      });
      report.Add(table.name,
                 "linear " + std::to_string(shape.n) + "x" + std::to_string(shape.k) + ", rows " +
                     std::to_string(rows),
                 t, static_cast<double>(panel_elements) * 2,
                 2.0 * rows * shape.n * static_cast<double>(shape.k));
    }
  }
}

// SmolLM2's attention: 9 heads, 3 of K and V, head_dim 64, blocks of 32 tokens.
void BenchAttention(const KernelTable& table, const Options& options, const HugeBuffer& arena,
                    Crew& crew, Report& report, int32_t rows, int32_t context) {
  constexpr int32_t kHeads = 9, kKvHeads = 3, kDim = 64, kBlock = 32;
  constexpr int64_t kPageBytes = int64_t{kKvHeads} * 2 * kBlock * kDim * 2;
  const int32_t blocks = (context + kBlock - 1) / kBlock;
  const auto cache_bytes = static_cast<size_t>(blocks) * kPageBytes;
  const size_t copies = arena.bytes() / cache_bytes;
  std::vector<int32_t> pages, slots, positions;
  for (int32_t i = 0; i < blocks; ++i) pages.push_back(i);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  for (int32_t r = 0; r < rows; ++r) {
    slots.push_back(0);
    positions.push_back(context - rows + r);
  }
  const int64_t width = kHeads * kDim;
  HugeBuffer q(static_cast<size_t>(rows * width) * 4), out(static_cast<size_t>(rows * width) * 4);
  FillFloat(q.as<float>(), static_cast<size_t>(rows * width));
  const int64_t partial_rows = rows == 1 ? (context - 1) / kAttentionSplitTokens + 1 : 0;
  HugeBuffer partial(static_cast<size_t>((partial_rows + 1) * kHeads * (kDim + 1)) * 4);
  AttentionParams p = {};
  p.q = q.as<float>();
  p.q_stride = width;
  p.slots = slots.data();
  p.positions = positions.data();
  p.cache = {nullptr, pages.data(), blocks, kPageBytes, kBlock, kKvHeads, kDim, DType::kBFloat16};
  p.out = out.data();
  p.partial = partial.as<float>();
  p.partial_rows = partial_rows;
  p.rows = rows;
  p.heads = kHeads;
  p.scale = 0.125f;
  p.out_type = table.activation_type;
  const std::function<void(int)> attend = [&](int i) { table.attention(p, {i, crew.count()}); };
  const std::function<void(int)> merge = [&](int i) {
    table.attention_merge(p, {i, crew.count()});
  };
  size_t turn = 0;
  const Timing t = Measure(options.seconds, [&] {
    p.cache.base = arena.as<char>() + turn++ % copies * cache_bytes;
    crew.Run(attend);
    crew.Run(merge);
  });
  double pairs = 0;  // of a query row and a token that it attends to
  for (int32_t position : positions) pairs += position + 1;
  report.Add(table.name,
             "attention, rows " + std::to_string(rows) + ", context " + std::to_string(context), t,
             static_cast<double>(context) * kKvHeads * kDim * 4, pairs * kHeads * kDim * 4);
}

int Main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  Crew crew(options.threads);
  Timing one, all;
  constexpr size_t kArenaBytes = size_t{512} << 20;
  const HugeBuffer arena(kArenaBytes);
  FillBf16(arena.as<uint16_t>(), kArenaBytes / 2);
  {
    Crew single(1);
    one = MeasureRead(single, arena, 1.0);
    all = MeasureRead(crew, arena, 1.0);
  }
  const auto rate = [](double seconds) { return kArenaBytes / seconds; };
  if (!options.json) {
    std::printf(
        "read bandwidth, 512 MiB on huge pages: 1 thread %.1f GB/s (%.1f-%.1f), %d threads "
        "%.1f GB/s (%.1f-%.1f)\n",
        rate(one.median) * 1e-9, rate(one.high) * 1e-9, rate(one.low) * 1e-9, options.threads,
        rate(all.median) * 1e-9, rate(all.high) * 1e-9, rate(all.low) * 1e-9);
  }
  Report report(options.json, rate(all.median));
  for (const KernelTable* table : AvailableKernelTables()) {
    if (std::strcmp(table->name, "reference") == 0) continue;
    if (!options.path.empty() && options.path != table->name) continue;
    if (options.only != "attention") BenchLinear(*table, options, arena, crew, report);
    if (options.only == "linear") continue;
    for (int32_t context : {64, 2048, 16384}) {
      BenchAttention(*table, options, arena, crew, report, 1, context);
    }
    BenchAttention(*table, options, arena, crew, report, 512, 512);
  }
  if (options.json) {
    const nlohmann::json root = {{"threads", options.threads},
                                 {"read_bytes_per_second_1_thread", rate(one.median)},
                                 {"read_bytes_per_second_all_threads", rate(all.median)},
                                 {"results", report.results()}};
    std::cout << root.dump(2) << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
