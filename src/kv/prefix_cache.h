// PrefixCache keeps the blocks of sequences in a page pool, so that a later sequence that begins
// with the same tokens need not compute or receive their caches again.
//
// Blocks are named by their tokens and by those before them: a tree for each tenant, whose nodes
// hold runs of blocks. Tokens are compared one by one, so no two prompts are ever taken for each
// other, and no tenant finds what another has. A node serves one model, so the model needs no name.
//
// A block is of all layers and kinds. Blocks are shared in units of as many tokens as fill whole
// blocks of every kind. They are never written again: a sequence publishes only blocks whose caches
// are final, and writes behind them. The pages of blocks that no sequence has are idle in the pool
// (PagePool::SetIdle), and go, those used longest ago first, when a promise lacks their room.
//
// An observer may be told what others find here (src/kv/prefix_events.h).
//
// Thread-safe. Its lock is taken before the pool's, never while the pool's is held.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/kv/page_pool.h"
#include "src/kv/prefix_events.h"
#include "src/kv/shared_prefix.h"

namespace sluice {

class SequenceCache;

// A run of blocks, which follow those of the parent. Only PrefixCache looks into it.
struct PrefixNode {
  PrefixNode* parent = nullptr;             // null: a tenant's root, which has no blocks
  std::vector<int32_t> tokens;              // a multiple of the unit
  std::vector<std::vector<int32_t>> pages;  // [layer][kind]
  absl::flat_hash_map<std::vector<int32_t>, std::unique_ptr<PrefixNode>> children;  // by first unit
  int64_t users = 0;             // shares that end here or further down; 0: the pages are idle
  uint64_t last_use = 0;         // a number that grows with every use
  uint64_t proof = 0;            // not 0: nobody finds it before Prove is called with this number
  std::string tenant;            // of a root
  std::vector<uint64_t> hashes;  // of each unit; none without an observer
  bool announced = false;        // the observer was told of it
};

class PrefixCache : public std::enable_shared_from_this<PrefixCache> {
 public:
  // The pool outlives the cache and every share. REQUIRES: the pool is not overcommitted, and has
  // no other PrefixCache.
  static std::shared_ptr<PrefixCache> Create(PagePool* pool);
  ~PrefixCache();

  // Returns the tokens of the smallest part that is shared.
  int64_t unit_tokens() const { return unit_; }

  // The observer is told from now on what others find, and no longer find. It outlives the cache,
  // or is set to null before it ends; then it is called no more. REQUIRES: nothing was published
  // yet, unless it is null.
  void SetObserver(PrefixObserver* observer, const std::string& model);
  // Calls `first`, and `stored` with the arguments of PrefixObserver::OnStored for all that others
  // find in the caches, before anybody publishes or drops more in any of them. The caches' locks
  // are taken in their order. REQUIRES: SetObserver was called.
  using Stored = absl::FunctionRef<void(std::optional<uint64_t>, absl::Span<const int32_t>,
                                        absl::Span<const uint64_t>)>;
  static void AnnounceAll(absl::Span<PrefixCache* const> caches, absl::FunctionRef<void()> first,
                          Stored stored);

  // Returns a share of the longest known prefix of `tokens`, in whole units; empty if none is
  // known.
  SharedPrefix Find(const std::string& tenant, absl::Span<const int32_t> tokens);

  // Returns a cache that begins with the share and is promised nothing behind it.
  std::unique_ptr<SequenceCache> NewSequence(SharedPrefix prefix);

  enum class Readers {
    kNone,  // nothing reads or writes the cache now: its pages may be exchanged
    kSome,  // the pages that it has must stay its own
  };
  // Lets others share the blocks of `tokens`, which are the sequence's first ones, in whole units.
  // Where such blocks are known already, the sequence gets a share of them and gives its own back,
  // unless it has readers: then nothing is published, and neither is what would stand where
  // another's blocks wait for their proof. With a `proof` other than 0, nobody finds the blocks
  // before Prove is called with it; so a cache that gives no tokens spoils nobody else's. REQUIRES:
  // their caches are final, and `sequence` lies in the cache's pool.
  void Publish(const std::string& tenant, absl::Span<const int32_t> tokens, Readers readers,
               SequenceCache& sequence, uint64_t proof = 0);
  // Lets others find the blocks of `tokens` that were published with this proof.
  void Prove(const std::string& tenant, absl::Span<const int32_t> tokens, uint64_t proof);
  // Lets nobody find the blocks of `tokens` any more, nor what lies behind their first: one of them
  // is bad. Sequences that have them keep them.
  void Forget(const std::string& tenant, absl::Span<const int32_t> tokens);

  struct Statistics {
    int64_t tokens = 0;           // tokens whose blocks are here
    int64_t idle_tokens = 0;      // those of them that no sequence has
    uint64_t evicted_tokens = 0;  // tokens that left since the start
    int64_t nodes = 0;
  };
  Statistics Count() const;

 private:
  friend class SharedPrefix;
  explicit PrefixCache(PagePool* pool);

  // A place in a tree: the end of `node`, which is `units` units from the root.
  struct Place {
    PrefixNode* node = nullptr;
    int64_t units = 0;
  };
  // Follows tokens[from.units ..) down the tree, for at most `most` units from the root, and splits
  // the node at whose middle it ends. Ends before a node that is not proven.
  Place Follow(Place from, absl::Span<const int32_t> tokens, int64_t most)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the node that begins with the unit behind a place, proven or not; null if there is
  // none.
  PrefixNode* ChildAt(Place place, absl::Span<const int32_t> tokens) const;
  // Splits a node behind `units` units, and returns the new node in front. Shares that end at the
  // old one stay there.
  PrefixNode* Split(PrefixNode* node, int64_t units) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hangs the sequence's own blocks [at.units, end) into the tree, with their pages and promise.
  PrefixNode* Hang(const std::string& tenant, Place at, absl::Span<const int32_t> tokens,
                   int64_t end, SequenceCache& sequence, uint64_t proof)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Puts the tree's blocks of the path in the place of the sequence's own, from unit `begin` to the
  // end of `last`.
  void Exchange(int64_t begin, Place last, SequenceCache& sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds or ends a use of every node from `node` up to, and without, `above`.
  void Use(PrefixNode* node, const PrefixNode* above) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndUse(PrefixNode* node);
  void SetIdle(const PrefixNode& node, bool idle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the node may be dropped.
  static bool IsLoose(const PrefixNode& node) {
    return node.users == 0 && node.children.empty() && node.parent != nullptr;
  }
  // Drops blocks with so many pages of each kind, or more.
  bool Reclaim(PagePool::PagesByKind lacking);
  // Drops the last `units` units of a node, and the node with the last of them.
  void Drop(PrefixNode* node, int64_t units) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a new node its hashes, if there is an observer.
  void Name(const std::string& tenant, PrefixNode* node) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a Find may reach the node: it was not forgotten.
  bool IsAttached(const PrefixNode& node) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the observer of a node, and of those behind it that waited for it, if others find them.
  void Announce(PrefixNode* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnnounceOwn(Stored stored) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the observer that a node went with all behind it.
  void Retract(PrefixNode* top) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t UnitsOf(const PrefixNode& node) const { return std::ssize(node.tokens) / unit_; }
  std::vector<int32_t> UnitAt(absl::Span<const int32_t> tokens, int64_t unit) const;

  PagePool* const pool_;
  const size_t kinds_;
  const int64_t unit_;
  std::vector<int64_t> blocks_;  // blocks in a unit, by kind

  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<PrefixNode>> roots_ ABSL_GUARDED_BY(mutex_);  // by tenant
  // Roots of what was forgotten, each with one child, by address. It goes as what is old does.
  std::map<const PrefixNode*, std::unique_ptr<PrefixNode>> detached_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<uint64_t, PrefixNode*>> loose_ ABSL_GUARDED_BY(mutex_);  // by last use
  Reservation owned_ ABSL_GUARDED_BY(mutex_);  // the promise of all pages in the trees
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  Statistics statistics_ ABSL_GUARDED_BY(mutex_);
  PrefixObserver* observer_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::string model_ ABSL_GUARDED_BY(mutex_);  // in the hashes that name blocks
};

}  // namespace sluice
