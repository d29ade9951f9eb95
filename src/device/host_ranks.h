// HostRanks is where the ranks of one host meet: a piece of shared memory, words in it that they
// wait for, and what they know of each other's lives. Groups of the CPU device move their data
// through it, CUDA's exchange NCCL's id there, and a leader shows its plans to the others.
//
// Rank 0 makes the memory under a name in /dev/shm, and takes the name away once all have joined.
// Each rank holds a lock on a byte of it that the kernel drops when the process ends, however it
// ends, so that the others see its death at once, also from another container. Ranks may also be
// threads of one process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/device/rank_members.h"

namespace sluice {

// A counter that one rank moves and others wait for. It lies in shared memory and begins as 0.
struct alignas(64) RankWord {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // those that a change must wake
};

class HostRanks final : public RankMembers {
 public:
  struct Options {
    std::string name;  // CheckRankGroupOptions
    int rank = 0;
    int size = 1;
    size_t bytes = 0;  // of shared memory; the same on every rank
    absl::Duration join_timeout = absl::Seconds(60);
  };
  // Waits until every rank has joined. UNAVAILABLE names those that did not in time;
  // ALREADY_EXISTS: the name, or the rank, is taken by a live process; INVALID_ARGUMENT: another
  // rank has other sizes; RESOURCE_EXHAUSTED: there is no room in /dev/shm.
  static absl::StatusOr<std::unique_ptr<HostRanks>> Join(const Options& options);
  // Leaves, in good order: who still waits for this rank fails, and nobody else.
  ~HostRanks() override;
  HostRanks(const HostRanks&) = delete;
  HostRanks& operator=(const HostRanks&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  // Returns the shared memory, zeroed at first, on a page boundary.
  uint8_t* data() const;

  // Sets a word and wakes those that wait for it.
  static void Post(RankWord& word, uint32_t value);
  // Waits until word >= value (by signed distance, since words wrap), which it is up to rank `who`
  // to bring about. Returns the group's failure, also one that begins here: UNAVAILABLE, if `who`
  // has ended, or if `deadline` has passed since the call. `what` says what is waited for:
  // "all-reduce".
  absl::Status Await(RankWord& word, uint32_t value, int who, absl::Duration deadline,
                     const char* what);
  // The same without a deadline: only the end of a rank ends the wait. False: `timeout` passed.
  absl::StatusOr<bool> AwaitFor(RankWord& word, uint32_t value, int who, absl::Duration timeout);

  // Returns a rank that has ended without leaving in good order, or -1.
  int Ended() const;
  // Shows that this rank's process runs, and returns a rank that has shown so before and not for
  // `limit`, or -1. Time in which the caller stood still does not count. One thread calls it, ten
  // times a second or more.
  int FindStill(absl::Duration limit);

  absl::Status Share(absl::Span<uint8_t> bytes, absl::Duration timeout) override;
  void Part(absl::Duration timeout) override;
  bool OneHost() const override { return true; }
  int Alive() const override;
  absl::Status Look(absl::Duration still_limit) override;
  absl::Status Fail(const absl::Status& why) override;
  absl::Status failure() const override;

 private:
  struct Header;
  HostRanks(const Options& options, int fd, Header* header);
  static absl::StatusOr<int> Create(const Options& options);
  // Returns -1 if there is no such memory yet.
  static absl::StatusOr<int> Open(const Options& options);
  absl::Status AwaitAll();
  // Returns whether the rank's lock is free.
  bool IsGone(int rank) const;
  static bool IsFree(int fd, int rank);

  struct Beat {
    uint32_t value = 0;
    absl::Time at;  // when it was first seen
  };

  const Options options_;
  const int fd_;
  Header* const header_;
  std::vector<Beat> beats_;  // by rank, as FindStill has seen them
  absl::Time last_look_ = absl::InfinitePast();
};

}  // namespace sluice
