#include "src/engine/rank_ledger.h"

#include <algorithm>
#include <tuple>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Returns `tokens` rounded up to whole blocks of the layout's kinds.
TokensByKind WholeBlocks(const CacheLayout& layout, const TokensByKind& tokens) {
  TokensByKind whole = 0;
  for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
    const CacheKind& of = layout.kinds[kind];
    whole[kind] = of.BlocksFor(tokens[kind]) * of.block_tokens;
  }
  return whole;
}

TokensByKind Most(TokensByKind a, const TokensByKind& b) {
  for (size_t kind = 0; kind < TokensByKind::kMaxKinds; ++kind)
    a[kind] = std::max(a[kind], b[kind]);
  return a;
}

}  // namespace

RankLedger::RankLedger(const PagePool* hbm, const PagePool* dram, int ranks, int slots)
    : hbm_(hbm->layout()),
      dram_(dram->layout()),
      ranks_(static_cast<size_t>(ranks)),
      slots_(static_cast<size_t>(slots)) {
  SLUICE_CHECK(!hbm->overcommitted(), "what is promised is there");
  for (Rank& rank : ranks_) rank.left = {dram->Capacity(), hbm->Capacity()};
}

Footprint RankLedger::Whole(const Footprint& footprint) const {
  return {WholeBlocks(dram_, footprint.dram_tokens), WholeBlocks(hbm_, footprint.hbm_tokens)};
}

const std::vector<int>& RankLedger::RanksFor(const Footprint& footprint) {
  const Footprint takes = Whole(footprint);
  order_.clear();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (Fits(takes, ranks_[rank].left)) order_.push_back(static_cast<int>(rank));
  }
  std::sort(order_.begin(), order_.end(), [this](int a, int b) {
    const Rank &x = ranks_[static_cast<size_t>(a)], &y = ranks_[static_cast<size_t>(b)];
    return std::tuple(x.sequences, x.tokens, a) < std::tuple(y.sequences, y.tokens, b);
  });
  return order_;
}

void RankLedger::Admit(int slot, int rank, const Footprint& footprint, int64_t total) {
  Slot& of = slots_.at(static_cast<size_t>(slot));
  SLUICE_CHECK(of.rank < 0, "a slot has one sequence");
  of = {rank, Whole(footprint), total};
  Rank& on = ranks_.at(static_cast<size_t>(rank));
  on.left.hbm_tokens -= of.takes.hbm_tokens;
  on.left.dram_tokens -= of.takes.dram_tokens;
  on.tokens += total;
  ++on.sequences;
}

void RankLedger::Release(int slot) {
  Slot& of = slots_.at(static_cast<size_t>(slot));
  SLUICE_CHECK(of.rank >= 0, "the slot has a sequence");
  Rank& on = ranks_[static_cast<size_t>(of.rank)];
  on.left.hbm_tokens += of.takes.hbm_tokens;
  on.left.dram_tokens += of.takes.dram_tokens;
  on.tokens -= of.total;
  --on.sequences;
  of.rank = -1;
}

SequencePlacement::Headroom RankLedger::Headroom() const {
  TokensByKind hbm = 0, dram = 0;
  for (const Rank& rank : ranks_) {
    hbm = Most(hbm, rank.left.hbm_tokens);
    dram = Most(dram, rank.left.dram_tokens);
  }
  SequencePlacement::Headroom room;
  room.hbm.firm_tokens = room.hbm.free_tokens = room.hbm.soft_tokens = hbm;
  room.home_tokens = dram;
  return room;
}

}  // namespace sluice
