// A link alone, beside the bare sends and receives of a group of ranks and a copy within a node.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"
#include "src/device/rank_group.h"
#include "tests/bench/links/link_bench.h"
#include "tests/support/links.h"

namespace sluice::bench {
namespace {

// ncclSend and ncclRecv of the same messages on CUDA; shared memory on a CPU.
absl::Status Bare(Process& process, const Buffer& hbm, size_t message, Stream& stream,
                  const std::function<absl::Status()>& wait) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> group,
                          process.device().JoinRanks(process.options()));
  SLUICE_RETURN_IF_ERROR(process.Time("bare send and receive, HBM to HBM", hbm.bytes(), [&] {
    for (size_t at = 0; at < hbm.bytes(); at += message) {
      uint8_t* const data = hbm.as<uint8_t>() + at;
      if (process.sends()) {
        group->Send(stream, data, message, kReader);
      } else {
        group->Receive(stream, data, message, kSource);
      }
    }
    return wait();
  }));
  return absl::OkStatus();
}

absl::Status SendAll(PeerLink& link, const Buffer& from, size_t message) {
  for (size_t at = 0; at < from.bytes(); at += message) {
    const PeerLink::Piece piece = {from.as<uint8_t>() + at, message};
    SLUICE_RETURN_IF_ERROR(link.Send({&piece, 1}));
  }
  return link.Flush();
}

absl::Status ReceiveAll(PeerLink& link, const Buffer& to, size_t message) {
  const size_t count = to.bytes() / message;
  for (size_t n = 0, awaited = 0; awaited < count;) {
    if (n < count && n - awaited < static_cast<size_t>(link.depth())) {
      const PeerLink::Piece piece = {to.as<uint8_t>() + n * message, message};
      SLUICE_RETURN_IF_ERROR(link.Receive({&piece, 1}));
      ++n;
      continue;
    }
    SLUICE_RETURN_IF_ERROR(link.Await().status());
    ++awaited;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TimeLink(Process& process) {
  Device& device = process.device();
  const size_t message = static_cast<size_t>(process.flags().message_mib) << 20;
  const size_t bytes =
      std::max<size_t>(static_cast<size_t>(Layout().BytesFor(process.flags().tokens)) / message,
                       1) *
      message;
  SLUICE_ASSIGN_OR_RETURN(const Buffer hbm,
                          device.Allocate(MemoryKind::kDevice, bytes, "the caches"));
  SLUICE_ASSIGN_OR_RETURN(const Buffer pinned,
                          device.Allocate(MemoryKind::kPinned, bytes, "the caches"));
  std::memset(pinned.data(), 1, bytes);
  const auto stream = device.NewStream(Device::StreamKind::kCompute);
  const auto done = device.NewEvent();
  const auto wait = [&] {
    stream->Record(*done);
    done->Wait();
    return device.Health();
  };
  SLUICE_RETURN_IF_ERROR(Bare(process, hbm, message, *stream, wait));
  SLUICE_RETURN_IF_ERROR(process.Time("copy of own HBM to pinned DRAM, no link", bytes, [&] {
    stream->Copy(pinned.data(), hbm.data(), bytes);
    return wait();
  }));

  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<PeerLinks> links, testing::TestPeerLinks(&device));
  if (!process.sends()) {
    SLUICE_ASSIGN_OR_RETURN(const std::string id, links->NewId());
    process.Leave(id);
  }
  process.Meet();
  PeerLinkOptions options;
  options.id = process.Left();
  options.sends = process.sends();
  options.message_bytes = message;
  const absl::Time begin = absl::Now();
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<PeerLink> link, links->Join(options));
  if (!process.sends()) {
    std::printf("%-46s %8.1f ms  (%s)\n", "a link is made in",
                absl::ToDoubleMilliseconds(absl::Now() - begin), links->transport());
  }
  const auto move = [&](const Buffer& from, const Buffer& to) {
    return process.sends() ? SendAll(*link, from, message) : ReceiveAll(*link, to, message);
  };
  SLUICE_RETURN_IF_ERROR(
      process.Time("link, HBM to HBM, checksums", bytes, [&] { return move(hbm, hbm); }));
  SLUICE_RETURN_IF_ERROR(process.Time("link, HBM to pinned DRAM, checksums", bytes,
                                      [&] { return move(hbm, pinned); }));
  return process.Time("link, pinned to pinned DRAM, checksums", bytes,
                      [&] { return move(pinned, pinned); });
}

}  // namespace sluice::bench
