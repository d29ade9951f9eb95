// A share of blocks in a PrefixCache: the leading blocks of a sequence, which others may have too.
// It is move-only and ends with the object. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace sluice {

class PrefixCache;
struct PrefixNode;

class SharedPrefix {
 public:
  SharedPrefix() = default;
  SharedPrefix(SharedPrefix&& other) noexcept { *this = std::move(other); }
  SharedPrefix& operator=(SharedPrefix&& other) noexcept;
  ~SharedPrefix() { Reset(); }
  // Ends the share. REQUIRES: nothing of the sequence reads the blocks any more.
  void Reset();

  // Returns a share of blocks that a PrefixCache of another process has, which holds them for as
  // long as this lives. `pages`: [layer][kind], as in PagePool::ChoosePages.
  static SharedPrefix OfOtherRank(int64_t tokens, std::vector<std::vector<int32_t>> pages) {
    SharedPrefix share;
    share.tokens_ = tokens;
    share.pages_ = std::move(pages);
    return share;
  }

  bool empty() const { return tokens_ == 0; }
  // Returns the page numbers, [layer][kind]; none once a SequenceCache has taken them over.
  const std::vector<std::vector<int32_t>>& pages() const { return pages_; }
  // Returns the leading tokens that the blocks hold, a multiple of PrefixCache::unit_tokens().
  int64_t tokens() const { return tokens_; }

 private:
  friend class PrefixCache;
  friend class SequenceCache;
  std::shared_ptr<PrefixCache> cache_;  // null: empty
  PrefixNode* node_ = nullptr;          // the last node of the path
  int64_t tokens_ = 0;
  // [layer][kind] The page numbers, until a SequenceCache takes them over.
  std::vector<std::vector<int32_t>> pages_;
};

}  // namespace sluice
