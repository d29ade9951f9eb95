#include "src/kv/manifest.h"

#include <string>

#include "absl/strings/str_join.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/kv/page_pool.h"

namespace sluice {
namespace {

std::string Describe(const CacheKind& k) {
  return absl::StrCat("{name ", k.name, ", ", std::string(DTypeName(k.element_type)), ", heads ",
                      k.heads, ", block_tokens ", k.block_tokens, ", part_bytes [",
                      absl::StrJoin(k.part_bytes, ", "), "], bytes_per_token ", k.bytes_per_token,
                      "}");
}

bool Same(const CacheKind& a, const CacheKind& b) {
  return a.name == b.name && a.element_type == b.element_type && a.heads == b.heads &&
         a.block_tokens == b.block_tokens && a.part_bytes == b.part_bytes &&
         a.bytes_per_token == b.bytes_per_token;
}

}  // namespace

absl::Status CheckManifest(const Manifest& m, const ManifestLimits& limits,
                           const CacheLayout& layout) {
  if (m.model_fingerprint != limits.model_fingerprint) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "manifest.model_fingerprint: this node serves ", limits.model_fingerprint, ", found ",
            m.model_fingerprint.empty() ? "none" : m.model_fingerprint.substr(0, 64),
            "; prefill with the same model")),
        reasons::kFingerprintMismatch);
  }
  if (!m.cache_kinds.empty()) {
    bool same = m.cache_kinds.size() == layout.kinds.size();
    for (size_t i = 0; same && i < layout.kinds.size(); ++i) {
      same = Same(m.cache_kinds[i], layout.kinds[i]);
    }
    if (!same) {
      std::string ours, theirs;
      for (const CacheKind& kind : layout.kinds) ours += Describe(kind);
      for (size_t i = 0; i < m.cache_kinds.size() && i < 8; ++i)
        theirs += Describe(m.cache_kinds[i]);
      return InvalidField("manifest.cache_kinds",
                          absl::StrCat("this node keeps ", ours, ", found ", theirs));
    }
  }
  const size_t prompt = m.prompt_token_ids.size();
  if (prompt == 0) return InvalidField("manifest.prompt_token_ids", "must not be empty");
  if (m.context_length == 0 || m.context_length > prompt) {
    return InvalidField("manifest.context_length",
                        absl::StrCat("must be between 1 and the ", prompt, " prompt tokens, found ",
                                     m.context_length));
  }
  if (m.max_new_tokens == 0) return InvalidField("manifest.max_new_tokens", "must be at least 1");
  if (prompt > limits.max_context) {
    return InvalidField("manifest.prompt_token_ids",
                        absl::StrCat("this node's context is ", limits.max_context,
                                     " tokens, found a prompt of ", prompt));
  }
  if (m.max_new_tokens > limits.max_context - prompt) {
    return InvalidField(
        "manifest.max_new_tokens",
        absl::StrCat("the context of ", limits.max_context, " leaves ", limits.max_context - prompt,
                     " after the prompt, found ", m.max_new_tokens));
  }
  for (size_t i = 0; i < prompt; ++i) {
    if (m.prompt_token_ids[i] >= limits.vocab_size) {
      return InvalidField("manifest.prompt_token_ids",
                          absl::StrCat("token ", i, " is ", m.prompt_token_ids[i],
                                       ", outside the vocabulary of ", limits.vocab_size));
    }
  }
  if (m.tenant.size() > kMaxNameBytes) {
    return InvalidField("manifest.tenant",
                        absl::StrCat("at most ", kMaxNameBytes, " bytes, found ", m.tenant.size()));
  }
  if (m.rendezvous_key.size() > kMaxNameBytes) {
    return InvalidField("rendezvous_key", absl::StrCat("at most ", kMaxNameBytes, " bytes, found ",
                                                       m.rendezvous_key.size()));
  }
  if (m.lease < absl::ZeroDuration() || m.lease > limits.max_lease) {
    return InvalidField("lease", absl::StrCat("must be positive and at most ",
                                              absl::FormatDuration(limits.max_lease), ", found ",
                                              absl::FormatDuration(m.lease)));
  }
  return absl::OkStatus();
}

absl::Status CheckCouldFit(const Footprint& need, const PagePool& dram, const PagePool& hbm) {
  const auto never = [&](const PagePool& pool, const TokensByKind& tokens) {
    const CacheLayout& layout = pool.layout();
    return InvalidField(
        "manifest", absl::StrCat("the sequence needs room for ", layout.Describe(tokens),
                                 " tokens (", layout.BytesFor(tokens), " bytes) in ", pool.name(),
                                 ", which holds ", layout.Describe(pool.Capacity()),
                                 " at most; shorten the prompt or max_new_tokens, or raise --",
                                 pool.name(), "-bytes"));
  };
  if (!dram.CouldEverFit(need.dram_tokens)) return never(dram, need.dram_tokens);
  if (!hbm.CouldEverFit(need.hbm_tokens)) return never(hbm, need.hbm_tokens);
  return absl::OkStatus();
}

}  // namespace sluice
