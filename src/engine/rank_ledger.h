// RankLedger counts what sequences take of the pools of every rank, where ranks have sequences of
// their own and rank 0 admits them. All ranks have pools of the same sizes, and what a sequence
// takes is promised to it whole when it is admitted, so rank 0 knows without asking. Only the
// engine's thread uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "src/attention/sequence_placement.h"
#include "src/kv/page_pool.h"

namespace sluice {

class RankLedger {
 public:
  // `hbm` and `dram` are this rank's pools, which outlive the ledger.
  RankLedger(const PagePool* hbm, const PagePool* dram, int ranks, int slots);

  // Returns the ranks that have room for a sequence, the one with the fewest sequences first, and
  // of equals the one whose sequences have the fewest tokens. The result stays until the next call.
  const std::vector<int>& RanksFor(const Footprint& footprint);
  // Counts a sequence of `total` tokens in `slot` on `rank`.
  void Admit(int slot, int rank, const Footprint& footprint, int64_t total);
  void Release(int slot);

  // Returns the most room that any rank has, of each kind.
  SequencePlacement::Headroom Headroom() const;

 private:
  struct Rank {
    Footprint left;
    int sequences = 0;
    int64_t tokens = 0;
  };
  struct Slot {
    int rank = -1;  // -1: there is no sequence
    Footprint takes;
    int64_t total = 0;
  };
  // Returns the tokens of the pages that a sequence takes.
  Footprint Whole(const Footprint& footprint) const;
  // Returns whether the rank has room.
  static bool Fits(const Footprint& takes, const Footprint& left) {
    return takes.hbm_tokens.Within(left.hbm_tokens) && takes.dram_tokens.Within(left.dram_tokens);
  }

  const CacheLayout hbm_, dram_;
  std::vector<Rank> ranks_;
  std::vector<Slot> slots_;
  std::vector<int> order_;
};

}  // namespace sluice
