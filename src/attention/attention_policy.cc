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

absl::Status CheckVerifies(const AttentionPolicy& policy, int drafts) {
  const int most = policy.decode_rows_per_sequence();
  if (drafts < most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      most > 1
          ? absl::StrCat("speculation_tokens: expected at most ", most - 1, " with policy ",
                         policy.name(), ", found ", drafts)
          : absl::StrCat("speculation: expected none with policy ", policy.name(),
                         ", which computes one row of a sequence in a step: set it to none, or "
                         "take policy full or ess"));
}

}  // namespace sluice
