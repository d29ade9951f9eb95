// Blocks that sequences share (src/kv/prefix_cache.h): what a sequence takes over from earlier ones
// when it enters the batch, and what it leaves to later ones.
//
// A sequence leaves only blocks whose caches are final. The last rows of a prompt are written once
// more by each sequence that has it, so they stay its own; and so does what follows a row that did
// not attend to everything, because a prompt's rows always do. Nobody finds a prompt's blocks
// before its sequence has got a token from them, and nobody any more once a sequence found one to
// be bad.
#include <algorithm>
#include <utility>

#include "src/attention/attention_policy.h"
#include "src/engine/engine_impl.h"
#include "src/metrics/metrics.h"

namespace sluice {

bool EngineImpl::TakePrefix(Sequence& sequence) {
  sequence.home = parts_.transfers->KnownBeginning(
      sequence.tenant, FirstTokens(sequence, sequence.prompt_length), sequence.total());
  if (sequence.home == nullptr) return false;
  const int64_t known = sequence.home->shared_tokens();
  sequence.reused_tokens = known;
  sequence.context_length = sequence.home_tokens = sequence.cached = known;
  return true;
}

void EngineImpl::LeavePrefix(Sequence& sequence) {
  sequence.home.reset();
  sequence.reused_tokens = 0;
  sequence.context_length = sequence.home_tokens = sequence.cached = 0;
}

void EngineImpl::CountReuse(int64_t asked, int64_t found) const {
  if (parts_.transfers->prefixes() == nullptr) return;
  parts_.metrics->prefix_queries.Add(static_cast<double>(asked));
  parts_.metrics->prefix_hits.Add(static_cast<double>(found));
  parts_.metrics->tokens(TokenKind::kReused).Add(static_cast<double>(found));
}

void EngineImpl::ShareHandedOver(Sequence& sequence) {
  PrefixCache* const prefixes = parts_.transfers->prefixes();
  if (prefixes == nullptr || sequence.home == nullptr || sequence.approximate ||
      !parts_.policy->shares_host_caches()) {
    return;
  }
  const int64_t most = parts_.transfers->ShareableTokens(sequence.prompt_length, sequence.total());
  Publish(sequence, std::min(most, sequence.home_tokens), *sequence.home);
}

// The blocks stay the sequence's own even where others have published the same: those might turn
// out to be bad, and it has its own.
void EngineImpl::Publish(Sequence& sequence, int64_t tokens, SequenceCache& cache) {
  parts_.transfers->prefixes(cache.pool()->rank())
      ->Publish(sequence.tenant, FirstTokens(sequence, tokens), PrefixCache::Readers::kSome, cache,
                sequence.id.value());
  sequence.unproven = true;
}

void EngineImpl::ProvePrefix(Sequence& sequence) {
  if (!sequence.unproven) return;
  sequence.unproven = false;
  for (const auto& prefixes : parts_.transfers->all_prefixes()) {  // no other has its number
    prefixes->Prove(sequence.tenant, FirstTokens(sequence, sequence.prompt_length),
                    sequence.id.value());
  }
}

void EngineImpl::ForgetPrefix(Sequence& sequence) {
  if (sequence.tokens.empty()) return;
  // Its blocks may have come from the same sender as what another rank has of them.
  for (const auto& prefixes : parts_.transfers->all_prefixes()) {
    prefixes->Forget(sequence.tenant, FirstTokens(sequence, sequence.prompt_length));
  }
}

void EngineImpl::SharePrompt(Sequence& sequence) {
  PrefixCache* const prefixes = parts_.transfers->prefixes();
  if (prefixes == nullptr || sequence.approximate || !parts_.policy->shares_host_caches()) return;
  SequenceCache* const home = parts_.policy->HostCacheOfPrompt(sequence.slot);
  if (home == nullptr) return;
  const int64_t most = parts_.transfers->ShareableTokens(sequence.prompt_length, sequence.total());
  Publish(sequence, most, *home);
}

void EngineImpl::PlanShare(Sequence& sequence, const FinishInfo& info) {
  PrefixCache* const prefixes = parts_.transfers->prefixes(RankOf(sequence));
  if (prefixes == nullptr || info.reason == FinishInfo::Reason::kError || !sequence.in_batch() ||
      sequence.approximate) {
    return;
  }
  // The last token's keys and values are left out, as in Keep.
  const int64_t exact = std::max(sequence.prompt_length, parts_.policy->exact_tokens());
  const int64_t written = std::min(sequence.cached, std::ssize(sequence.tokens) - 1);
  const int64_t unit = prefixes->unit_tokens();
  const int64_t tokens = std::min(written, exact) / unit * unit;
  if (tokens <= 0) return;
  SharedPrefix known = prefixes->Find(sequence.tenant, FirstTokens(sequence, tokens));
  if (known.tokens() == tokens) return;
  if (!parts_.policy->ReserveHostCopy(sequence.slot, tokens, std::move(known))) return;
  sequence.share_tokens = tokens;
  sequence.evicted = false;
}

}  // namespace sluice
