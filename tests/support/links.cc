#include "tests/support/links.h"

#include "src/device/cpu/cpu_peer_link.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/nccl_peer_link.h"
#endif

namespace sluice::testing {

absl::StatusOr<std::unique_ptr<PeerLinks>> TestPeerLinks(Device* device) {
#ifdef SLUICE_HAVE_CUDA
  if (device->name() == "cuda") return NewNcclPeerLinks(device);
#endif
  (void)device;
  return NewCpuPeerLinks();
}

}  // namespace sluice::testing
