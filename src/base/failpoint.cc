#include "src/base/failpoint.h"

#include <csignal>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr FailpointInfo kInfos[] = {
#define SLUICE_FAILPOINT_INFO_(id, name, kind, effect, survives) \
  {name, FailpointKind::kind, effect, survives},
    SLUICE_FAILPOINTS_LIST(SLUICE_FAILPOINT_INFO_)
#undef SLUICE_FAILPOINT_INFO_
};
static_assert(std::size(kInfos) == kFailpoints);

// The armed terms of the process. The code reaches them only where a failpoint is armed.
class Registry {
 public:
  Registry() {
    for (size_t i = 0; i < kFailpoints; ++i) {
      states_[i].state.point = states_[i].state.term.point = static_cast<Failpoint>(i);
    }
  }

  void Arm(const FailpointTerm& term, uint64_t seed) {
    absl::MutexLock lock(&mutex_);
    const auto index = static_cast<size_t>(term.point);
    Entry& entry = states_[index];
    entry.state = {term.point, term, term.action != FailpointTerm::Action::kOff, 0, 0};
    // Each has its own draws, so that arming one more changes nothing for the others.
    entry.draws = SplitMix64(seed + index);
    failpoint_internal::armed[index].store(entry.state.armed, std::memory_order_relaxed);
  }

  void DisarmAll() {
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < kFailpoints; ++i) {
      states_[i].state.armed = false;
      failpoint_internal::armed[i].store(false, std::memory_order_relaxed);
    }
  }

  FailpointState StateOf(Failpoint point) const {
    absl::MutexLock lock(&mutex_);
    return states_[static_cast<size_t>(point)].state;
  }

  void SetSleep(std::function<void(absl::Duration)> sleep) {
    absl::MutexLock lock(&mutex_);
    sleep_ = std::move(sleep);
  }

  bool Hit(Failpoint point) {
    absl::Duration pause;
    std::function<void(absl::Duration)> sleep;
    {
      absl::MutexLock lock(&mutex_);
      Entry& entry = states_[static_cast<size_t>(point)];
      FailpointState& state = entry.state;
      if (!state.armed) return false;  // disarmed since the caller looked
      if (++state.hits <= state.term.skip) return false;
      if (state.term.probability < 1 && entry.draws.Uniform() >= state.term.probability) {
        return false;
      }
      if (++state.fired == state.term.count) {
        state.armed = false;
        failpoint_internal::armed[static_cast<size_t>(point)].store(false,
                                                                    std::memory_order_relaxed);
      }
      if (state.term.action == FailpointTerm::Action::kKill) raise(SIGKILL);
      if (state.term.action != FailpointTerm::Action::kDelay) return true;
      pause = state.term.argument;
      sleep = sleep_;
    }
    if (sleep != nullptr) {
      sleep(pause);
    } else {
      absl::SleepFor(pause);
    }
    return false;
  }

 private:
  struct Entry {
    FailpointState state;
    SplitMix64 draws{0};
  };
  mutable absl::Mutex mutex_;
  std::array<Entry, kFailpoints> states_ ABSL_GUARDED_BY(mutex_);
  std::function<void(absl::Duration)> sleep_ ABSL_GUARDED_BY(mutex_);
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

namespace failpoint_internal {
std::array<std::atomic<bool>, kFailpoints> armed{};
bool Hit(Failpoint point) { return TheRegistry().Hit(point); }
}  // namespace failpoint_internal

const FailpointInfo& InfoOf(Failpoint point) { return kInfos[static_cast<size_t>(point)]; }

absl::Status ArmFailpoints(std::string_view terms, uint64_t seed) {
  SLUICE_ASSIGN_OR_RETURN(const std::vector<FailpointTerm> parsed, ParseFailpoints(terms));
  if (!kFailpointsCompiledIn && !parsed.empty()) {
    return WithReason(absl::FailedPreconditionError(
                          "this build has no failpoints: configure it with -DSLUICE_FAILPOINTS=ON"),
                      reasons::kNoFailpoints);
  }
  for (const FailpointTerm& term : parsed) TheRegistry().Arm(term, seed);
  return absl::OkStatus();
}

void DisarmFailpoints() { TheRegistry().DisarmAll(); }

FailpointState StateOf(Failpoint point) { return TheRegistry().StateOf(point); }

std::vector<FailpointState> ListFailpoints() {
  std::vector<FailpointState> out;
  for (size_t i = 0; i < kFailpoints; ++i) out.push_back(StateOf(static_cast<Failpoint>(i)));
  return out;
}

void SetFailpointSleep(std::function<void(absl::Duration)> sleep) {
  TheRegistry().SetSleep(std::move(sleep));
}

ScopedFailpoints::ScopedFailpoints(std::string_view terms, uint64_t seed) {
  const absl::Status armed = ArmFailpoints(terms, seed);
  SLUICE_CHECK(armed.ok(), armed.message());
}

}  // namespace sluice
