#include "tests/sim/world.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "src/base/error.h"
#include "tests/sim/runner.h"

namespace sluice::sim {
namespace {

// A seed takes a few thousand turns; more means that the engine turns endlessly.
constexpr uint64_t kMaxTurns = 200'000;
// Maximum turns by the clock alone, with nothing else to come: every deadline is nearer than that.
constexpr int kMaxLooks = 1000;

}  // namespace

std::string ReasonOr(const absl::Status& status) {
  return ReasonOf(status).value_or(absl::StatusCodeToString(status.code()));
}

World::World(Scenario scenario, bool trace, SituationCounts* counts)
    : scenario_(std::move(scenario)),
      trace_(trace),
      counts_(counts),
      random_(scenario_.seed ^ 0x5EED) {}

World::~World() = default;

void World::Run() {
  StartNode();
  for (const RequestSpec& request : scenario_.requests) {
    RequestActors& actors = requests_.emplace_back();
    if (request.meeting != Meeting::kLocal) {
      // The loop goes by index, because the list moves while it grows.
      const size_t i = requests_.size() - 1;
      actors.sender = std::make_unique<Sender>(
          this, request, [this, i] { requests_[i].caller->Reserved(); },
          [this, i] { requests_[i].caller->Committed(); });
      actors.sender->Start();
    }
    actors.caller = std::make_unique<Caller>(this, request, actors.sender.get());
    actors.caller->Start();
  }
  PlanHappenings();
  TurnAfter(absl::ZeroDuration());
  while (!IsOver() && clock_.RunNext()) {
    CheckAlways();
    TurnIfWoken();
  }
  if (next_.kind != Engine::Next::Kind::kInbox) Fail(-1, "the engine waits for a dead stream");
  for (const RequestActors& actors : requests_) actors.caller->CheckOver();
  if (drained_ != drains_) Fail(-1, "a drain was never told that all is idle");
  CheckQuiet();
  if (node_->transfers().prefixes()->Count().evicted_tokens > 0) Note(Situation::kPrefixEvicted);
  if (ReadPartOutsideHbm()) Note(Situation::kReadOutsideHbm);
  if (node_->model().deepest() >= 2) Note(Situation::kTwoStepsInFlight);
  if (node_->device().stalls() > 0) Note(Situation::kStreamStalled);
  leaked_.Reset();
  // Requests point to the node's parts, and the node's streams to the clock, so they end in this
  // order.
  pools_.clear();
  node_.reset();
}

// Returns whether nothing is due any more except the engine's own polls, and nothing is left for
// those to end.
bool World::IsOver() {
  if (clock_.due() > sleeps_ + (turn_is_due_ ? 1 : 0)) {
    looks_ = 0;
    return false;
  }
  if (turn_is_due_) return false;
  bool alive = node_->transfers().open_transfers() > 0;
  for (const RequestActors& actors : requests_) alive = alive || actors.caller->alive();
  // The engine's next poll gives back a slot that is at rest.
  alive = alive || next_.kind == Engine::Next::Kind::kEvent;
  if (++looks_ > kMaxLooks) return true;  // what is still alive hangs: the checks report it
  return !alive;
}

void World::StartNode() {
  NodeSpec spec = scenario_.node;
  auto node = Node::Create(spec, &clock_);
  if (!node.ok()) {
    if (spec.device.refused_allocation < 0 || !absl::IsResourceExhausted(node.status())) {
      Fail(-1, "the node did not start: ", node.status().ToString());
    }
    Note(Situation::kAllocationRefused);
    Trace("node: ", node.status().ToString());
    spec.device.refused_allocation = -1;
    node = Node::Create(spec, &clock_);
    if (!node.ok()) Fail(-1, "the node did not start: ", node.status().ToString());
  }
  node_ = *std::move(node);
  for (PagePool* pool : {&node_->hbm(), &node_->dram()}) {
    const double overcommit = pool == &node_->hbm() ? spec.overcommit : 1.0;
    for (size_t kind = 0; kind < pool->layout().kinds.size(); ++kind) {
      pools_.emplace_back(pool, kind, overcommit);
    }
  }
}

void World::PlanHappenings() {
  for (const absl::Duration at : scenario_.leaps_at) {
    clock_.After(at, [this] {
      Note(Situation::kClockLeapt);
      Trace("the clock leaps");
      clock_.Leap(absl::Milliseconds(50) + DrawDuration(random_, absl::Seconds(2)));
    });
  }
  for (const Scenario::DrainSpec& drain : scenario_.drains) {
    clock_.After(drain.at, [this, time = drain.time] { Drain(time); });
    if (drain.resume_at.has_value()) clock_.After(*drain.resume_at, [this] { Resume(); });
  }
  if (scenario_.cancel_all_at.has_value()) {
    clock_.After(*scenario_.cancel_all_at, [this] {
      Note(Situation::kCancelAll);
      Trace("everything is cancelled");
      engine().CancelAll(absl::CancelledError("simulated"));
      for (const RequestActors& actors : requests_) actors.caller->EverythingWasCancelled();
    });
  }
  for (int i = 0; i < 12; ++i) {
    clock_.After(DrawDuration(random_, absl::Milliseconds(250)), [this] {
      engine().Snapshot([this](const EngineSnapshot& snapshot) { CheckSnapshot(snapshot); });
    });
  }
  clock_.After(DrawDuration(random_, absl::Milliseconds(100)), [this] { Breach(); });
}

void World::Drain(absl::Duration time) {
  Trace("drains");
  draining_ = true;
  drain_deadline_ = clock_.Now() + time;
  ++drains_;
  const auto idle = [this, told = false]() mutable {
    if (told) Fail(-1, "a drain ended twice");
    told = true;
    ++drained_;
    Note(Situation::kDrained);
    for (const RequestActors& actors : requests_) {
      if (actors.caller->alive()) Fail(-1, "a drain ended before ", actors.caller->name());
    }
    Trace("is idle");
  };
  engine().Drain(drain_deadline_,
                 WithReason(absl::UnavailableError("the drain's time is over"), "DRAIN_TIME"),
                 idle);
}

void World::Resume() {
  if (draining_) Note(Situation::kResumed);
  Trace("resumes");
  draining_ = false;
  drain_deadline_ = absl::InfiniteFuture();
  engine().Resume();
}

void World::TurnAfter(absl::Duration delay) {
  turn_is_due_ = true;
  clock_.After(delay, [this] { Turn(); });
}

void World::Turn() {
  turn_is_due_ = false;
  if (++turns_ > kMaxTurns) Fail(-1, "the engine turns without end");
  const absl::Time start = clock_.Now();
  next_ = engine().Turn();
  for (const RequestActors& actors : requests_) actors.caller->CheckAfterTurn(start);
  switch (next_.kind) {
    case Engine::Next::Kind::kNow:
      return TurnAfter(DrawDuration(random_, scenario_.node.host_time));
    case Engine::Next::Kind::kEvent:
      // If there is a time too, the wait is in the inbox, and short: see EngineThread.
      if (next_.until != absl::InfiniteFuture()) break;
      return;
    case Engine::Next::Kind::kInbox:
      break;
  }
  for (const RequestActors& actors : requests_) {
    if (next_.kind == Engine::Next::Kind::kInbox && actors.caller->Due() < next_.until &&
        !engine().WaitForInbox(absl::InfinitePast())) {
      Fail(-1, "the engine sleeps until ", absl::FormatTime(next_.until), ", past the time of ",
           actors.caller->name());
    }
  }
  if (next_.until == absl::InfiniteFuture()) return;
  ++sleeps_;
  clock_.At(next_.until, [this, sleep = turns_] {
    --sleeps_;
    // Checks that it is still the same sleep.
    if (sleep == turns_ && !turn_is_due_) TurnAfter(absl::ZeroDuration());
  });
}

void World::TurnIfWoken() {
  if (turn_is_due_) return;
  const bool in_inbox =
      next_.kind == Engine::Next::Kind::kInbox || next_.until != absl::InfiniteFuture();
  const bool woken = !in_inbox ? next_.event->Ready() : engine().WaitForInbox(absl::InfinitePast());
  if (woken) return TurnAfter(DrawDuration(random_, scenario_.node.host_time));
  if (next_.kind != Engine::Next::Kind::kInbox) return;
  for (const RequestActors& actors : requests_) {
    if (const char* why = actors.caller->Stranded(); why != nullptr) {
      Fail(-1, "the engine sleeps, and nobody woke it for ", actors.caller->name(), ": ", why);
    }
  }
}

void World::CheckAlways() {
  for (PoolWatch& pool : pools_) {
    if (const auto wrong = pool.Check(); wrong.has_value()) Fail(-1, *wrong);
  }
}

void World::CheckQuiet() {
  if (node_->transfers().open_transfers() > 0) {
    Fail(-1, node_->transfers().open_transfers(), " transfers are open, and nobody will end them");
  }
  for (PoolWatch& pool : pools_) {
    if (const auto wrong = pool.CheckEmpty(); wrong.has_value()) Fail(-1, *wrong);
  }
}

void World::CheckSnapshot(const EngineSnapshot& snapshot) {
  using State = SequenceSnapshot::State;
  const uint32_t slots = scenario_.node.engine.max_sequences;
  if (snapshot.running > slots) Fail(-1, snapshot.running, " sequences run in ", slots, " slots");
  for (const SequenceSnapshot& sequence : snapshot.sequences) {
    if (sequence.state == State::kParked) Note(Situation::kParked);
    if (sequence.state == State::kPreempted) Note(Situation::kPreempted);
    if (sequence.state == State::kWaiting && snapshot.running < slots) {
      Note(Situation::kWaitedForHbm);
    }
    if (sequence.output_tokens > sequence.max_tokens && sequence.max_tokens > 0) {
      Fail(-1, sequence.request_id, " has more tokens than it may");
    }
  }
}

void World::Breach() {
  if (scenario_.plant == Plant::kPageLeaked) {
    leaked_ = node_->hbm().TryReserve(1);
  } else if (scenario_.plant == Plant::kStrayWrite) {
    if (uint8_t* byte = pools_[random_.Below(pools_.size())].FreeByte(); byte != nullptr) ++*byte;
  }
}

bool World::ReadPartOutsideHbm() const {
  if (scenario_.node.policy.name != "fluxion" || scenario_.node.selects_all) return false;
  const PolicyStatistics statistics = node_->policy().Statistics();
  return std::any_of(statistics.layers.begin(), statistics.layers.end(),
                     [](const PolicyStatistics::Layer& layer) { return layer.missing > 0; });
}

void World::WriteTrace(const std::string& line) {
  const double ms = absl::ToDoubleMilliseconds(clock_.Now() - start_);
  const std::string stamped = absl::StrFormat("%12.6f  %s", ms, line);
  for (const char c : stamped) digest_ = (digest_ ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  if (trace_) std::puts(stamped.c_str());
}

void World::FailWith(int request, const std::string& what) {
  ReportFailure(
      absl::StrFormat("after %.6f ms%s: %s", absl::ToDoubleMilliseconds(clock_.Now() - start_),
                      request < 0 ? std::string() : absl::StrCat(", request ", request), what));
}

}  // namespace sluice::sim
