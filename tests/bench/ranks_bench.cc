// Times the operations of a group of ranks, each rank a process, beside the floor of their bytes:
//
//   sluice-ranks-bench [ranks] [device] [rounds]     (2, cpu, 200)
//
// With device cuda the ranks share one GPU, or have the one that CUDA_VISIBLE_DEVICES shows each.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"

namespace sluice {
namespace {

// These are sums of 1 and 14 rows of 2048 float32 elements, and of 1 MiB.
constexpr size_t kSizes[] = {size_t{8} << 10, size_t{112} << 10, size_t{1} << 20};

constexpr int kSamples = 25;

class Rank {
 public:
  Rank(Device* device, RankGroup* group, int rounds)
      : device_(device),
        group_(group),
        rounds_(rounds),
        stream_(device->NewStream(Device::StreamKind::kCompute)),
        done_(device->NewEvent()) {}

  // Returns the microseconds of one `work`, of `rounds` that are enqueued one behind the other: the
  // least and the median of the samples. A machine that does other work too shows in the median.
  template <typename Work>
  std::string Time(const Work& work) {
    Run(work, rounds_);
    std::vector<double> times;
    for (int sample = 0; sample < kSamples; ++sample) {
      times.push_back(Run(work, rounds_) / rounds_ * 1e6);
    }
    std::sort(times.begin(), times.end());
    return absl::StrFormat("%.1f (%.1f)", times.front(), times[kSamples / 2]);
  }
  Stream& stream() { return *stream_; }
  RankGroup& group() { return *group_; }
  Device& device() { return *device_; }

 private:
  template <typename Work>
  double Run(const Work& work, int times) {
    const absl::Time begin = absl::Now();
    for (int i = 0; i < times; ++i) work();
    stream_->Record(*done_);
    done_->Wait();
    return absl::ToDoubleSeconds(absl::Now() - begin);
  }

  Device* const device_;
  RankGroup* const group_;
  const int rounds_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> done_;
};

std::string Measure(const std::string& kernels, int rounds, const RankGroupOptions& options) {
  auto device = testing::TestDevice(kernels);
  if (!device.ok()) return std::string(device.status().message());
  auto group = (*device)->JoinRanks(options);
  if (!group.ok()) return std::string(group.status().message());
  Rank rank(device->get(), group->get(), rounds);
  for (const size_t bytes : kSizes) {
    const auto in = (*device)->Allocate(MemoryKind::kDevice, bytes, "in");
    const auto out = (*device)->Allocate(MemoryKind::kDevice, bytes * size_t(options.size), "out");
    const auto count = static_cast<int64_t>(bytes / 4);
    const std::string sum = rank.Time([&] {
      rank.group().AllReduce(rank.stream(), in->data(), in->data(), count, DType::kFloat32);
    });
    auto program = (*device)->Record(rank.stream(), [&](Stream& s) {
      rank.group().AllReduce(s, in->data(), in->data(), count, DType::kFloat32);
    });
    const std::string recorded = rank.Time([&] { (*program)->Run(rank.stream()); });
    const std::string gather =
        rank.Time([&] { rank.group().AllGather(rank.stream(), in->data(), out->data(), bytes); });
    // A rank copies at least this: its own part out, and each other rank's in.
    const std::string floor = rank.Time([&] {
      for (int i = 0; i < options.size; ++i) {
        rank.stream().Copy(out->as<uint8_t>() + static_cast<size_t>(i) * bytes, in->data(), bytes);
      }
    });
    if (!(*device)->Health().ok()) return std::string((*device)->Health().message());
    if (options.rank == 0) {
      std::printf("%5zu KiB  all-reduce %s  recorded %s  all-gather %s  %d copies %s\n",
                  bytes >> 10, sum.c_str(), recorded.c_str(), gather.c_str(), options.size,
                  floor.c_str());
      std::fflush(stdout);
    }
  }
  return "";
}

int Main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::string device = argc > 2 ? argv[2] : "cpu";
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 200;
  const std::string kernels = device == "cpu" ? "auto" : device;
  std::printf("%d ranks, %s, %d rounds; microseconds, least (median)\n", size, device.c_str(),
              rounds);
  std::fflush(stdout);
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(size),
      [&](const RankGroupOptions& options) { return Measure(kernels, rounds, options); },
      /*share_gpu=*/device == "cuda");
  const std::string said = testing::Joined(wrong);
  if (!said.empty()) std::fprintf(stderr, "%s\n", said.c_str());
  return said.empty() ? 0 : 1;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
