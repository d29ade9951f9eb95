// sluice-mover-bench times how the tokens that heads select anew come from pinned DRAM to the
// device: read there by the device itself (mover uva), or gathered by CPU workers (mover cpu).
//
//   sluice-mover-bench [cpu | cuda]
//   sluice-mover-bench (cpu | cuda) entries GIB [ROWS MISSES]
//
// The second form times what policy ess misses (entry_movers.h): ROWS x MISSES latent entries of a
// layer that lie scattered over GIB of pinned memory; 76 x 190 without them.
//
// In the first form one sequence of Llama-3-8B's geometry (8 KV heads, head_dim 128, bf16), of
// whose tokens every head selects a tenth: all that one layer fetches when every head misses. A run
// moves kLayers layers, as a recorded program, on the branches that policies use. GB/s count K and
// V alone.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/attention/offload/row_mover.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "tests/bench/entry_movers.h"
#include "tests/support/device.h"

namespace sluice {
namespace {

using Mover = PolicyOptions::Mover;

constexpr int kLayers = 8;
constexpr int kHeads = 8, kHeadDim = 128, kBlockTokens = 16;
constexpr int64_t kRowBytes = kHeadDim * 2;
constexpr int kRuns = 12;

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  SLUICE_CHECK(value.ok(), value.status().message());
  return *std::move(value);
}

// Units of a layer: those of its heads in blocks of kBlockTokens, K before V.
int64_t UnitsOf(int64_t tokens) { return tokens * kHeads * 2; }
int64_t KeyUnit(int64_t layer_tokens, int layer, int head, int64_t token) {
  const int64_t block = token / kBlockTokens * kHeads + head;
  return layer * UnitsOf(layer_tokens) + block * 2 * kBlockTokens + token % kBlockTokens;
}

// The lists of all layers, and the memory that they move between.
class Case {
 public:
  Case(Device& device, int64_t tokens)
      : device_(device),
        tokens_(tokens),
        selected_(tokens / 10 / kBlockTokens * kBlockTokens),
        home_(Allocate(MemoryKind::kPinned, kLayers * UnitsOf(tokens) * kRowBytes)),
        resident_(Allocate(MemoryKind::kDevice, kLayers * UnitsOf(selected_) * kRowBytes)),
        copied_(Allocate(MemoryKind::kPinned, static_cast<int64_t>(resident_.bytes()))),
        stream_(device.NewStream(Device::StreamKind::kCompute)),
        start_(device.NewTimedEvent()),
        stop_(device.NewTimedEvent()) {
    SplitMix64 random(7);
    for (size_t i = 0; i < home_.bytes() / 8; ++i) home_.as<uint64_t>()[i] = random();
    std::vector<int32_t> source, target;
    for (int list = 0; list < kLayers * kHeads; ++list) {
      // Sorted tokens, one of each ten.
      for (int64_t i = 0; i < selected_; ++i) {
        const auto token = i * 10 + static_cast<int64_t>(random.Below(10));
        source.push_back(Unit(tokens_, list, token));
        target.push_back(Unit(selected_, list, i));
      }
    }
    source_ = ToDevice(source);
    target_ = ToDevice(target);
    counts_ = ToDevice(std::vector<int32_t>(kHeads, static_cast<int32_t>(selected_)));
    slots_ = ToDevice({0});
  }

  // Prints the rate of a mover. `want`: what another mover brought; empty: nothing is compared.
  void Time(Mover kind, int workers, std::vector<uint8_t>* want) {
    const auto mover = NewMover(kind, workers);
    auto program = OrDie(device_.Record(*stream_, [&](Stream& s) { Enqueue(s, *mover); }));
    stream_->Fill(resident_.data(), 0, resident_.bytes());
    std::vector<double> seconds;
    for (int run = 0; run < kRuns; ++run) {
      stream_->Record(*start_);
      program->Run(*stream_);
      stream_->Record(*stop_);
      stop_->Wait();
      if (run > 1) seconds.push_back(absl::ToDoubleSeconds(stop_->Since(*start_)));
    }
    stream_->Copy(copied_.data(), resident_.data(), resident_.bytes());
    stream_->Record(*stop_);
    stop_->Wait();
    SLUICE_CHECK(device_.Health().ok(), device_.Health().message());
    const uint8_t* const got = copied_.as<uint8_t>();
    if (want->empty()) want->assign(got, got + copied_.bytes());
    const bool same = std::memcmp(want->data(), got, copied_.bytes()) == 0;
    std::sort(seconds.begin(), seconds.end());
    const auto rate = [&](double s) { return static_cast<double>(copied_.bytes()) / s * 1e-9; };
    const std::string name =
        kind == Mover::kUva ? "uva" : absl::StrCat("cpu, ", workers, " workers");
    std::printf("%7lld tokens, %5.2f MB a layer, %-14s %6.2f GB/s (%.2f-%.2f)%s%s\n",
                static_cast<long long>(tokens_),
                static_cast<double>(copied_.bytes()) / kLayers * 1e-6, name.c_str(),
                rate(seconds[seconds.size() / 2]), rate(seconds.back()), rate(seconds.front()),
                OfAWorker(*mover).c_str(), same ? "" : " WRONG BYTES");
  }

 private:
  Buffer Allocate(MemoryKind kind, int64_t bytes) {
    return OrDie(device_.Allocate(kind, static_cast<size_t>(bytes), "a benchmark"));
  }
  Buffer ToDevice(const std::vector<int32_t>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
    Buffer host = Allocate(MemoryKind::kPinned, bytes), out = Allocate(MemoryKind::kDevice, bytes);
    std::memcpy(host.data(), values.data(), host.bytes());
    stream_->Copy(out.data(), host.data(), host.bytes());
    stream_->Record(*stop_);
    stop_->Wait();
    return out;
  }
  static int32_t Unit(int64_t layer_tokens, int list, int64_t token) {
    return static_cast<int32_t>(KeyUnit(layer_tokens, list / kHeads, list % kHeads, token));
  }

  // Returns the rate at which a worker gathers while it does nothing else.
  static std::string OfAWorker(RowMover& mover) {
    if (mover.workers() == nullptr) return "";
    const WorkerStatistics did = mover.workers()->Statistics();
    const double bytes = static_cast<double>(did.tokens * 2 * kRowBytes);
    return absl::StrFormat(", a worker gathers %.2f",
                           bytes / absl::ToDoubleSeconds(did.busy) * 1e-9);
  }

  std::unique_ptr<RowMover> NewMover(Mover kind, int workers) {
    RowMover::Options options;
    options.kind = kind;
    options.device = &device_;
    options.slots = options.max_rows = 1;
    options.lists_per_row = kHeads;
    options.capacity = static_cast<int32_t>(selected_);
    options.source = home_.data();
    options.target = resident_.data();
    options.unit_bytes = kRowBytes;
    options.parts = 2;
    options.part_pitch = kBlockTokens * kRowBytes;
    options.workers = workers;
    return OrDie(RowMover::Create(options));
  }

  void Enqueue(Stream& s, RowMover& mover) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const int64_t first = int64_t{layer} * kHeads * selected_;
      Stream& fetches = s.Branch(1 + layer % 2);
      fetches.After(s);
      mover.Move(fetches, layer % RowMover::kSides,
                 {slots_.as<int32_t>(), source_.as<int32_t>() + first,
                  target_.as<int32_t>() + first, counts_.as<int32_t>(), 1});
      s.After(fetches);
    }
  }

  Device& device_;
  const int64_t tokens_, selected_;
  const Buffer home_, resident_, copied_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<TimedEvent> start_, stop_;
  Buffer source_, target_, counts_, slots_;
};

int Main(const std::string& kernels, const bench::EntryMoversOptions* entries) {
  const auto device = testing::TestDevice(kernels);
  if (!device.ok()) {
    std::fprintf(stderr, "sluice-mover-bench: %s\n",
                 std::string(device.status().message()).c_str());
    return 1;
  }
  if (entries != nullptr) {
    bench::TimeEntryMovers(**device, *entries);
    return 0;
  }
  for (const int64_t tokens : {4096, 16384, 65536}) {
    Case c(**device, tokens);
    std::vector<uint8_t> want;
    c.Time(Mover::kUva, 1, &want);
    for (const int workers : {1, 2, 4, 8}) c.Time(Mover::kCpu, workers, &want);
  }
  return 0;
}

int Usage() {
  std::fprintf(stderr,
               "sluice-mover-bench [cpu | cuda]\n"
               "sluice-mover-bench (cpu | cuda) entries GIB [ROWS MISSES]\n");
  return 2;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "cuda";
  const std::string kernels = device == "cpu" ? "auto" : device;
  if (device != "cpu" && device != "cuda") return sluice::Usage();
  if (argc <= 2) return sluice::Main(kernels, nullptr);
  if (std::string(argv[2]) != "entries" || (argc != 4 && argc != 6)) return sluice::Usage();
  sluice::bench::EntryMoversOptions entries;
  entries.arena_bytes = static_cast<int64_t>(std::atof(argv[3]) * (1 << 30));
  if (argc == 6) {
    entries.rows = std::atoi(argv[4]);
    entries.misses = std::atoi(argv[5]);
  }
  if (device == "cpu") {
    entries.layers = 8;  // attention takes long there
    entries.workers = {1, 2};
  }
  if (entries.arena_bytes <= 0 || entries.rows < 1 || entries.misses < 1) return sluice::Usage();
  return sluice::Main(kernels, &entries);
}
