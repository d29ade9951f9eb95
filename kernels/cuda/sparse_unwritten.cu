// Operators of sparse attention that no file here has yet: each moves out when it is written.
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {

cudaError_t LaunchDigest(const DigestParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchDigestScores(const DigestScoresParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchExactScores(const ExactScoresParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchPartialKeys(const PartialKeysParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchPartialScores(const PartialScoresParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchTopK(const TopKParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchSplit(const SplitParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchRecallDue(const RecallDueParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchRecall(const RecallParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchWriteThrough(const WriteThroughParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace sluice::kernels::cuda
