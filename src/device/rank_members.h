// RankMembers is what the ranks of a node know of one another, beside what they compute together:
// who lives, and why the group has failed. It has two forms: HostRanks, by the memory of one host,
// and RankLink (src/service/ranks/), by gRPC between hosts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace sluice {

class RankMembers {
 public:
  virtual ~RankMembers() = default;

  // Gives rank 0's bytes to every rank, which calls it with as many, kMaxSharedBytes at most; once.
  // UNAVAILABLE: rank 0 has ended, or did not come in time.
  virtual absl::Status Share(absl::Span<uint8_t> bytes, absl::Duration timeout) = 0;
  static constexpr size_t kMaxSharedBytes = 256;
  // Says that this rank needs the others no more, and waits until all have said so, or `timeout`
  // has passed, or the group has failed.
  virtual void Part(absl::Duration timeout) = 0;

  // Returns whether all ranks are on one host and see the same /dev/shm.
  virtual bool OneHost() const = 0;
  // Returns the number of ranks that have not ended; one less than all at most, once the group has
  // failed. Any thread.
  virtual int Alive() const = 0;
  // Fails the group if a rank has ended, or its process stands still for `still_limit`. Returns the
  // failure. One thread calls it, ten times a second or more.
  virtual absl::Status Look(absl::Duration still_limit) = 0;
  // Makes failure() not OK on every rank and ends all waits. Returns the failure that stays, which
  // is the first. Any thread.
  virtual absl::Status Fail(const absl::Status& why) = 0;
  // Returns OK, or why the group has failed. Cheap while OK. Any thread.
  virtual absl::Status failure() const = 0;
};

}  // namespace sluice
