#include "src/device/device.h"

#include "absl/strings/str_cat.h"
#include "src/device/rank_group.h"
#include "src/device/trace.h"

namespace sluice {
namespace {

class Closure : public Program {
 public:
  explicit Closure(std::function<void(Stream&)> enqueue) : enqueue_(std::move(enqueue)) {}
  void Run(Stream& stream) override { enqueue_(stream); }

 private:
  const std::function<void(Stream&)> enqueue_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Program>> Device::Record(Stream&,
                                                        std::function<void(Stream&)> enqueue) {
  return std::make_unique<Closure>(std::move(enqueue));
}

absl::StatusOr<Buffer> Device::Pin(void* data, size_t bytes, const std::string&) {
  return Buffer(data, bytes, [](void*, size_t) {});
}

absl::StatusOr<std::unique_ptr<RankGroup>> Device::JoinRanks(const RankGroupOptions&) {
  return absl::UnimplementedError(absl::StrCat("the device ", name(), " has no ranks"));
}

absl::StatusOr<std::unique_ptr<DeviceTrace>> Device::StartTrace() {
  return absl::UnimplementedError(absl::StrCat("the device ", name(), " keeps no trace"));
}

int Device::RowBucket(int) const { return 0; }

}  // namespace sluice
