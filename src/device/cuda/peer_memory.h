// PeerMemory maps memory of every rank of a host on every other (CUDA IPC), so that kernels of one
// rank write into the memory of another (kernels/peer_params.h). It has the area through which
// ranks exchange, and maps buffers that data goes straight into. Internal to src/device/cuda.
//
// All ranks make one, and map buffers, at the same time and in the same order. The thread that
// enqueues calls everything but Stop().
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/peer_params.h"
#include "src/device/device.h"
#include "src/device/host_ranks.h"

namespace sluice {

class PeerMemory {
 public:
  // The ranks meet here: it lies in shared memory, zeroed at first.
  struct Meeting {
    struct Offer {
      RankWord step;
      cudaIpcMemHandle_t handle;
      int64_t offset;  // of the memory in what the handle opens
      char bus_id[32];
      char why[160];  // why the rank cannot go on; empty: it can
    };
    Offer offers[kernels::kMaxPeerRanks];
  };

  // Makes and maps areas for operands of up to `bytes`. Waits for the other ranks for as long as
  // they live. FAILED_PRECONDITION, with the reason, on every rank if one cannot reach another's
  // memory; or the failure of `host`, which outlives this, as `meeting` does.
  static absl::StatusOr<std::unique_ptr<PeerMemory>> Make(HostRanks* host, Meeting* meeting,
                                                          int64_t bytes);
  // REQUIRES: nothing enqueued uses it, or Stop() was called. The other ranks may still write into
  // the area until they have unmapped it.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Maps a buffer of every rank, which may then be an all-to-all's `receive`. Errors as Make's.
  absl::Status Map(void* data, size_t bytes);
  // Finds where [data, data + bytes) is on every rank, if it was mapped.
  bool Find(const void* data, size_t bytes, void* (&at)[kernels::kMaxPeerRanks]) const;

  const kernels::PeerGroup& group() const { return group_; }
  // Returns whether an area takes operands of `bytes`.
  bool Takes(int64_t bytes) const { return bytes <= bytes_; }

  // Ends the operations that wait, and has later ones do nothing. Any thread.
  void Stop();
  // Unmaps what is another rank's. Nothing may be enqueued any more.
  void Unmap();

 private:
  struct Mapped {
    void* at[kernels::kMaxPeerRanks];
    size_t bytes;
  };
  PeerMemory(HostRanks* host, Meeting* meeting, int64_t bytes);
  absl::Status Meet();
  // Shows the other ranks [data, data + bytes), and maps theirs.
  absl::StatusOr<Mapped> Exchange(void* data, size_t bytes);
  absl::Status Offer(void* data);
  absl::Status Open(int rank, void** at);

  HostRanks* const host_;
  Meeting* const meeting_;
  const int64_t bytes_;
  uint32_t step_ = 0;
  Buffer area_;
  uint32_t* stop_ = nullptr;  // pinned
  kernels::PeerGroup group_{};
  std::vector<Mapped> mapped_;
  std::vector<void*> opened_;  // what cudaIpcCloseMemHandle takes
};

}  // namespace sluice
