#include "tests/bench/entry_movers.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/latent_params.h"
#include "src/attention/offload/row_mover.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

using Mover = PolicyOptions::Mover;

constexpr int64_t kEntryBytes = 656;
constexpr int kRank = 512, kRope = 64, kHeads = 128, kSelected = 2048, kBlock = 64;
constexpr int64_t kSequence = 32768;  // entries among which a row's misses lie
constexpr int kRuns = 8;              // the first two are not counted
constexpr int kSpare = 4;             // processors that attention leaves to the fetching

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  SLUICE_CHECK(value.ok(), value.status().message());
  return *std::move(value);
}

// A mover of the rows [begin, end) of each move, on a branch of its own.
struct Share {
  RowMover* mover;
  int begin, end;
};

class Bench {
 public:
  Bench(Device& device, const EntryMoversOptions& options)
      : device_(device),
        options_(options),
        entries_(options.arena_bytes / kEntryBytes),
        moved_(int64_t{options.rows} * options.misses),
        home_(Allocate(MemoryKind::kPinned, entries_ * kEntryBytes)),
        pool_(Allocate(MemoryKind::kDevice, moved_ * kEntryBytes)),
        copied_(Allocate(MemoryKind::kPinned, moved_ * kEntryBytes)),
        stream_(device.NewStream(Device::StreamKind::kCompute)),
        start_(device.NewTimedEvent()),
        stop_(device.NewTimedEvent()) {
    SLUICE_CHECK(entries_ > kSequence && entries_ < INT32_MAX, "the arena holds a sequence");
    for (int64_t e = 0; e < entries_; ++e) {  // one word of each tells them apart
      std::memset(Home(e), static_cast<int>(e % 251), kEntryBytes);
      std::memcpy(Home(e), &e, sizeof(e));
    }
    DrawLists();
    PrepareAttention();
  }

  void Run() {
    attention_ = Time({}, true);
    std::printf("%d rows of %d misses, %d layers, arena of %.1f GiB; attention alone %.1f us\n",
                options_.rows, options_.misses, options_.layers,
                static_cast<double>(options_.arena_bytes) / (1 << 30), attention_ * 1e6);
    const auto uva = NewMover(Mover::kUva, 1);
    const double by_uva = Print("uva", {{uva.get(), 0, options_.rows}});
    for (const int workers : options_.workers) {
      const auto cpu = NewMover(Mover::kCpu, workers);
      const double by_cpu =
          Print(absl::StrCat("cpu, ", workers, " workers"), {{cpu.get(), 0, options_.rows}});
      const int cut = static_cast<int>(options_.rows * by_cpu / (by_cpu + by_uva));
      if (cut == 0 || cut == options_.rows) continue;
      Print(absl::StrCat("both, ", cut, " rows by ", workers, " workers"),
            {{cpu.get(), 0, cut}, {uva.get(), cut, options_.rows}});
    }
  }

 private:
  Buffer Allocate(MemoryKind kind, int64_t bytes) {
    return OrDie(device_.Allocate(kind, static_cast<size_t>(bytes), "a benchmark"));
  }
  Buffer ToDevice(const std::vector<int32_t>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
    const Buffer host = Allocate(MemoryKind::kPinned, bytes);
    Buffer out = Allocate(MemoryKind::kDevice, bytes);
    std::memcpy(host.data(), values.data(), host.bytes());
    stream_->Copy(out.data(), host.data(), host.bytes());
    Wait();
    return out;
  }
  void Wait() {
    stream_->Record(*stop_);
    stop_->Wait();
    SLUICE_CHECK(device_.Health().ok(), device_.Health().message());
  }
  uint8_t* Home(int64_t entry) const { return home_.as<uint8_t>() + entry * kEntryBytes; }

  void DrawLists() {
    SplitMix64 random(7);
    std::vector<int32_t> targets, slots;
    for (int list = 0; list < options_.layers * options_.rows; ++list) {
      const auto base = random.Below(static_cast<uint64_t>(entries_ - kSequence));
      const auto first = static_cast<std::ptrdiff_t>(sources_.size());
      for (int i = 0; i < options_.misses; ++i) {
        sources_.push_back(static_cast<int32_t>(base + random.Below(uint64_t{kSequence})));
        targets.push_back(list % options_.rows * options_.misses + i);
      }
      std::sort(sources_.begin() + first, sources_.end());
    }
    for (int row = 0; row < options_.rows; ++row) slots.push_back(row);
    device_sources_ = ToDevice(sources_);
    targets_ = ToDevice(targets);
    slots_ = ToDevice(slots);
    counts_ = ToDevice(std::vector<int32_t>(static_cast<size_t>(options_.rows), options_.misses));
  }

  void PrepareAttention() {
    const int64_t rows = options_.rows, type = SizeOf(device_.kernels().activation_type());
    const int32_t pages = kSequence / kBlock;
    cache_ = Allocate(MemoryKind::kDevice, kSequence * kEntryBytes);
    q_ = Allocate(MemoryKind::kDevice, rows * kHeads * (kRank + kRope) * type);
    out_ = Allocate(MemoryKind::kDevice, rows * kHeads * kRank * type);
    scratch_ = Allocate(
        MemoryKind::kDevice,
        std::max<int64_t>(
            device_.kernels().SparseMlaScratchBytes(options_.rows, kHeads, kRank, kSelected), 4));
    SplitMix64 random(8);
    std::vector<int32_t> table, selected;
    for (int32_t page = 0; page < pages; ++page) table.push_back(page);
    for (int64_t i = 0; i < rows * kSelected; ++i) {
      selected.push_back(static_cast<int32_t>(random.Below(uint64_t{kSequence})));
    }
    table_ = ToDevice(table);
    selected_ = ToDevice(selected);
    selected_counts_ = ToDevice(std::vector<int32_t>(static_cast<size_t>(rows), kSelected));
    first_slots_ = ToDevice(std::vector<int32_t>(static_cast<size_t>(rows), 0));
  }

  void Attend(Stream& stream, bool beside) {
    kernels::SparseMlaParams p{};
    p.q = q_.data();
    p.slots = first_slots_.as<int32_t>();
    p.cache = {cache_.data(),
               table_.as<int32_t>(),
               kSequence / kBlock,
               kBlock * kEntryBytes,
               kBlock,
               kRank,
               kRope,
               DType::kFloat8E4M3};
    p.entries = selected_.as<int32_t>();
    p.counts = selected_counts_.as<int32_t>();
    p.capacity = kSelected;
    p.out = out_.data();
    p.scratch = scratch_.data();
    p.scratch_bytes = static_cast<int64_t>(scratch_.bytes());
    p.rows = p.decode_rows = options_.rows;
    p.heads = kHeads;
    p.spare_processors = beside ? kSpare : 0;
    p.scale = 0.1f;
    p.q_type = p.out_type = device_.kernels().activation_type();
    device_.kernels().SparseMla(stream, p);
  }

  std::unique_ptr<RowMover> NewMover(Mover kind, int workers) {
    RowMover::Options options;
    options.kind = kind;
    options.device = &device_;
    options.slots = options.max_rows = options_.rows;
    options.capacity = options_.misses;
    options.source = home_.data();
    options.target = pool_.data();
    options.unit_bytes = kEntryBytes;
    options.processors = kSpare;
    options.workers = workers;
    options.deadline = absl::Seconds(30);
    return OrDie(RowMover::Create(options));
  }

  void Enqueue(Stream& s, const std::vector<Share>& shares, bool attend) {
    for (int layer = 0; layer < options_.layers; ++layer) {
      int branch = 1;
      for (const Share& share : shares) {
        Stream& fetches = s.Branch(branch++);
        fetches.After(s);
        const int64_t of_row = share.begin * int64_t{options_.misses};
        const int64_t at = layer * moved_ + of_row;
        share.mover->Move(fetches, 0,
                          {slots_.as<int32_t>() + share.begin, device_sources_.as<int32_t>() + at,
                           targets_.as<int32_t>() + at, counts_.as<int32_t>() + share.begin,
                           share.end - share.begin});
      }
      if (attend) Attend(s, !shares.empty());
      while (--branch > 0) s.After(s.Branch(branch));
    }
  }

  // Returns the seconds of a layer.
  double Time(const std::vector<Share>& shares, bool attend) {
    const auto program =
        OrDie(device_.Record(*stream_, [&](Stream& s) { Enqueue(s, shares, attend); }));
    stream_->Fill(pool_.data(), 0, pool_.bytes());
    std::vector<double> seconds;
    for (int run = 0; run < kRuns; ++run) {
      stream_->Record(*start_);
      program->Run(*stream_);
      Wait();
      if (run > 1) seconds.push_back(absl::ToDoubleSeconds(stop_->Since(*start_)));
    }
    if (!shares.empty()) Check();
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2] / options_.layers;
  }

  // Checks what the last layer's lists brought.
  void Check() {
    stream_->Copy(copied_.data(), pool_.data(), pool_.bytes());
    Wait();
    const int32_t* const last = sources_.data() + (options_.layers - 1) * moved_;
    for (int64_t i = 0; i < moved_; ++i) {
      SLUICE_CHECK(
          std::memcmp(copied_.as<uint8_t>() + i * kEntryBytes, Home(last[i]), kEntryBytes) == 0,
          "wrong bytes came");
    }
  }

  // Returns the rate alone.
  double Print(const std::string& name, const std::vector<Share>& shares) {
    const double alone = Time(shares, false), beside = Time(shares, true);
    const double bytes = static_cast<double>(moved_ * kEntryBytes);
    std::printf("%-30s %6.2f GB/s alone; with attention a layer takes %.1f us (%.2f GB/s)\n",
                name.c_str(), bytes / alone * 1e-9, beside * 1e6, bytes / beside * 1e-9);
    return bytes / alone;
  }

  Device& device_;
  const EntryMoversOptions options_;
  const int64_t entries_, moved_;  // of the arena; of a layer
  const Buffer home_, pool_, copied_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<TimedEvent> start_, stop_;
  std::vector<int32_t> sources_;  // [layers][rows][misses]
  Buffer device_sources_, targets_, slots_, counts_;
  Buffer cache_, q_, out_, scratch_, table_, selected_, selected_counts_, first_slots_;
  double attention_ = 0;
};

}  // namespace

void TimeEntryMovers(Device& device, const EntryMoversOptions& options) {
  Bench(device, options).Run();
}

}  // namespace sluice::bench
