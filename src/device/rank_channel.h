// RankChannel carries messages from rank 0 to all other ranks of a node, in order: the plans of
// steps. It has two forms: JoinHostChannel's, through the shared memory of one host, and RankLink
// (src/service/ranks/), by gRPC between hosts. One thread of each rank uses it, but for AwaitDone,
// Report and ReportOf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/device/rank_group.h"

namespace sluice {

class RankChannel {
 public:
  virtual ~RankChannel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Ends the waits of this rank also when the group has failed, whose watch sees more. Call it
  // once, before any other thread uses the channel; the group outlives the channel's use.
  virtual void EndWith(const RankGroup* group) = 0;

  // Sends a message, of any length, to every other rank. UNAVAILABLE, reason RANK_LOST: a rank has
  // ended, or took nothing for the deadline. REQUIRES: rank 0.
  virtual absl::Status Send(absl::Span<const uint8_t> message) = 0;
  // Waits, for as long as rank 0 lives, and returns the next message, which is valid until the next
  // call. UNAVAILABLE, reason RANK_LOST: rank 0 has ended, or the group has failed. REQUIRES: not
  // rank 0.
  virtual absl::StatusOr<absl::Span<const uint8_t>> Receive() = 0;
  // Returns how many messages rank 0 has sent.
  virtual uint32_t sent() const = 0;
  // Says that all messages so far are carried out. REQUIRES: not rank 0.
  virtual void Done() = 0;
  // Waits until every other rank has said so of rank 0's first `messages`. UNAVAILABLE: one has
  // ended, or did not in time. Any thread. REQUIRES: rank 0.
  virtual absl::Status AwaitDone(uint32_t messages) = 0;
  // Leaves a number for rank 0, in the place of the one before. REQUIRES: not rank 0.
  virtual void Show(uint32_t number) = 0;
  // Returns the number that another rank left last, 0 at first. It waits for no other rank.
  // REQUIRES: rank 0.
  virtual uint32_t Shown(int rank) const = 0;
  // Waits until every rank has called it as often as this one. UNAVAILABLE: one has ended, or did
  // not come in time.
  virtual absl::Status Meet(absl::Duration timeout) = 0;

  // Enough for 1024 layers (src/server/policy_totals.cc).
  static constexpr size_t kMostReportBytes = size_t{32} << 10;
  // Leaves bytes for rank 0, in the place of those that the rank left before. It waits for no other
  // rank. Any thread, one at a time. REQUIRES: not rank 0; at most kMostReportBytes.
  virtual void Report(absl::Span<const uint8_t> bytes) = 0;
  // Returns what another rank left last, as of some tenths of a second ago; nothing if it has left
  // nothing, or leaves something just now. It waits for no other rank. Any thread. REQUIRES: rank
  // 0.
  virtual std::optional<std::vector<uint8_t>> ReportOf(int rank) const = 0;
};

struct HostChannelOptions {
  std::string name;  // another one than that of the ranks' group
  int rank = 0;
  int size = 1;
  absl::Duration join_timeout = absl::Seconds(60);
  // A sender waits this long for room: for a rank that lives and takes nothing.
  absl::Duration deadline = absl::Seconds(30);
};
// Waits until every rank of the host has joined. Returns HostRanks::Join's errors.
absl::StatusOr<std::unique_ptr<RankChannel>> JoinHostChannel(const HostChannelOptions& options);

}  // namespace sluice
