// The part of PrefixCache that tells an observer what it has, and the hashes that name blocks.
#include "src/kv/prefix_events.h"

#include <utility>

#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/kv/prefix_cache.h"

namespace sluice {
namespace {

// Stirs a value into a hash: the step of a random generator whose state is both.
uint64_t Stir(uint64_t hash, uint64_t value) { return SplitMix64(hash ^ value)(); }

bool IsRoot(const PrefixNode& node) { return node.parent == nullptr; }

// Calls visit for a node and for all nodes below it, parents first.
template <typename Node, typename Visit>
void ForEachBelow(Node& top, Visit&& visit) {
  std::vector<Node*> left = {&top};
  while (!left.empty()) {
    Node* const node = left.back();
    left.pop_back();
    visit(*node);
    for (const auto& [unit, child] : node->children) left.push_back(child.get());
  }
}

std::optional<uint64_t> ParentHash(const PrefixNode& node) {
  if (IsRoot(*node.parent)) return std::nullopt;
  return node.parent->hashes.back();
}

}  // namespace

uint64_t PrefixSeed(std::string_view model, std::string_view tenant) {
  uint64_t hash = Stir(0, model.size());  // so that no model and tenant are another pair's
  for (const std::string_view part : {model, tenant}) {
    for (const char c : part) hash = Stir(hash, static_cast<uint8_t>(c));
  }
  return hash;
}

std::vector<uint64_t> PrefixHashes(uint64_t parent, absl::Span<const int32_t> tokens,
                                   int64_t unit) {
  std::vector<uint64_t> hashes;
  hashes.reserve(tokens.size() / static_cast<size_t>(unit));
  uint64_t hash = parent;
  for (int64_t i = 0; i < std::ssize(tokens); ++i) {
    hash = Stir(hash, static_cast<uint32_t>(tokens[static_cast<size_t>(i)]));
    if ((i + 1) % unit == 0) hashes.push_back(hash);
  }
  return hashes;
}

void PrefixCache::SetObserver(PrefixObserver* observer, const std::string& model) {
  absl::MutexLock lock(&mutex_);
  SLUICE_CHECK(observer == nullptr || (roots_.empty() && detached_.empty()),
               "blocks are named when they are published");
  observer_ = observer;
  model_ = model;
}

void PrefixCache::Name(const std::string& tenant, PrefixNode* node) const {
  if (observer_ == nullptr) return;
  const uint64_t parent =
      IsRoot(*node->parent) ? PrefixSeed(model_, tenant) : node->parent->hashes.back();
  node->hashes = PrefixHashes(parent, node->tokens, unit_);
}

bool PrefixCache::IsAttached(const PrefixNode& node) const {
  const PrefixNode* root = &node;
  while (root->parent != nullptr) root = root->parent;
  return !detached_.contains(root);
}

void PrefixCache::Announce(PrefixNode* node) {
  if (observer_ == nullptr || node->proof != 0 || !IsAttached(*node)) return;
  // Nobody finds it before the node in front, whose proof announces both.
  if (!IsRoot(*node->parent) && !node->parent->announced) return;
  ForEachBelow(*node, [this](PrefixNode& below) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (below.announced || below.proof != 0) return;
    if (!IsRoot(*below.parent) && !below.parent->announced) return;
    below.announced = true;
    observer_->OnStored(ParentHash(below), below.tokens, below.hashes);
  });
}

void PrefixCache::Retract(PrefixNode* top) {
  if (observer_ == nullptr) return;
  ForEachBelow(*top, [this](PrefixNode& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(node.announced, false)) observer_->OnRemoved(node.hashes);
  });
}

void PrefixCache::AnnounceOwn(Stored stored) const {
  for (const auto& [tenant, root] : roots_) {
    ForEachBelow(*root, [&](const PrefixNode& node) {
      if (node.announced) stored(ParentHash(node), node.tokens, node.hashes);
    });
  }
}

void PrefixCache::AnnounceAll(absl::Span<PrefixCache* const> caches,
                              absl::FunctionRef<void()> first,
                              Stored stored) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (const PrefixCache* const cache : caches) cache->mutex_.Lock();
  first();
  for (const PrefixCache* const cache : caches) cache->AnnounceOwn(stored);
  for (const PrefixCache* const cache : caches) cache->mutex_.Unlock();
}

}  // namespace sluice
