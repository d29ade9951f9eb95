// RankChannel carries messages from rank 0 to all other ranks of one host, in order, through shared
// memory: the plans of steps. One thread of each rank uses it, but for AwaitDone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/device/host_ranks.h"
#include "src/device/rank_group.h"

namespace sluice {

class RankChannel {
 public:
  struct Options {
    std::string name;  // another one than that of the ranks' group
    int rank = 0;
    int size = 1;
    absl::Duration join_timeout = absl::Seconds(60);
    // A sender waits this long for room: for a rank that lives and takes nothing.
    absl::Duration deadline = absl::Seconds(30);
  };
  // Waits until every rank has joined. Returns HostRanks::Join's errors.
  static absl::StatusOr<std::unique_ptr<RankChannel>> Join(const Options& options);

  // Ends the waits of this rank also when the group has failed, whose watch sees more. Call it
  // once, before any other thread uses the channel; the group outlives the channel's use.
  void EndWith(const RankGroup* group) { group_ = group; }

  // Sends a message, of any length, to every other rank. UNAVAILABLE, reason RANK_LOST: a rank has
  // ended, or took nothing for the deadline. REQUIRES: rank 0.
  absl::Status Send(absl::Span<const uint8_t> message);
  // Waits, for as long as rank 0 lives, and returns the next message, which is valid until the next
  // call. UNAVAILABLE, reason RANK_LOST: rank 0 has ended, or the group has failed. REQUIRES: not
  // rank 0.
  absl::StatusOr<absl::Span<const uint8_t>> Receive();
  // Returns how many messages rank 0 has sent.
  uint32_t sent() const { return messages_; }
  // Says that all messages so far are carried out. REQUIRES: not rank 0.
  void Done();
  // Waits until every other rank has said so of rank 0's first `messages`. UNAVAILABLE: one has
  // ended, or did not in time. Any thread. REQUIRES: rank 0.
  absl::Status AwaitDone(uint32_t messages);
  // Waits until every rank has called it as often as this one. UNAVAILABLE: one has ended, or did
  // not come in time.
  absl::Status Meet(absl::Duration timeout);

  int rank() const { return host_->rank(); }
  int size() const { return host_->size(); }

 private:
  struct Shared;
  RankChannel(const Options& options, std::unique_ptr<HostRanks> host);
  Shared& shared() const;
  // HostRanks::Await, which ends with the group as well.
  absl::Status Await(RankWord& word, uint32_t value, int who, absl::Duration timeout,
                     const char* what) const;
  absl::Status GroupStatus() const;
  // Write and read bytes of the ring, in as many pieces as it takes.
  absl::Status Write(const uint8_t* data, size_t bytes);
  absl::Status Read(uint8_t* data, size_t bytes);

  const Options options_;
  const std::unique_ptr<HostRanks> host_;
  const RankGroup* group_ = nullptr;
  uint32_t position_ = 0;  // bytes written or read so far; wraps
  uint32_t meetings_ = 0;
  uint32_t messages_ = 0;  // sent or received so far; wraps
  std::vector<uint8_t> message_;
};

}  // namespace sluice
