#include "src/kv/rank_ledger.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace sluice {

RankLedger::RankLedger(const PagePool* hbm, int ranks)
    : layout_(hbm->layout()),
      shared_none_(static_cast<size_t>(ranks), 0),
      ranks_(static_cast<size_t>(ranks), Rank{hbm->Capacity(), 0, 0}) {}

TokensByKind RankLedger::WholeBlocks(const TokensByKind& tokens) const {
  TokensByKind whole = 0;
  for (size_t kind = 0; kind < layout_.kinds.size(); ++kind) {
    const CacheKind& of = layout_.kinds[kind];
    whole[kind] = of.BlocksFor(tokens[kind]) * of.block_tokens;
  }
  return whole;
}

std::vector<int> RankLedger::RanksFor(const TokensByKind& hbm_tokens,
                                      absl::Span<const int64_t> shared, int64_t context) const {
  const TokensByKind takes = WholeBlocks(hbm_tokens);
  if (shared.empty()) shared = shared_none_;
  std::vector<int> order(shared.size());
  std::iota(order.begin(), order.end(), 0);
  absl::MutexLock lock(&mutex_);
  const auto key = [&](int number) {
    mutex_.AssertHeld();
    const Rank& rank = ranks_[static_cast<size_t>(number)];
    const int64_t there = shared[static_cast<size_t>(number)];
    return std::tuple(!takes.Within(rank.left), there == 0 || 2 * there < context, rank.sequences,
                      -there, rank.tokens, number);
  };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  return order;
}

std::shared_ptr<const void> RankLedger::Count(int rank, const TokensByKind& hbm_tokens,
                                              int64_t total) {
  const TokensByKind takes = WholeBlocks(hbm_tokens);
  const auto add = [this, rank, takes, total](int sign) {
    absl::MutexLock lock(&mutex_);
    Rank& on = ranks_.at(static_cast<size_t>(rank));
    if (sign > 0) {
      on.left -= takes;
    } else {
      on.left += takes;
    }
    on.sequences += sign;
    on.tokens += sign * total;
  };
  add(1);
  return {this, [add](const void* /*ledger*/) { add(-1); }};
}

int RankLedger::sequences(int rank) const {
  absl::MutexLock lock(&mutex_);
  return ranks_.at(static_cast<size_t>(rank)).sequences;
}

}  // namespace sluice
