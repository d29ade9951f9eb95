#include "src/attention/attention_policy.h"

#include "absl/strings/str_cat.h"
#include "src/attention/latent/latent_views.h"

namespace sluice {

absl::Status CheckAttends(AttentionPolicy& policy, const CacheLayout& layout) {
  const bool latents = HasLatents(layout);
  if (latents ? policy.latent_attention() != nullptr : policy.kv_attention() != nullptr) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("policy: ", policy.name(), " does not attend to ",
                                                 latents ? "latent caches" : "keys and values",
                                                 ", which the model has: take policy full"));
}

}  // namespace sluice
