// Counts, for each unit, the caches that have it.
#include "src/kv/prefix_union.h"

#include <cstddef>
#include <utility>

namespace sluice {

PrefixUnion::PrefixUnion(std::vector<PrefixCache*> caches, PrefixObserver* observer,
                         const std::string& model)
    : caches_(std::move(caches)), observer_(observer) {
  for (PrefixCache* const cache : caches_) cache->SetObserver(this, model);
}

PrefixUnion::~PrefixUnion() {
  for (PrefixCache* const cache : caches_) cache->SetObserver(nullptr, "");
}

void PrefixUnion::AnnounceAll(absl::FunctionRef<void()> first, PrefixCache::Stored stored) {
  PrefixCache::AnnounceAll(
      caches_,
      [&] {
        absl::MutexLock lock(&mutex_);
        counts_.clear();
        first();
      },
      [&](std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
          absl::Span<const uint64_t> hashes) {
        absl::MutexLock lock(&mutex_);
        Count(parent, tokens, hashes, stored);
      });
}

void PrefixUnion::OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                           absl::Span<const uint64_t> hashes) {
  absl::MutexLock lock(&mutex_);
  Count(parent, tokens, hashes, [this](auto... arguments) { observer_->OnStored(arguments...); });
}

void PrefixUnion::Count(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                        absl::Span<const uint64_t> hashes, PrefixCache::Stored stored) {
  const auto unit = static_cast<size_t>(unit_tokens());
  const size_t units = hashes.size();
  // The units that no cache had are mostly the last ones, but another cache may just be losing a
  // run of them one node after the other.
  size_t begin = units;  // of the run of new units that ends before i
  for (size_t i = 0; i <= units; ++i) {
    if (i < units && ++counts_[hashes[i]] == 1) {
      if (begin == units) begin = i;
      continue;
    }
    if (begin < i) {
      stored(begin == 0 ? parent : hashes[begin - 1],
             tokens.subspan(begin * unit, (i - begin) * unit), hashes.subspan(begin, i - begin));
    }
    begin = units;
  }
}

void PrefixUnion::OnRemoved(absl::Span<const uint64_t> hashes) {
  absl::MutexLock lock(&mutex_);
  std::vector<uint64_t> gone;
  for (const uint64_t hash : hashes) {
    const auto found = counts_.find(hash);
    if (found == counts_.end() || --found->second > 0) continue;
    counts_.erase(found);
    gone.push_back(hash);
  }
  if (!gone.empty()) observer_->OnRemoved(gone);
}

}  // namespace sluice
