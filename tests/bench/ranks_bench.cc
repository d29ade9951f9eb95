// Times the operations of a group of ranks, each rank a process:
//
//   sluice-ranks-bench [ranks] [device] [rounds] [json]     (2, cpu, 200)
//
// With device cuda rank r has GPU r, or of fewer, r modulo their number. Each operation is timed as
// it goes by NCCL and by the ranks' memory (RankGroupOptions::peer_bytes; sums in two stages too),
// by the GPU's clock, both enqueued one by one and recorded, 32 in a row. With `json` every line is
// an object.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"

namespace sluice {
namespace {

// These are sums of float32 rows of 4096: 16 KiB is one row, 512 KiB are 32.
constexpr size_t kSizes[] = {
    size_t{8} << 10,   size_t{16} << 10,  size_t{32} << 10, size_t{64} << 10, size_t{128} << 10,
    size_t{256} << 10, size_t{512} << 10, size_t{1} << 20,  size_t{2} << 20,  size_t{4} << 20};
constexpr int64_t kMostBytes = int64_t{4} << 20;
constexpr int kSamples = 25;
constexpr int kInARow = 32;  // operations of a program

// The units of DeepSeek-V3.2: a row of 7168 bf16 with 8 choices, and a sum of 7168 float32.
struct Unit {
  const char* name;
  int bytes;
};
constexpr Unit kUnits[] = {{"dispatch", 7168 * 2 + 64}, {"combine", 7168 * 4}};
constexpr int kRows[] = {8, 32, 76};
constexpr int64_t kLinkBytes = int64_t{256} << 20;

struct Settings {
  std::string device;
  int rounds = 0;
  bool json = false;
};

using Work = std::function<void(Stream&)>;

class Bench {
 public:
  // `way`: by which way the group's operations go.
  Bench(const Settings& settings, const RankGroupOptions& options, Device* device,
        std::unique_ptr<RankGroup> group, const char* way)
      : settings_(settings),
        options_(options),
        device_(device),
        way_(way),
        group_(std::move(group)),
        stream_(device->NewStream(Device::StreamKind::kCompute)),
        begin_(device->NewTimedEvent()),
        end_(device->NewTimedEvent()) {}

  RankGroup& group() { return *group_; }
  Device& device() { return *device_; }

  // Returns memory that is registered with the group.
  absl::StatusOr<uint8_t*> Memory(int64_t bytes) {
    SLUICE_ASSIGN_OR_RETURN(
        Buffer made, device_->Allocate(MemoryKind::kDevice, static_cast<size_t>(bytes), "a bench"));
    SLUICE_RETURN_IF_ERROR(group_->Register(made.data(), made.bytes()));
    memory_.push_back(std::move(made));
    return memory_.back().as<uint8_t>();
  }

  // Times `work`, enqueued one by one and recorded. `moved`: the bytes that a rank sends.
  absl::Status Time(const std::string& name, int64_t bytes, int64_t moved, const Work& work) {
    SLUICE_RETURN_IF_ERROR(Sample(name, "enqueued", bytes, moved, settings_.rounds, 1, work));
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Program> program,
                            device_->Record(*stream_, [&work](Stream& stream) {
                              for (int i = 0; i < kInARow; ++i) work(stream);
                            }));
    return Sample(name, "recorded", bytes, moved, std::max(1, settings_.rounds / kInARow), kInARow,
                  [&program](Stream& stream) { program->Run(stream); });
  }

  // Times `rounds` runs of `work`, which is `each` operations.
  absl::Status Sample(const std::string& name, const char* form, int64_t bytes, int64_t moved,
                      int rounds, int each, const Work& work) {
    std::vector<double> times;
    for (int sample = -2; sample < kSamples; ++sample) {
      work(*stream_);  // the ranks meet here, out of the measured time
      stream_->Record(*begin_);
      for (int i = 0; i < rounds; ++i) work(*stream_);
      stream_->Record(*end_);
      end_->Wait();
      SLUICE_RETURN_IF_ERROR(device_->Health());
      const double us = absl::ToDoubleMicroseconds(end_->Since(*begin_)) / rounds / each;
      if (sample >= 0) times.push_back(us);
    }
    std::sort(times.begin(), times.end());
    if (options_.rank == 0) {
      Print(name, form, bytes, moved, times.front(), times[kSamples / 2]);
    }
    return absl::OkStatus();
  }

 private:
  void Print(const std::string& name, const char* form, int64_t bytes, int64_t moved, double least,
             double median) const {
    const double rate = static_cast<double>(moved) / median / 1e3;
    if (settings_.json) {
      std::printf(
          "{\"op\": \"%s\", \"way\": \"%s\", \"form\": \"%s\", \"ranks\": %d, \"bytes\": "
          "%lld, \"least_us\": %.2f, \"median_us\": %.2f, \"gb_per_s\": %.1f}\n",
          name.c_str(), way_, form, options_.size, static_cast<long long>(bytes), least, median,
          rate);
    } else {
      std::printf("%-22s %-5s %-9s %9lld bytes %9.2f us (median %9.2f) %7.1f GB/s\n", name.c_str(),
                  way_, form, static_cast<long long>(bytes), least, median, rate);
    }
    std::fflush(stdout);
  }

  const Settings settings_;
  const RankGroupOptions options_;
  Device* const device_;
  const char* const way_;
  std::vector<Buffer> memory_;  // It outlives the group, and the group the stream.
  const std::unique_ptr<RankGroup> group_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<TimedEvent> begin_, end_;
};

absl::Status SumsAndGathers(Bench& bench, const RankGroupOptions& options) {
  const int64_t others = options.size - 1;
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const data, bench.Memory(kMostBytes));
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const all, bench.Memory(kMostBytes * options.size));
  for (const size_t size : kSizes) {
    const auto bytes = static_cast<int64_t>(size);
    SLUICE_RETURN_IF_ERROR(bench.Time("all-reduce", bytes, bytes * others, [&](Stream& stream) {
      bench.group().AllReduce(stream, data, data, bytes / 4, DType::kFloat32);
    }));
    SLUICE_RETURN_IF_ERROR(bench.Time("all-gather", bytes, bytes * others, [&](Stream& stream) {
      bench.group().AllGather(stream, data, all, size);
    }));
  }
  return absl::OkStatus();
}

// Times exchanges of `rows` units to every rank, of blocks that have room for just so many.
absl::Status Exchanges(Bench& bench, const RankGroupOptions& options, const std::string& name,
                       int rows, int unit) {
  Device& device = bench.device();
  const int64_t block = int64_t{rows} * unit;
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const send, bench.Memory(block * options.size));
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const receive, bench.Memory(block * options.size));
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const counts, bench.Memory(int64_t{options.size} * 4));
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const received, bench.Memory(int64_t{options.size} * 4));
  SLUICE_ASSIGN_OR_RETURN(
      const Buffer host,
      device.Allocate(MemoryKind::kPinned, static_cast<size_t>(options.size) * 4, "a bench"));
  std::fill_n(host.as<int32_t>(), options.size, rows);
  const auto stream = device.NewStream(Device::StreamKind::kCopy);
  const auto done = device.NewEvent();
  stream->Copy(counts, host.data(), host.bytes());
  stream->Record(*done);
  done->Wait();
  AllToAllParams params;
  params.send = send;
  params.send_counts = reinterpret_cast<const int32_t*>(counts);
  params.receive = receive;
  params.receive_counts = reinterpret_cast<int32_t*>(received);
  params.capacity = rows;
  params.unit_bytes = unit;
  const int64_t moved = block * (options.size - 1);
  const Work work = [&](Stream& to) { bench.group().AllToAll(to, params); };
  if (block >= kLinkBytes) return bench.Sample(name, "enqueued", block, moved, 4, 1, work);
  return bench.Time(absl::StrCat(name, ", ", rows, " rows"), block, moved, work);
}

// Times what the link takes one way, by NCCL.
absl::Status Link(Bench& bench, const RankGroupOptions& options) {
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const data, bench.Memory(kLinkBytes));
  return bench.Sample("send and receive", "enqueued", kLinkBytes, kLinkBytes, 4, 1,
                      [&](Stream& stream) {
                        if (options.rank == 0) {
                          bench.group().Send(stream, data, size_t{kLinkBytes}, 1);
                        } else if (options.rank == 1) {
                          bench.group().Receive(stream, data, size_t{kLinkBytes}, 0);
                        }
                      });
}

absl::Status Measure(const Settings& settings, const RankGroupOptions& options) {
  const bool cuda = settings.device == "cuda";
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                          testing::TestDevice(cuda ? "cuda" : "auto"));
  struct Way {
    const char* name;
    size_t peer_bytes;
    size_t two_stage_bytes = std::numeric_limits<size_t>::max();
  };
  std::vector<Way> ways = {{"cpu", 0}};
  if (cuda) {
    const auto all = static_cast<size_t>(kMostBytes * (options.size - 1));
    ways = {{"nccl", 0}, {"peer", all}, {"peer2", all, 0}};
  }
  for (const Way& way : ways) {
    RankGroupOptions own = options;
    own.name = absl::StrCat(options.name, "-", way.name);
    own.peer_bytes = way.peer_bytes;
    own.two_stage_bytes = way.two_stage_bytes;
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<RankGroup> group, device->JoinRanks(own));
    Bench bench(settings, own, device.get(), std::move(group), way.name);
    SLUICE_RETURN_IF_ERROR(SumsAndGathers(bench, own));
    if (way.two_stage_bytes == 0) continue;
    for (const Unit& unit : kUnits) {
      for (const int rows : kRows) {
        SLUICE_RETURN_IF_ERROR(Exchanges(bench, own, unit.name, rows, unit.bytes));
      }
    }
    if (!cuda) continue;
    SLUICE_RETURN_IF_ERROR(Exchanges(bench, own, "all-to-all, both ways",
                                     static_cast<int>(kLinkBytes >> 20), 1 << 20));
    if (way.peer_bytes == 0) SLUICE_RETURN_IF_ERROR(Link(bench, own));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  Settings settings;
  settings.device = argc > 2 ? argv[2] : "cpu";
  settings.rounds = argc > 3 ? std::atoi(argv[3]) : 200;
  settings.json = argc > 4 && std::strcmp(argv[4], "json") == 0;
  if (!settings.json) {
    std::printf("%d ranks, %s, %d rounds; least and median of %d samples\n", size,
                settings.device.c_str(), settings.rounds, kSamples);
    std::fflush(stdout);
  }
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(size),
      [&](const RankGroupOptions& options) {
        return std::string(Measure(settings, options).message());
      },
      /*on_gpus=*/settings.device == "cuda");
  const std::string said = testing::Joined(wrong);
  if (!said.empty()) std::fprintf(stderr, "%s\n", said.c_str());
  return said.empty() ? 0 : 1;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
