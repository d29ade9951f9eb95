// A link moves messages between two processes, and fails alone: by an end that dies, that stands
// still, or that gives it up.
#include "src/device/peer_link.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "tests/support/device.h"
#include "tests/support/links.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr size_t kMessage = 100'000;
constexpr absl::Duration kDeadline = absl::Seconds(2);

// Memory that both processes see.
struct Box {
  std::atomic<int> ready;
  std::atomic<int> step;
  char id[1024];
};
Box* NewBox() {
  void* const shared =
      mmap(nullptr, sizeof(Box), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  return new (shared) Box{};
}
void AwaitStep(const Box* box, int step) {
  while (box->step.load() < step) absl::SleepFor(absl::Milliseconds(1));
}

// One end of a link, on a device of its own.
struct End {
  std::unique_ptr<Device> device;
  std::unique_ptr<PeerLinks> links;
  std::unique_ptr<PeerLink> link;
  std::string wrong;

  End(const std::string& kernels, int rank) {
    auto made = testing::TestDevice(kernels);
    if (!made.ok()) {
      wrong = std::string(made.status().message());
      return;
    }
    device = *std::move(made);
    auto found = testing::TestPeerLinks(device.get());
    if (found.ok()) {
      links = *std::move(found);
    } else {
      wrong = std::string(found.status().message());
    }
    sends = rank == 1;
  }
  // Rank 0 makes the id, the `number`th of the box.
  void Join(Box* box, int number = 1, int depth = 3) {
    if (!wrong.empty()) return;
    if (!sends) {
      const auto id = links->NewId();
      if (!id.ok()) {
        wrong = std::string(id.status().message());
        return;
      }
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
  bool sends = false;
};

std::vector<uint8_t> BytesOf(int message, size_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>(i * 7 + i / 251 + message * 13);
  return out;
}

// Returns the bytes of message 0 in memory that the device reaches.
Buffer PinnedBytes(Device& device, size_t bytes) {
  auto buffer = device.Allocate(MemoryKind::kPinned, bytes, "a message");
  SLUICE_CHECK(buffer.ok());
  std::memcpy(buffer->data(), BytesOf(0, bytes).data(), bytes);
  return *std::move(buffer);
}

// Returns what is wrong with an ending of a link on a device that goes on.
std::string Lost(const absl::Status& status, absl::Duration took, absl::Duration least,
                 absl::Duration most, const Device& device) {
  if (!absl::IsUnavailable(status)) return absl::StrCat("ended with ", status.ToString());
  if (took < least || took > most) return absl::StrCat("took ", absl::FormatDuration(took));
  if (!device.Health().ok()) return "the device failed with the link";
  return "";
}

using Body = std::function<std::string(End& end, Box* box)>;
void RunEnds(const std::string& kernels, const Body& receiver, const Body& sender,
             std::vector<std::string> expected = {"", ""}) {
  const bool cuda = kernels == "cuda";
  if (cuda) {
    if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  }
  Box* const box = NewBox();
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(2),
      [&](const RankGroupOptions& options) -> std::string {
        End end(kernels, options.rank);
        if (!end.wrong.empty()) return end.wrong;
        return options.rank == 0 ? receiver(end, box) : sender(end, box);
      },
      /*share_gpu=*/cuda);
  CHECK(wrong == expected);
  munmap(box, sizeof(Box));
}

// Messages of every size and in every division arrive in order, in each kind of memory.
const std::vector<size_t> kSizes = {1,    3,     64,   4096, kMessage - 3, kMessage,
                                    5000, 99999, 4097, 2,    70000,        12};

std::string SendAll(End& end, Box* box) {
  end.Join(box);
  if (!end.wrong.empty()) return end.wrong;
  std::vector<Buffer> buffers;
  const int count = 3 * static_cast<int>(kSizes.size());
  int told = 0;  // messages whose checksum at the sender is known
  const auto check = [&]() -> std::string {
    const absl::StatusOr<uint32_t> crc = end.link->Sent();
    if (!crc.ok()) return crc.status().ToString();
    const size_t bytes = kSizes[static_cast<size_t>(told) % kSizes.size()];
    if (*crc == Crc32c(BytesOf(told, bytes))) return ++told, "";
    return absl::StrCat("message ", told, " left with another checksum");
  };
  for (int n = 0; n < count; ++n) {
    const size_t bytes = kSizes[static_cast<size_t>(n) % kSizes.size()];
    const std::vector<uint8_t> made = BytesOf(n, bytes);
    const bool checksum = n < count / 2;
    while (checksum ? n - told == end.link->depth() : told < count / 2) {
      if (const std::string wrong = check(); !wrong.empty()) return wrong;
    }
    auto buffer = end.device->Allocate(n % 3 == 1 ? MemoryKind::kDevice : MemoryKind::kPinned,
                                       bytes, "a message");
    if (!buffer.ok()) return std::string(buffer.status().message());
    const auto stream = end.device->NewStream(Device::StreamKind::kCopy);
    const auto done = end.device->NewEvent();
    auto pinned = end.device->Allocate(MemoryKind::kPinned, bytes, "a message");
    std::memcpy(pinned->data(), made.data(), bytes);
    stream->Copy(buffer->data(), pinned->data(), bytes);
    stream->Record(*done);
    done->Wait();
    uint8_t* const data = buffer->as<uint8_t>();
    buffers.push_back(*std::move(buffer));
    std::vector<PeerLink::Piece> pieces = {{data, bytes}};
    if (n % 2 == 1 && bytes > 10)
      pieces = {{data, bytes / 3}, {data + bytes / 3, bytes - bytes / 3}};
    const absl::Status sent = end.link->Send(pieces, checksum);
    if (!sent.ok()) return sent.ToString();
  }
  return end.link->Flush().ok() ? "" : "the last messages were not taken";
}

std::string ReceiveAll(End& end, Box* box) {
  end.Join(box);
  if (!end.wrong.empty()) return end.wrong;
  const int count = 3 * static_cast<int>(kSizes.size());
  std::vector<Buffer> buffers;
  std::vector<MemoryKind> kinds;
  int awaited = 0;
  const auto await = [&]() -> std::string {
    const size_t bytes = kSizes[static_cast<size_t>(awaited) % kSizes.size()];
    const absl::StatusOr<uint32_t> crc = end.link->Await();
    if (!crc.ok()) return crc.status().ToString();
    std::vector<uint8_t> want = BytesOf(awaited, bytes);
    if (*crc != Crc32c(want)) return absl::StrCat("message ", awaited, " has another checksum");
    auto found = end.device->Allocate(MemoryKind::kPinned, bytes + 2, "a message");
    const auto stream = end.device->NewStream(Device::StreamKind::kCopy);
    const auto done = end.device->NewEvent();
    stream->Copy(found->data(), buffers[static_cast<size_t>(awaited)].data(), bytes + 2);
    stream->Record(*done);
    done->Wait();
    if (awaited % 4 == 3) {  // its middle was dropped
      std::fill(want.begin() + static_cast<int64_t>(bytes / 4),
                want.begin() + static_cast<int64_t>(bytes / 2), 0);
    }
    if (std::memcmp(found->data(), want.data(), bytes) != 0) {
      return absl::StrCat("message ", awaited, " has other bytes");
    }
    if (found->as<uint8_t>()[bytes] != 0) return "a byte behind a message was written";
    ++awaited;
    return "";
  };
  for (int n = 0; n < count; ++n) {
    const size_t bytes = kSizes[static_cast<size_t>(n) % kSizes.size()];
    auto buffer = end.device->Allocate(n % 2 == 0 ? MemoryKind::kPinned : MemoryKind::kDevice,
                                       bytes + 2, "a message");
    if (!buffer.ok()) return std::string(buffer.status().message());
    buffers.push_back(*std::move(buffer));
    uint8_t* const data = buffers.back().as<uint8_t>();
    std::vector<PeerLink::Piece> pieces = {{data, bytes}};
    if (n % 4 == 3) {
      pieces = {{data, bytes / 4},
                {nullptr, bytes / 2 - bytes / 4},
                {data + bytes / 2, bytes - bytes / 2}};
    }
    if (n - awaited == end.link->depth()) {
      const std::string wrong = await();
      if (!wrong.empty()) return wrong;
    }
    const absl::Status asked = end.link->Receive(pieces);
    if (!asked.ok()) return asked.ToString();
  }
  while (awaited < count) {
    const std::string wrong = await();
    if (!wrong.empty()) return wrong;
  }
  return "";
}

TEST_CASE("messages of a link arrive whole, in order and with their checksums (cpu)",
          "[device][links][processes]") {
  RunEnds("portable", ReceiveAll, SendAll);
}
TEST_CASE("messages of a link arrive whole, in order and with their checksums (cuda)",
          "[device][links][cuda][processes]") {
  RunEnds("cuda", ReceiveAll, SendAll);
}

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
  constexpr int kLinks = 6, kStreams = 12;
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
  RunEnds(
      kernels,
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (end.wrong.empty()) AwaitStep(box, 1);
        return end.wrong;
      },
      [](End& end, Box* box) -> std::string {
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
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (end.wrong.empty()) AwaitStep(box, 1);
        return end.wrong;
      });
}

TEST_CASE("a message of another size than was asked for fails the link (cpu)",
          "[device][links][processes]") {
  RunEnds(
      "portable",
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        const auto memory = end.device->Allocate(MemoryKind::kPinned, kMessage, "a message");
        const PeerLink::Piece piece = {memory->data(), 1000};
        if (!end.link->Receive({&piece, 1}).ok()) return "no Receive";
        const absl::Status status = end.link->Await().status();
        box->step.store(1);
        return status.message().find("1000 bytes was expected, found 999") != std::string::npos
                   ? ""
                   : status.ToString();
      },
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        std::vector<uint8_t> bytes(999);
        const PeerLink::Piece piece = {bytes.data(), bytes.size()};
        (void)end.link->Send({&piece, 1});
        AwaitStep(box, 1);
        return "";
      });
}

TEST_CASE("what a link cannot carry is refused before the other end hears of it",
          "[device][links][processes]") {
  RunEnds(
      "portable",
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (end.wrong.empty()) AwaitStep(box, 1);
        return end.wrong;
      },
      [](End& end, Box* box) -> std::string {
        end.Join(box);
        if (!end.wrong.empty()) return end.wrong;
        std::vector<uint8_t> bytes(kMessage + 1);
        const PeerLink::Piece large = {bytes.data(), bytes.size()};
        const bool refused = absl::IsInvalidArgument(end.link->Send({&large, 1})) &&
                             absl::IsInvalidArgument(end.link->Send({}));
        std::string wrong = refused ? "" : "it was taken";
#ifndef SLUICE_NO_FAILPOINTS
        ScopedFailpoints broken("link.send=error");
        const PeerLink::Piece small = {bytes.data(), 1};
        if (!absl::IsUnavailable(end.link->Send({&small, 1}))) {
          wrong = "the failpoint does not break the link";
        }
#endif
        box->step.store(1);
        return wrong;
      });
}

TEST_CASE("ids that fit no link here are refused with the reason", "[device][links]") {
  const auto device = testing::TestDevice("portable");
  REQUIRE(device.ok());
  const auto links = testing::TestPeerLinks(device->get());
  REQUIRE(links.ok());
  const auto id = (*links)->NewId();
  REQUIRE(id.ok());
  CHECK((*links)->CheckId(*id).ok());
  const auto why = [&](const std::string& of) {
    const absl::Status status = (*links)->CheckId(of);
    CHECK(absl::IsFailedPrecondition(status));
    return std::string(status.message());
  };
  CHECK(why("nccl:00").find("another kind") != std::string::npos);
  CHECK(why("shm:0-0:sluice-link-").find("another host") != std::string::npos);
  CHECK(why(id->substr(0, id->size() - 1)).find("names no memory") != std::string::npos);
  CHECK(why(id->substr(0, id->size() - 2) + "/x").find("names no memory") != std::string::npos);
  PeerLinkOptions options;
  options.id = *id;
  options.join_timeout = absl::Milliseconds(50);
  CHECK(absl::IsUnavailable((*links)->Join(options).status()));
  options.sends = true;
  CHECK(absl::IsUnavailable((*links)->Join(options).status()));
  options.depth = 0;
  CHECK(absl::IsInvalidArgument((*links)->Join(options).status()));
  options.depth = 1;
  options.message_bytes = 0;
  CHECK(absl::IsInvalidArgument((*links)->Join(options).status()));
}

}  // namespace
}  // namespace sluice
