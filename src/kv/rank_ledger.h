// RankLedger counts what sequences take of the HBM of every rank, where ranks have sequences of
// their own, and says which rank a new one should go to. It counts sequences that run, and those
// whose caches are still to come or wait for a slot, so that prompts that arrive together do not
// all go to one rank. All ranks have pools of the same sizes. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/kv/page_pool.h"

namespace sluice {

class RankLedger {
 public:
  // `hbm` is the pool of one rank; only its sizes are asked for, now.
  RankLedger(const PagePool* hbm, int ranks);

  int ranks() const { return static_cast<int>(shared_none_.size()); }
  // Returns all ranks, the best for a sequence first: those with room in HBM come before the
  // others. Among them a rank that has the caches of half of the prompt or more, then the one with
  // the fewest sequences, then the one that has more of the prompt, then the one whose sequences
  // have fewer tokens. `shared`, if not empty, is by rank the leading tokens of the prompt's
  // `context` whose caches are there.
  std::vector<int> RanksFor(const TokensByKind& hbm_tokens, absl::Span<const int64_t> shared = {},
                            int64_t context = 0) const;
  // Counts a sequence that takes `hbm_tokens`, and ends with `total` tokens, on a rank for as long
  // as the result lives. The ledger outlives it.
  std::shared_ptr<const void> Count(int rank, const TokensByKind& hbm_tokens, int64_t total);
  // Returns the sequences that are counted on a rank.
  int sequences(int rank) const;

 private:
  struct Rank {
    TokensByKind left;  // may be less than nothing: caches may come in that HBM has no room for yet
    int sequences = 0;
    int64_t tokens = 0;
  };
  // Returns the tokens of the pages that a sequence takes.
  TokensByKind WholeBlocks(const TokensByKind& tokens) const;

  const CacheLayout layout_;
  const std::vector<int64_t> shared_none_;  // a zero for each rank
  mutable absl::Mutex mutex_;
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
