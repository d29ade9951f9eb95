// A link moves messages between two processes, and refuses what it cannot carry.
#include "src/device/peer_link.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/crc32c.h"
#include "src/base/failpoint.h"
#include "src/device/device.h"
#include "tests/support/device.h"
#include "tests/support/links.h"
#include "tests/test_main.h"
#include "tests/unit/device/peer_link_support.h"

namespace sluice {
namespace {

using testing::AwaitStep;
using testing::Box;
using testing::BytesOf;
using testing::End;
using testing::JoinAndWait;
using testing::kMessage;
using testing::RunEnds;

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
  RunEnds("portable", JoinAndWait, [](End& end, Box* box) -> std::string {
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
