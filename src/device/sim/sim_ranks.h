// The ranks of a simulated group: devices of one process on one virtual clock, which one thread
// runs. An operation happens when every rank's stream has come to it; each rank then gets its
// result after a time of its own, drawn from the seed, so that ranks go on in any order. Operands
// are read when the rank comes and written when its time is over: code that changes them in between
// meets it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/rng.h"
#include "src/device/device_health.h"
#include "src/device/rank_group.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_stream.h"

namespace sluice {

struct SimRanksOptions {
  int size = 1;
  uint64_t seed = 0;
  absl::Duration time =
      absl::Microseconds(20);  // mean time from the last rank's coming to a result
  // The rank that is lost, with the number of the operation that it never comes to, counted from 0
  // over its own operations; -1: none is.
  int lost_rank = -1;
  int64_t lost_at = 0;
};

class SimRanks {
 public:
  // `clock` outlives this.
  SimRanks(const SimRanksOptions& options, SimClock* clock);
  ~SimRanks();
  SimRanks(const SimRanks&) = delete;
  SimRanks& operator=(const SimRanks&) = delete;

  // Joins; the others may join later. The group's failure fails `health`. Returns
  // CheckRankGroupOptions' error; ALREADY_EXISTS: the rank has joined; INVALID_ARGUMENT: another
  // size.
  absl::StatusOr<std::unique_ptr<RankGroup>> Join(const RankGroupOptions& options,
                                                  DeviceHealth* health);

 private:
  friend class SimRankGroup;
  struct Meeting;
  // Which operation of the group it is: (-1, -1, number), or (from, to, number) of a pair.
  using Key = std::tuple<int, int, int64_t>;

  void Come(const Key& key, int rank, int meets);
  void Finish(const Key& key, int rank);
  void Fail(const absl::Status& why);
  Meeting& MeetingOf(const Key& key);

  const SimRanksOptions options_;
  SimClock* const clock_;
  SplitMix64 random_;
  std::vector<DeviceHealth*> healths_;  // by rank; null: it has not joined or has left
  std::map<Key, std::unique_ptr<Meeting>> meetings_;  // those under way
  absl::Status status_;
  // Events of the clock that come when this is gone do nothing.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace sluice
