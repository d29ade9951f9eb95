#include "src/kv/prefix_cache.h"

#include <algorithm>
#include <numeric>

#include "src/base/status_macros.h"
#include "src/kv/sequence_cache.h"

namespace sluice {
namespace {

int64_t UnitOf(const CacheLayout& layout) {
  int64_t unit = 1;
  for (const CacheKind& kind : layout.kinds) unit = std::lcm(unit, int64_t{kind.block_tokens});
  return unit;
}

// Cuts what is behind the first `count` entries off and returns it.
template <typename T>
std::vector<T> CutOff(std::vector<T>* list, int64_t count) {
  std::vector<T> rest(list->begin() + count, list->end());
  list->resize(static_cast<size_t>(count));
  return rest;
}

}  // namespace

SharedPrefix& SharedPrefix::operator=(SharedPrefix&& other) noexcept {
  if (this != &other) {
    Reset();
    cache_ = std::exchange(other.cache_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
    tokens_ = std::exchange(other.tokens_, 0);
    pages_ = std::move(other.pages_);
  }
  return *this;
}

void SharedPrefix::Reset() {
  if (node_ != nullptr) cache_->EndUse(node_);
  node_ = nullptr;
  tokens_ = 0;
  pages_.clear();
  cache_.reset();
}

std::shared_ptr<PrefixCache> PrefixCache::Create(PagePool* pool) {
  std::shared_ptr<PrefixCache> cache(new PrefixCache(pool));
  pool->SetReclaimer([weak = std::weak_ptr(cache)](const PagePool::PagesByKind& pages) {
    const std::shared_ptr<PrefixCache> alive = weak.lock();
    return alive != nullptr && alive->Reclaim(pages);
  });
  return cache;
}

PrefixCache::PrefixCache(PagePool* pool)
    : pool_(pool), kinds_(pool->layout().kinds.size()), unit_(UnitOf(pool->layout())) {
  for (const CacheKind& kind : pool->layout().kinds) blocks_.push_back(unit_ / kind.block_tokens);
  owned_ = pool->TryReserve(0);
}

PrefixCache::~PrefixCache() {
  pool_->SetReclaimer(nullptr);
  absl::MutexLock lock(&mutex_);
  while (!loose_.empty()) Drop(loose_.begin()->second, UnitsOf(*loose_.begin()->second));
  SLUICE_CHECK(roots_.empty() && detached_.empty(), "shares keep their cache");
}

std::vector<int32_t> PrefixCache::UnitAt(absl::Span<const int32_t> tokens, int64_t unit) const {
  const auto begin = tokens.begin() + unit * unit_;
  return {begin, begin + unit_};
}

PrefixNode* PrefixCache::ChildAt(Place place, absl::Span<const int32_t> tokens) const {
  const auto found = place.node->children.find(UnitAt(tokens, place.units));
  return found == place.node->children.end() ? nullptr : found->second.get();
}

PrefixCache::Place PrefixCache::Follow(Place from, absl::Span<const int32_t> tokens, int64_t most) {
  while (from.units < most) {
    PrefixNode* child = ChildAt(from, tokens);
    if (child == nullptr || child->proof != 0) break;
    const int64_t units = std::min(UnitsOf(*child), most - from.units);
    const auto begin = child->tokens.begin();
    const auto differs =
        std::mismatch(begin, begin + units * unit_, tokens.begin() + from.units * unit_).first;
    const int64_t same = (differs - begin) / unit_;
    if (same < UnitsOf(*child)) child = Split(child, same);
    from = {child, from.units + same};
  }
  return from;
}

PrefixNode* PrefixCache::Split(PrefixNode* node, int64_t units) {
  std::unique_ptr<PrefixNode>& edge = node->parent->children.at(UnitAt(node->tokens, 0));
  std::unique_ptr<PrefixNode> behind = std::move(edge);
  edge = std::make_unique<PrefixNode>();
  PrefixNode* const front = edge.get();
  front->parent = node->parent;
  front->users = node->users;
  front->last_use = node->last_use;
  front->proof = node->proof;
  std::vector<int32_t> rest = CutOff(&node->tokens, units * unit_);
  front->tokens = std::exchange(node->tokens, std::move(rest));
  for (size_t i = 0; i < node->pages.size(); ++i) {
    std::vector<int32_t> pages = CutOff(&node->pages[i], units * blocks_[i % kinds_]);
    front->pages.push_back(std::exchange(node->pages[i], std::move(pages)));
  }
  if (!node->hashes.empty()) {
    std::vector<uint64_t> hashes = CutOff(&node->hashes, units);
    front->hashes = std::exchange(node->hashes, std::move(hashes));
  }
  front->announced = node->announced;
  node->parent = front;
  front->children.emplace(UnitAt(node->tokens, 0), std::move(behind));
  ++statistics_.nodes;
  return front;
}

void PrefixCache::SetIdle(const PrefixNode& node, bool idle) {
  for (size_t i = 0; i < node.pages.size(); ++i) pool_->SetIdle(i % kinds_, node.pages[i], idle);
  const int64_t tokens = std::ssize(node.tokens);
  statistics_.idle_tokens += idle ? tokens : -tokens;
}

void PrefixCache::Use(PrefixNode* node, const PrefixNode* above) {
  for (; node != above; node = node->parent) {
    if (IsLoose(*node)) loose_.erase({node->last_use, node});
    if (node->users++ == 0) SetIdle(*node, false);
  }
}

void PrefixCache::EndUse(PrefixNode* node) {
  absl::MutexLock lock(&mutex_);
  const uint64_t now = ++uses_;
  for (; node->parent != nullptr; node = node->parent) {
    node->last_use = now;
    if (--node->users > 0) continue;
    SetIdle(*node, true);
    if (IsLoose(*node)) loose_.emplace(node->last_use, node);
  }
}

SharedPrefix PrefixCache::Find(const std::string& tenant, absl::Span<const int32_t> tokens) {
  SharedPrefix found;
  absl::MutexLock lock(&mutex_);
  const auto root = roots_.find(tenant);
  if (root == roots_.end()) return found;
  const Place end = Follow({root->second.get(), 0}, tokens, std::ssize(tokens) / unit_);
  if (end.units == 0) return found;
  Use(end.node, root->second.get());
  found.cache_ = shared_from_this();
  found.node_ = end.node;
  found.tokens_ = end.units * unit_;
  std::vector<const PrefixNode*> path;
  for (const PrefixNode* node = end.node; node->parent != nullptr; node = node->parent) {
    path.push_back(node);
  }
  found.pages_.resize(end.node->pages.size());
  for (size_t i = 0; i < found.pages_.size(); ++i) {
    std::vector<int32_t>& pages = found.pages_[i];
    pages.reserve(static_cast<size_t>(end.units * blocks_[i % kinds_]));
    for (auto node = path.rbegin(); node != path.rend(); ++node) {
      pages.insert(pages.end(), (*node)->pages[i].begin(), (*node)->pages[i].end());
    }
  }
  return found;
}

std::unique_ptr<SequenceCache> PrefixCache::NewSequence(SharedPrefix prefix) {
  return std::make_unique<SequenceCache>(pool_, pool_->TryReserve(0), std::move(prefix));
}

void PrefixCache::Exchange(int64_t begin, Place last, SequenceCache& sequence) {
  int64_t end = last.units;
  for (const PrefixNode* node = last.node; end > begin; node = node->parent) {
    end -= UnitsOf(*node);
    for (size_t i = 0; i < node->pages.size(); ++i) {
      const size_t kind = i % kinds_;
      const auto own =
          absl::MakeSpan(sequence.pages_[i])
              .subspan(static_cast<size_t>(end * blocks_[kind]), node->pages[i].size());
      pool_->GiveUp(sequence.reservation_, kind, own);
      std::copy(node->pages[i].begin(), node->pages[i].end(), own.begin());
    }
  }
  SLUICE_CHECK(end == begin, "a share ends where a node does");
}

PrefixNode* PrefixCache::Hang(const std::string& tenant, Place at, absl::Span<const int32_t> tokens,
                              int64_t end, SequenceCache& sequence, uint64_t proof) {
  auto made = std::make_unique<PrefixNode>();
  PrefixNode* const node = made.get();
  node->parent = at.node;
  node->tokens.assign(tokens.begin() + at.units * unit_, tokens.begin() + end * unit_);
  node->proof = proof;
  for (size_t i = 0; i < sequence.pages_.size(); ++i) {
    const size_t kind = i % kinds_;
    const auto pages = sequence.pages_[i].begin();
    node->pages.emplace_back(pages + at.units * blocks_[kind], pages + end * blocks_[kind]);
    pool_->MoveTaken(sequence.reservation_, owned_, kind, std::ssize(node->pages.back()));
    pool_->SetIdle(kind, node->pages.back(), true);  // until it is used, a moment later
  }
  if (IsLoose(*at.node)) loose_.erase({at.node->last_use, at.node});
  at.node->children.emplace(UnitAt(node->tokens, 0), std::move(made));
  loose_.emplace(node->last_use, node);
  statistics_.tokens += std::ssize(node->tokens);
  statistics_.idle_tokens += std::ssize(node->tokens);
  ++statistics_.nodes;
  Name(tenant, node);
  Announce(node);
  return node;
}

void PrefixCache::Publish(const std::string& tenant, absl::Span<const int32_t> tokens,
                          Readers readers, SequenceCache& sequence, uint64_t proof) {
  SLUICE_CHECK(sequence.pool_ == pool_);
  SharedPrefix& share = sequence.prefix_;
  const Place begin{share.node_, share.tokens_ / unit_};
  const int64_t end = std::min(std::ssize(tokens), sequence.tokens()) / unit_;
  if (end <= begin.units) return;
  absl::MutexLock lock(&mutex_);
  Place at = begin;
  if (at.node == nullptr) {
    std::unique_ptr<PrefixNode>& root = roots_[tenant];
    if (root == nullptr) root = std::make_unique<PrefixNode>();
    root->tenant = tenant;
    at.node = root.get();
  }
  PrefixNode* const above = at.node;
  at = Follow(at, tokens, end);
  if (at.units > begin.units) {
    if (readers == Readers::kSome) return;
    Exchange(begin.units, at, sequence);
  }
  if (at.units < end && ChildAt(at, tokens) == nullptr) {  // else another waits for its proof
    at = {Hang(tenant, at, tokens, end, sequence, proof), end};
  }
  if (at.node == above) return;
  Use(at.node, above);
  share.cache_ = shared_from_this();
  share.node_ = at.node;
  share.tokens_ = at.units * unit_;
}

void PrefixCache::Prove(const std::string& tenant, absl::Span<const int32_t> tokens,
                        uint64_t proof) {
  absl::MutexLock lock(&mutex_);
  const auto root = roots_.find(tenant);
  if (root == roots_.end()) return;
  const int64_t given = std::ssize(tokens) / unit_;
  Place at{root->second.get(), 0};
  while (at.units < given) {
    PrefixNode* const child = ChildAt(at, tokens);
    if (child == nullptr) return;
    if (child->proof == proof) {
      child->proof = 0;
      Announce(child);
    }
    // Another's run of blocks may be longer than the tokens.
    const Place next = Follow(at, tokens, std::min(given, at.units + UnitsOf(*child)));
    if (next.node == at.node) return;  // it waits for another proof
    at = next;
  }
}

void PrefixCache::Forget(const std::string& tenant, absl::Span<const int32_t> tokens) {
  absl::MutexLock lock(&mutex_);
  const auto root = roots_.find(tenant);
  if (root == roots_.end() || std::ssize(tokens) < unit_) return;
  // The first node goes with all behind it: whoever has one of them reads all before it, too.
  const auto edge = root->second->children.find(UnitAt(tokens, 0));
  if (edge == root->second->children.end()) return;
  Retract(edge->second.get());
  auto lost = std::make_unique<PrefixNode>();
  edge->second->parent = lost.get();
  lost->children.emplace(edge->first, std::move(edge->second));
  root->second->children.erase(edge);
  const PrefixNode* const key = lost.get();
  detached_.emplace(key, std::move(lost));
  if (root->second->children.empty()) roots_.erase(root);
}

bool PrefixCache::Reclaim(PagePool::PagesByKind lacking) {
  absl::MutexLock lock(&mutex_);
  const int64_t layers = pool_->layout().layers;
  bool dropped = false;
  while (!loose_.empty()) {
    int64_t units = 0;
    for (size_t kind = 0; kind < kinds_; ++kind) {
      const int64_t pages = blocks_[kind] * layers;
      units = std::max(units, (lacking[kind] + pages - 1) / pages);
    }
    if (units <= 0) break;
    PrefixNode* const node = loose_.begin()->second;
    units = std::min(units, UnitsOf(*node));
    Drop(node, units);
    dropped = true;
    for (size_t kind = 0; kind < kinds_; ++kind) lacking[kind] -= units * blocks_[kind] * layers;
  }
  return dropped;
}

void PrefixCache::Drop(PrefixNode* node, int64_t units) {
  const int64_t kept = UnitsOf(*node) - units;
  for (size_t i = 0; i < node->pages.size(); ++i) {
    const size_t kind = i % kinds_;
    const std::vector<int32_t> pages = CutOff(&node->pages[i], kept * blocks_[kind]);
    pool_->SetIdle(kind, pages, false);
    pool_->GiveUp(owned_, kind, pages);
  }
  const std::vector<uint64_t> gone = CutOff(&node->hashes, node->hashes.empty() ? 0 : kept);
  if (node->announced && observer_ != nullptr) observer_->OnRemoved(gone);
  const int64_t tokens = units * unit_;
  statistics_.tokens -= tokens;
  statistics_.idle_tokens -= tokens;
  statistics_.evicted_tokens += static_cast<uint64_t>(tokens);
  if (kept > 0) {
    node->tokens.resize(static_cast<size_t>(kept * unit_));
    return;
  }
  loose_.erase({node->last_use, node});
  PrefixNode* const parent = node->parent;
  --statistics_.nodes;
  parent->children.erase(UnitAt(node->tokens, 0));
  if (IsLoose(*parent)) loose_.emplace(parent->last_use, parent);
  if (parent->parent == nullptr && parent->children.empty() && detached_.erase(parent) == 0) {
    roots_.erase(parent->tenant);
  }
}

PrefixCache::Statistics PrefixCache::Count() const {
  absl::MutexLock lock(&mutex_);
  return statistics_;
}

}  // namespace sluice
