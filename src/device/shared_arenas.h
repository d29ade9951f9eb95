// SharedArenas is memory of the ranks of one host, one arena a rank, that rank 0 sees as well: it
// writes caches that come to the node to where each rank's heads are. An arena is the shared memory
// of its own rank, which touches it first, so it lies on that rank's NUMA node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/device/rank_channel.h"

namespace sluice {

class SharedArenas {
 public:
  // Makes this rank's arena, zeroed, and on rank 0 maps those of the others. All ranks call it at
  // the same time, with the same arguments. `name` is unique on the host, as in
  // RankGroupOptions. RESOURCE_EXHAUSTED: /dev/shm has no room; RankChannel::Meet's errors.
  static absl::StatusOr<std::unique_ptr<SharedArenas>> Make(RankChannel& channel,
                                                            const std::string& name, size_t bytes,
                                                            absl::Duration timeout);
  ~SharedArenas();
  SharedArenas(const SharedArenas&) = delete;
  SharedArenas& operator=(const SharedArenas&) = delete;

  size_t bytes() const { return bytes_; }
  uint8_t* own() const { return Of(rank_); }
  // Returns a rank's arena. REQUIRES: it is this rank's, or this is rank 0.
  uint8_t* Of(int rank) const;

 private:
  SharedArenas(int rank, int size, size_t bytes)
      : rank_(rank), bytes_(bytes), arenas_(static_cast<size_t>(size), nullptr) {}
  absl::Status MakeOwn(const std::string& name);
  absl::Status Map(const std::string& name, int rank);

  const int rank_;
  const size_t bytes_;
  std::vector<uint8_t*> arenas_;  // by rank; null: not mapped here
};

}  // namespace sluice
