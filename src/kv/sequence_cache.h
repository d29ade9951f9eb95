// SequenceCache is the pages that one sequence owns in one pool: for each layer and kind, page
// numbers in the order of blocks. It may have more of one kind than of another, or none. Its first
// blocks may be shared with other sequences (PrefixCache); nobody writes those. Not thread-safe: it
// has one owner at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "src/kv/head_places.h"
#include "src/kv/page_pool.h"
#include "src/kv/shared_prefix.h"

namespace sluice {

// A part of one layer and kind of a cache. Ranges are half open.
struct HomeRange {
  int layer = 0;
  size_t kind = 0;
  int head_begin = 0, head_end = 0;
  int64_t token_begin = 0, token_end = 0;
};

// A stretch of memory inside one block of one head.
struct HomePiece {
  int64_t block = 0;
  int head = 0;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

// Says which pages a sequence has, so that another rank's cache of it can have the same ones
// (PagePool::FollowRankZero).
struct HomePages {
  int64_t shared_tokens = 0;                // leading tokens in blocks that others may share
  PagePool::PagesByKind left{};             // pages of each kind that are promised and not taken
  std::vector<std::vector<int32_t>> pages;  // [layer][kind], in the order of blocks
};

class SequenceCache {
 public:
  // Starts with the pages of `prefix` and none of its own. The reservation is for what follows
  // them. REQUIRES: `reservation` and `prefix` came from `pool`.
  SequenceCache(PagePool* pool, Reservation reservation, SharedPrefix prefix = {});
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;
  ~SequenceCache();  // gives every page back: nothing may read or write them any more

  HomePages Describe() const;
  // Returns a cache as rank 0 has described it. REQUIRES: pool->follows().
  static std::unique_ptr<SequenceCache> OfRankZero(PagePool* pool, HomePages home);

  // Makes room for positions [0, tokens): for all of them, or for none if an overcommitted pool
  // lacks a page now. It grows by kGrowthBlocks at least, if the reservation allows it and pages
  // cannot run out. REQUIRES: the reservation covers `tokens`.
  enum class Growth { kNone, kAdded, kNoRoom };
  Growth EnsureTokens(const TokensByKind& tokens);
  static constexpr int64_t kGrowthBlocks = 16;

  // Makes the promise firm: from then on it finds every page as soon as sequences with soft
  // promises have left. Returns false if there is no room for that now.
  bool MakeFirm() { return pool_->MakeFirm(reservation_); }
  bool firm() const { return reservation_.firm(); }
  // Returns whether all that is promised, taken or not, is enough for `tokens`.
  bool Covers(const TokensByKind& tokens) const { return Lacks(tokens) == TokensByKind(); }
  // Returns by how many tokens of each kind the promise falls short of `tokens`.
  TokensByKind Lacks(const TokensByKind& tokens) const;
  // Makes a firm promise cover `tokens`. Returns false if there is no room for that now.
  bool Extend(const TokensByKind& tokens);
  // Gives back the pages behind those of `tokens`, and the promise beyond; shared blocks stay.
  // REQUIRES: nothing may read or write those pages any more.
  void ShrinkTo(const TokensByKind& tokens);
  // Gives every page of its own back and returns the promise. *prefix becomes what was shared.
  static Reservation Dissolve(std::unique_ptr<SequenceCache> cache, SharedPrefix* prefix);
  // Returns the leading tokens in blocks that others may share, which must not be written.
  int64_t shared_tokens() const { return prefix_.tokens(); }

  // Holds `charge`, a part of a tenant's quota, until the pages go back.
  void Hold(std::shared_ptr<const void> charge) { charge_ = std::move(charge); }
  bool charged() const { return charge_ != nullptr; }

  PagePool* pool() const { return pool_; }
  // Returns the tokens of a kind for which there are pages.
  int64_t tokens(size_t kind) const {
    return static_cast<int64_t>(pages_[kind].size()) * pool_->layout().kinds[kind].block_tokens;
  }
  // Returns the tokens for which there are pages of every kind.
  int64_t tokens() const;
  // Returns the page numbers of one layer and kind, [blocks].
  const std::vector<int32_t>& Pages(int layer, size_t kind) const {
    return pages_[static_cast<size_t>(layer) * kinds_ + kind];
  }
  uint8_t* BlockAddress(int layer, size_t kind, int head, int64_t block) const;
  // Visits the memory of a chunk's payload in the payload's order: for each block, for each head,
  // the parts of the block. The last block is short if the tokens end inside it. With `places` the
  // heads are the whole model's, and a piece's memory is where rank 0 has the head of that place's
  // number. REQUIRES: range.token_begin is a block's first token, and there are pages for the
  // range.
  void ForEachPiece(const HomeRange& range, absl::FunctionRef<void(const HomePiece&)> visit,
                    const HeadPlaces* places = nullptr) const;

 private:
  friend class PrefixCache;  // exchanges pages and their owners
  int64_t SharedBlocks(size_t kind) const {
    return prefix_.tokens() / pool_->layout().kinds[kind].block_tokens;
  }
  // Returns what of `tokens` is not shared.
  TokensByKind Unshared(const TokensByKind& tokens) const;
  // Gives back the pages behind those of `kept`.
  void GivePages(const TokensByKind& kept);
  // Makes room in pages_ for all that is promised, so that adding pages does not allocate.
  void ReservePages();

  PagePool* pool_;
  std::shared_ptr<const void> charge_;
  Reservation reservation_;
  SharedPrefix prefix_;
  size_t kinds_;
  std::vector<std::vector<int32_t>> pages_;  // [layer][kind]; room for all that is promised
  std::vector<PagePool::Extent> extents_;    // the growth under way; reused
};

}  // namespace sluice
