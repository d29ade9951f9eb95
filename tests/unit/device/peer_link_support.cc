#include "tests/unit/device/peer_link_support.h"

#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "tests/support/device.h"
#include "tests/support/links.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice::testing {
namespace {

Box* NewBox() {
  void* const shared =
      mmap(nullptr, sizeof(Box), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  return new (shared) Box{};
}

}  // namespace

void AwaitStep(const Box* box, int step) {
  while (box->step.load() < step) absl::SleepFor(absl::Milliseconds(1));
}

End::End(const std::string& kernels, int rank) {
  auto made = TestDevice(kernels);
  if (!made.ok()) {
    wrong = std::string(made.status().message());
    return;
  }
  device = *std::move(made);
  auto found = TestPeerLinks(device.get());
  if (found.ok()) {
    links = *std::move(found);
  } else {
    wrong = std::string(found.status().message());
  }
  sends = rank == 1;
}

void End::Join(Box* box, int number, int depth) {
  if (!wrong.empty()) return;
  if (!sends) {
    const auto id = links->NewId();
    if (!id.ok()) {
      wrong = std::string(id.status().message());
      return;
    }
    SLUICE_CHECK(id->size() < sizeof(box->id));
    std::strcpy(box->id, id->c_str());
    box->ready.store(number);
  }
  while (box->ready.load() < number) absl::SleepFor(absl::Milliseconds(1));
  PeerLinkOptions options;
  options.id = box->id;
  options.sends = sends;
  options.message_bytes = kMessage;
  options.depth = depth;
  options.deadline = kDeadline;
  const absl::Status fits = links->CheckId(options.id);
  auto joined = links->Join(options);
  if (!fits.ok() || !joined.ok()) {
    wrong = absl::StrCat(fits.ToString(), ", ", joined.status().ToString());
    return;
  }
  link = *std::move(joined);
}

std::string JoinAndWait(End& end, Box* box) {
  end.Join(box);
  if (end.wrong.empty()) AwaitStep(box, 1);
  return end.wrong;
}

std::vector<uint8_t> BytesOf(int message, size_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>(i * 7 + i / 251 + message * 13);
  return out;
}

Buffer PinnedBytes(Device& device, size_t bytes) {
  auto buffer = device.Allocate(MemoryKind::kPinned, bytes, "a message");
  SLUICE_CHECK(buffer.ok());
  std::memcpy(buffer->data(), BytesOf(0, bytes).data(), bytes);
  return *std::move(buffer);
}

std::string Lost(const absl::Status& status, absl::Duration took, absl::Duration least,
                 absl::Duration most, const Device& device) {
  if (!absl::IsUnavailable(status)) return absl::StrCat("ended with ", status.ToString());
  if (took < least || took > most) return absl::StrCat("took ", absl::FormatDuration(took));
  if (!device.Health().ok()) return "the device failed with the link";
  return "";
}

void RunEnds(const std::string& kernels, const EndBody& receiver, const EndBody& sender,
             const std::vector<std::string>& expected) {
  const bool cuda = kernels == "cuda";
  if (cuda) {
    if (const std::string why = WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  }
  Box* const box = NewBox();
  const auto wrong = RunRankProcesses(
      RankOptions(2),
      [&](const RankGroupOptions& options) -> std::string {
        End end(kernels, options.rank);
        if (!end.wrong.empty()) return end.wrong;
        return options.rank == 0 ? receiver(end, box) : sender(end, box);
      },
      /*share_gpu=*/cuda);
  CHECK(wrong == expected);
  munmap(box, sizeof(Box));
}

}  // namespace sluice::testing
