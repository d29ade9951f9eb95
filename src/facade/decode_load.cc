#include "src/facade/decode_load.h"

#include <algorithm>
#include <utility>

#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/metrics/metrics.h"

namespace sluice {
namespace {

// The shortest time over which the rate is taken. Several gateways may poll, so the time between
// two polls will not do.
constexpr absl::Duration kWindow = absl::Seconds(1);

}  // namespace

DecodeLoad::DecodeLoad(Engine* engine, std::vector<const PagePool*> hbm, const Counter& tokens,
                       const Clock* clock)
    : engine_(engine), hbm_(std::move(hbm)), tokens_(tokens), clock_(clock), since_(clock->Now()) {}

double DecodeLoad::TokensPerSecond() {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_->Now();
  if (now - since_ < kWindow) return rate_;
  const double counted = tokens_.Value();
  rate_ = (counted - counted_) / absl::ToDoubleSeconds(now - since_);
  counted_ = counted;
  since_ = now;
  return rate_;
}

void DecodeLoad::Ask(std::function<void(const NodeLoad&)> done) {
  engine_->Snapshot([this, done = std::move(done)](const EngineSnapshot& snapshot) {
    NodeLoad load;
    load.running = snapshot.running;
    load.waiting = snapshot.waiting;
    load.draining = snapshot.draining;
    const PagePool& one = *hbm_.front();
    for (size_t kind = 0; kind < one.layout().kinds.size(); ++kind) {
      const PagePool::Usage usage = PagePool::UsageOf(hbm_, kind);
      if (usage.capacity_bytes == 0) continue;
      load.usage = std::max(load.usage, static_cast<double>(usage.used_bytes) /
                                            static_cast<double>(usage.capacity_bytes));
    }
    load.capacity_tokens = one.capacity_tokens() * std::ssize(hbm_);
    load.used_tokens = static_cast<int64_t>(load.usage * static_cast<double>(load.capacity_tokens));
    load.tokens_per_second = TokensPerSecond();
    done(load);
  });
}

}  // namespace sluice
