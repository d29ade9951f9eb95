#include "src/attention/attention_policy.h"

#include "src/base/status_macros.h"

namespace sluice {

void AttentionPolicy::AppendLatent(Stream&, int, kernels::LatentAppendParams) {
  SLUICE_CHECK(false, name(), " is not for latent caches");
}
void AttentionPolicy::AppendIndex(Stream&, int, kernels::IndexAppendParams) {
  SLUICE_CHECK(false, name(), " is not for latent caches");
}
void AttentionPolicy::AttendLatent(Stream&, int, const LatentAttention&) {
  SLUICE_CHECK(false, name(), " is not for latent caches");
}

}  // namespace sluice
