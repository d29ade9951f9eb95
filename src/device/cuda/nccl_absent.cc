// A build without NCCL's header has this in place of nccl_rank_group.cc and nccl_peer_link.cc.
#include "src/device/cuda/nccl_peer_link.h"
#include "src/device/cuda/nccl_rank_group.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<RankGroup>> JoinNcclRanks(const RankGroupOptions&, DeviceHealth*) {
  return absl::FailedPreconditionError(
      "several ranks on GPUs need NCCL, and nccl.h was not found when this program was built");
}

absl::StatusOr<std::unique_ptr<PeerLinks>> NewNcclPeerLinks(Device*) {
  return absl::FailedPreconditionError(
      "links to other nodes' GPUs need NCCL, and nccl.h was not found when this program was built");
}

}  // namespace sluice
