// A link fails alone: by an end that dies, that stands still, or that gives it up.
#include "src/device/peer_link.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"
#include "tests/unit/device/peer_link_support.h"

namespace sluice {
namespace {

using testing::AwaitStep;
using testing::Box;
using testing::BytesOf;
using testing::End;
using testing::JoinAndWait;
using testing::kDeadline;
using testing::kMessage;
using testing::Lost;
using testing::PinnedBytes;
using testing::RunEnds;

// The receiving end is left in the middle, and then makes another link on the same device.
void RunWithDeath(const std::string& kernels) {
  RunEnds(
      kernels,
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        const auto memory = end.device->Allocate(MemoryKind::kPinned, kMessage, "a message");
        const PeerLink::Piece piece = {memory->data(), 1000};
        absl::Status status = end.link->Receive({&piece, 1});
        if (status.ok()) status = end.link->Await().status();
        if (!status.ok()) return absl::StrCat("the first message: ", status.ToString());
        const absl::Time start = absl::Now();
        status = end.link->Receive({&piece, 1});
        if (status.ok()) status = end.link->Await().status();
        return Lost(status, absl::Now() - start, absl::ZeroDuration(), kDeadline + absl::Seconds(3),
                    *end.device);
      },
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        const Buffer bytes = PinnedBytes(*end.device, 1000);
        const PeerLink::Piece piece = {bytes.data(), bytes.bytes()};
        absl::Status status = end.link->Send({&piece, 1});
        if (status.ok()) status = end.link->Flush();
        if (!status.ok()) return status.ToString();
        raise(SIGKILL);
        return "";
      },
      {"", "died"});
}
TEST_CASE("an end that is killed fails the link and nothing else (cpu)",
          "[device][links][processes]") {
  RunWithDeath("portable");
}
TEST_CASE("an end that is killed fails the link and nothing else (cuda)",
          "[device][links][cuda][processes]") {
  RunWithDeath("cuda");
}

// Returns pieces of 8 bytes that fill the memory, the last one first: more of them than a GPU's
// link has lists for if three messages are under way.
constexpr size_t kScatteredBytes = 3 * 4096 * 8;
constexpr int kMessages = 3;
std::vector<PeerLink::Piece> Scattered(const Buffer& memory) {
  std::vector<PeerLink::Piece> pieces;
  for (size_t at = kScatteredBytes; at > 0; at -= 8) {
    pieces.push_back({memory.as<uint8_t>() + at - 8, 8});
  }
  return pieces;
}

// The sender lives and sends nothing; then both make another link, which works. The receiver is a
// rank of a group that gives operations of its own up sooner, and goes on.
void RunWithSilence(const std::string& kernels) {
  RunEnds(
      kernels,
      [](End& end, Box* box) -> std::string {
        RankGroupOptions ranks = testing::RankOptions(1);
        ranks.deadline = kDeadline / 2;
        const auto group = end.device->JoinRanks(ranks);
        if (!group.ok()) return group.status().ToString();
        end.Join(box, 1, kMessages + 1);
        if (!end.wrong.empty()) return end.wrong;
        std::vector<Buffer> memory;
        for (int i = 0; i < kMessages; ++i) {
          memory.push_back(PinnedBytes(*end.device, kScatteredBytes));
        }
        const absl::Time start = absl::Now();
        absl::Status status;
        for (const Buffer& to : memory) {
          if (status.ok()) status = end.link->Receive(Scattered(to));
        }
        if (status.ok()) status = end.link->Await().status();
        const std::string wrong = Lost(status, absl::Now() - start, kDeadline / 2,
                                       3 * kDeadline + absl::Seconds(3), *end.device);
        if (!wrong.empty()) return wrong;
        if (end.link->Receive(Scattered(memory[0])).ok()) return "a failed link takes more";
        end.link.reset();
        box->step.store(1);
        end.Join(box, 2, kMessages + 1);
        if (!end.wrong.empty()) return absl::StrCat("the second link: ", end.wrong);
        for (const Buffer& to : memory) {
          std::memset(to.data(), 0, to.bytes());
          status = end.link->Receive(Scattered(to));
          if (!status.ok()) return status.ToString();
        }
        for (size_t i = 0; i < memory.size(); ++i) {
          const auto crc = end.link->Await();
          if (!crc.ok()) return crc.status().ToString();
          const std::vector<uint8_t> want = BytesOf(static_cast<int>(i), kScatteredBytes);
          if (*crc != Crc32c(want)) return "the second link has other bytes";
          for (size_t at = 0; at < kScatteredBytes; at += 8) {
            const uint8_t* const landed = memory[i].as<uint8_t>() + kScatteredBytes - at - 8;
            if (std::memcmp(landed, want.data() + at, 8) != 0) return "bytes are elsewhere";
          }
        }
        return "";
      },
      [](End& end, Box* box) -> std::string {
        end.Join(box, 1, kMessages + 1);
        if (!end.wrong.empty()) return end.wrong;
        AwaitStep(box, 1);
        end.link.reset();
        end.Join(box, 2, kMessages + 1);
        if (!end.wrong.empty()) return absl::StrCat("the second link: ", end.wrong);
        std::vector<Buffer> memory;
        for (int i = 0; i < kMessages; ++i) {
          memory.push_back(PinnedBytes(*end.device, kScatteredBytes));
          std::memcpy(memory.back().data(), BytesOf(i, kScatteredBytes).data(), kScatteredBytes);
          const PeerLink::Piece piece = {memory.back().data(), kScatteredBytes};
          const absl::Status status = end.link->Send({&piece, 1});
          if (!status.ok()) return status.ToString();
        }
        return std::string(end.link->Flush().message());
      });
}
TEST_CASE("an end that sends nothing is given up by the deadline, and another link works (cpu)",
          "[device][links][processes]") {
  RunWithSilence("portable");
}
TEST_CASE("an end that sends nothing is given up by the deadline, and another link works (cuda)",
          "[device][links][cuda][processes]") {
  RunWithSilence("cuda");
}

// Streams of a device, of which each does a little work.
struct Streams {
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> done;

  void Add(Device& device, int count) {
    for (int i = 0; i < count; ++i) {
      streams.push_back(
          device.NewStream(i % 2 == 0 ? Device::StreamKind::kCompute : Device::StreamKind::kCopy));
      done.push_back(device.NewEvent());
    }
  }
  // Returns how many do not end their work soon.
  size_t HeldUp(const Buffer& hbm) {
    const absl::Time start = absl::Now();
    for (size_t i = 0; i < streams.size(); ++i) {
      streams[i]->Fill(hbm.as<uint8_t>() + i, 1, 1);
      streams[i]->Record(*done[i]);
    }
    const auto over = [](const std::unique_ptr<Event>& event) { return event->Ready(); };
    while (absl::Now() - start < kDeadline / 2 && !std::all_of(done.begin(), done.end(), over)) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return done.size() - static_cast<size_t>(std::count_if(done.begin(), done.end(), over));
  }
};

// Links whose senders send nothing hold up nothing else on the receiver's device: neither streams
// that are older than they nor newer ones.
void RunBesideSilence(const std::string& kernels) {
  constexpr int kLinks = 4, kStreams = 12;
  RunEnds(
      kernels,
      [](End& end, Box* box) -> std::string {
        Streams streams;
        streams.Add(*end.device, kStreams);
        const Buffer bytes = PinnedBytes(*end.device, kMessages * kMessage);
        const auto hbm = end.device->Allocate(MemoryKind::kDevice, 2 * kStreams, "a test");
        if (!hbm.ok()) return hbm.status().ToString();
        std::vector<std::unique_ptr<PeerLink>> links;
        for (int number = 1; number <= kLinks; ++number) {
          end.Join(box, number, kMessages);
          if (!end.wrong.empty()) return end.wrong;
          links.push_back(std::move(end.link));
        }
        streams.Add(*end.device, kStreams);
        std::string held;
        for (int waiting = 1; waiting <= kLinks; ++waiting) {
          for (size_t i = 0; i < kMessages; ++i) {
            const PeerLink::Piece piece = {bytes.as<uint8_t>() + i * kMessage, kMessage};
            const absl::Status asked =
                links[static_cast<size_t>(waiting) - 1]->Receive({&piece, 1});
            if (!asked.ok()) return asked.ToString();
          }
          if (const size_t found = streams.HeldUp(*hbm); found > 0) {
            absl::StrAppend(&held, found, " streams wait for ", waiting, " links; ");
          }
        }
        box->step.store(1);
        // An end that fails may wait for the GPU, and so for the kernels of the others.
        std::vector<std::thread> aborts;
        for (const auto& link : links) {
          aborts.emplace_back([&link] { link->Abort("the test is over"); });
        }
        for (std::thread& abort : aborts) abort.join();
        return held;
      },
      [](End& end, Box* box) -> std::string {
        std::vector<std::unique_ptr<PeerLink>> links;
        for (int number = 1; number <= kLinks; ++number) {
          end.Join(box, number, kMessages);
          if (!end.wrong.empty()) return end.wrong;
          links.push_back(std::move(end.link));
        }
        AwaitStep(box, 1);
        return "";
      });
}
TEST_CASE("links that wait hold up no other work of the device (cpu)",
          "[device][links][processes]") {
  RunBesideSilence("portable");
}
TEST_CASE("links that wait hold up no other work of the device (cuda)",
          "[device][links][cuda][processes]") {
  RunBesideSilence("cuda");
}

// The receiver takes nothing: the sender is held up once its ring is full, and gives up.
void RunWithDeafness(const std::string& kernels) {
  RunEnds(kernels, JoinAndWait, [](End& end, Box* box) -> std::string {
    end.Join(box);
    if (!end.wrong.empty()) return end.wrong;
    const Buffer bytes = PinnedBytes(*end.device, kMessage);
    const PeerLink::Piece piece = {bytes.data(), bytes.bytes()};
    const absl::Time start = absl::Now();
    absl::Status status;
    for (int i = 0; status.ok() && i < 10; ++i) {
      status = end.link->Send({&piece, 1});
    }
    const std::string wrong = Lost(status, absl::Now() - start, kDeadline / 2,
                                   3 * kDeadline + absl::Seconds(3), *end.device);
    box->step.store(1);
    return wrong;
  });
}
TEST_CASE("an end that takes nothing is given up by the deadline (cpu)",
          "[device][links][processes]") {
  RunWithDeafness("portable");
}
TEST_CASE("an end that takes nothing is given up by the deadline (cuda)",
          "[device][links][cuda][processes]") {
  RunWithDeafness("cuda");
}

TEST_CASE("another thread ends a wait at once by Abort", "[device][links][processes]") {
  RunEnds(
      "portable",
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        const auto memory = end.device->Allocate(MemoryKind::kPinned, kMessage, "a message");
        const PeerLink::Piece piece = {memory->data(), 1000};
        if (!end.link->Receive({&piece, 1}).ok()) return "no Receive";
        std::thread other([&] {
          absl::SleepFor(absl::Milliseconds(50));
          end.link->Abort("a test");
        });
        const absl::Time start = absl::Now();
        const absl::Status status = end.link->Await().status();
        other.join();
        box->step.store(1);
        return Lost(status, absl::Now() - start, absl::Milliseconds(20), kDeadline / 2,
                    *end.device);
      },
      JoinAndWait);
}

}  // namespace
}  // namespace sluice
