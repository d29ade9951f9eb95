// Launches of the collectives of kernels/peer_params.h, one kernel each. Every rank of a group
// launches the same ones in the same order. All blocks of a launch have to be able to run at one
// time. Each returns cudaErrorInvalidValue for what is outside the contract.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/peer_params.h"

namespace sluice::kernels::cuda {

cudaError_t LaunchPeerAllReduce(const PeerAllReduceParams& params, cudaStream_t stream);
cudaError_t LaunchPeerAllGather(const PeerAllGatherParams& params, cudaStream_t stream);
cudaError_t LaunchPeerAllToAll(const PeerAllToAllParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
