// Operators without a kernel yet. Whoever writes one takes its line out of here.
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {

cudaError_t LaunchLatentAppend(const LatentAppendParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchIndexAppend(const IndexAppendParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchIndexQuery(const IndexQueryParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchIndexLogits(const IndexLogitsParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchMlaQuery(const MlaQueryParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchHeadLinear(const HeadLinearParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchAdmit(const AdmitParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchRoute(const RouteParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t LaunchExpertLinear(const ExpertLinearParams&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchCombine(const CombineParams&, cudaStream_t) { return cudaErrorNotSupported; }

}  // namespace sluice::kernels::cuda
