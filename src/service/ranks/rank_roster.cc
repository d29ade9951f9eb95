#include "src/service/ranks/rank_roster.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/rank_channel.h"

namespace sluice {
namespace {

// Rank 0 sends so many bytes ahead of what a rank has taken, which are some thousand plans, or one
// plan of any length.
constexpr uint64_t kAheadBytes = uint64_t{4} << 20;
// A rank says at once when it has taken so many more, and else with the next beat.
constexpr uint64_t kTellBytes = uint64_t{256} << 10;
constexpr size_t kWhyBytes = 512;
constexpr absl::Duration kLastWords = absl::Milliseconds(300);
// A wait looks this often whether the group has failed.
constexpr absl::Duration kLook = absl::Milliseconds(200);

bool Reached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

}  // namespace

RankRoster::RankRoster(Options options)
    : options_(std::move(options)),
      peers_(static_cast<size_t>(options_.rank == 0 ? options_.size : 1)),
      states_(static_cast<size_t>(options_.size)),
      reports_(static_cast<size_t>(options_.size)) {
  watch_ = std::thread([this] { Watch(); });
}

RankRoster::~RankRoster() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  watch_.join();
}

// ---- Joining ----

v1::RankHello RankRoster::Hello() const {
  v1::RankHello hello;
  hello.set_rank(static_cast<uint32_t>(options_.rank));
  hello.set_ranks(static_cast<uint32_t>(options_.size));
  hello.set_version(options_.version);
  hello.set_host(options_.host);
  return hello;
}

absl::Status RankRoster::Admit(const v1::RankHello& hello) {
  absl::MutexLock lock(&mutex_);
  SLUICE_RETURN_IF_ERROR(failure_);
  const auto refused = [&](const auto& why) {
    return absl::StrCat("ranks: rank 0 of '", options_.name, "' ", why);
  };
  if (static_cast<int>(hello.ranks()) != options_.size) {
    return absl::InvalidArgumentError(refused(absl::StrCat(
        "expects ", options_.size, " ranks, and rank ", hello.rank(), " ", hello.ranks())));
  }
  if (hello.rank() == 0 || static_cast<int>(hello.rank()) >= options_.size) {
    return absl::InvalidArgumentError(refused(
        absl::StrCat("awaits the ranks 1 to ", options_.size - 1, ", and not ", hello.rank())));
  }
  if (hello.version() != options_.version) {
    return absl::FailedPreconditionError(
        refused(absl::StrCat("is of version ", options_.version, ", and rank ", hello.rank(),
                             " of ", hello.version(), ": start every rank from one build")));
  }
  Peer& peer = PeerOf(static_cast<int>(hello.rank()));
  if (peer.here || welcomed_) {
    return absl::AlreadyExistsError(
        refused(absl::StrCat("has a rank ", hello.rank(), " already: another process is it")));
  }
  peer = {};
  peer.here = true;
  peer.host = hello.host();
  return absl::OkStatus();
}

absl::Status RankRoster::AwaitAll(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto all = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    const auto here = std::count_if(peers_.begin(), peers_.end(),
                                    [](const Peer& peer) { return peer.here && !peer.ended; });
    return here == options_.size - 1 || !failure_.ok();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&all), timeout);
  SLUICE_RETURN_IF_ERROR(failure_);
  std::vector<int> missing;
  one_host_ = true;
  for (int rank = 1; rank < options_.size; ++rank) {
    if (!PeerOf(rank).here || PeerOf(rank).ended) missing.push_back(rank);
    one_host_ = one_host_ && PeerOf(rank).host == options_.host;
  }
  if (!missing.empty()) {
    return FailLocked(RankLost(
        missing[0],
        absl::StrCat("of '", options_.name, "' did not start within ",
                     absl::FormatDuration(timeout), "; missing: ", absl::StrJoin(missing, ", "))));
  }
  welcomed_ = true;
  for (Peer& peer : peers_) {
    peer.heard = absl::Now();
    peer.next.mutable_welcome()->set_one_host(one_host_);
    peer.dirty = true;
  }
  return absl::OkStatus();
}

void RankRoster::Welcomed(const v1::RankWelcome& welcome) {
  absl::MutexLock lock(&mutex_);
  PeerOf(0).here = true;
  PeerOf(0).heard = absl::Now();
  one_host_ = welcome.one_host();
  welcomed_ = true;
}

// ---- Streams ----

void RankRoster::Take(int other, const v1::RankMessage& message) {
  absl::MutexLock lock(&mutex_);
  PeerOf(other).heard = absl::Now();
  if (leads() && message.states_size() == 1) {
    v1::RankState& known = states_[static_cast<size_t>(other)];
    const v1::RankState& now = message.states(0);
    const bool concerns_all = known.meetings() != now.meetings() ||
                              known.parted() != now.parted() || known.left() != now.left();
    known = now;
    if (concerns_all) TellStates();
  }
  for (int rank = 0; !leads() && rank < std::min(message.states_size(), options_.size); ++rank) {
    if (rank != options_.rank) states_[static_cast<size_t>(rank)] = message.states(rank);
  }
  for (const std::string& plan : message.plans()) plans_.push_back(plan);
  if (!message.shared().empty()) shared_ = message.shared();
  if (!message.report().empty()) reports_[static_cast<size_t>(other)] = message.report();
  if (message.has_failure()) {
    (void)FailLocked(absl::Status(static_cast<absl::StatusCode>(message.failure().code()),
                                  message.failure().message()));
  }
}

bool RankRoster::Next(int other, v1::RankMessage* message) {
  absl::MutexLock lock(&mutex_);
  Peer& peer = PeerOf(other);
  const auto due = [&peer] { return peer.dirty || peer.ended; };
  mutex_.AwaitWithTimeout(absl::Condition(&due), kBeat);
  if (peer.ended || peer.told_last) return false;
  message->Clear();
  message->Swap(&peer.next);
  peer.dirty = false;
  if (!leads()) {
    *message->add_states() = own();
    message->set_report(std::exchange(reports_[static_cast<size_t>(options_.rank)], {}));
  }
  // A rank that rank 0 has left has nothing more to say to anybody.
  peer.told_last = own().left() || (!leads() && states_[0].left());
  return true;
}

void RankRoster::Ended(int other, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  Peer& peer = PeerOf(other);
  peer.ended = true;
  if (leads() && !welcomed_) return;  // it may come again
  if (states_[static_cast<size_t>(other)].left() || own().left()) return;
  (void)FailLocked(
      RankLost(other, absl::StrCat("of '", options_.name, "' has ended",
                                   status.ok() ? "" : absl::StrCat(" (", status.message(), ")"))));
}

void RankRoster::Forget(int other) {
  absl::MutexLock lock(&mutex_);
  if (!welcomed_) PeerOf(other) = {};
}

void RankRoster::TellStates() {
  for (Peer& peer : peers_) {
    peer.dirty = true;
    if (!leads()) continue;
    peer.next.clear_states();
    for (const v1::RankState& state : states_) *peer.next.add_states() = state;
  }
}

// ---- The ends ----

bool RankRoster::IsGone(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return states_[r].left() || (r < peers_.size() && peers_[r].ended);
}

absl::Status RankRoster::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return failure_;
  failure_ =
      WithReason(absl::Status(why.code(), why.message().substr(0, kWhyBytes)), reasons::kRankLost);
  failed_.store(true, std::memory_order_release);
  for (Peer& peer : peers_) {
    peer.next.mutable_failure()->set_code(static_cast<int32_t>(failure_.code()));
    peer.next.mutable_failure()->set_message(std::string(failure_.message()));
    peer.dirty = true;
  }
  return failure_;
}

absl::Status RankRoster::Fail(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  return FailLocked(why);
}

absl::Status RankRoster::FailAfterLastWords(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  const auto failed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !failure_.ok(); };
  mutex_.AwaitWithTimeout(absl::Condition(&failed), kLastWords);
  return FailLocked(why);
}

absl::Status RankRoster::failure() const {
  if (!failed_.load(std::memory_order_acquire)) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  return failure_;
}

int RankRoster::Alive() const {
  absl::MutexLock lock(&mutex_);
  int alive = 0;
  for (int rank = 0; rank < options_.size; ++rank) alive += IsGone(rank) ? 0 : 1;
  return failure_.ok() ? alive : std::min(alive, options_.size - 1);
}

void RankRoster::OnFailure(std::function<void()> end) {
  absl::MutexLock lock(&mutex_);
  on_failure_ = std::move(end);
  const auto quiet = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !calling_; };
  mutex_.Await(absl::Condition(&quiet));
}

bool RankRoster::Landed() {
  absl::MutexLock lock(&mutex_);
  return failure_.ok();
}

void RankRoster::Watch() {
  pthread_setname_np(pthread_self(), "ranks-watch");
  absl::Time last = absl::Now();
  std::function<void()> end;
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stop_), kBeat)) {
    const absl::Time now = absl::Now();
    LookForStill(now, now - last < options_.still_limit / 3);
    last = now;
    if (failure_.ok() || on_failure_ == nullptr) continue;
    end = std::exchange(on_failure_, nullptr);
    calling_ = true;
    mutex_.Unlock();
    end();
    mutex_.Lock();
    calling_ = false;
  }
}

// Time in which this process stood still itself does not count.
void RankRoster::LookForStill(absl::Time now, bool awake) {
  for (size_t rank = 0; welcomed_ && rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.here || IsGone(static_cast<int>(rank))) continue;
    if (!awake) peer.heard = now;
    if (now - peer.heard <= options_.still_limit) continue;
    (void)FailLocked(RankLost(static_cast<int>(rank),
                              absl::StrCat("of '", options_.name, "' has stood still for ",
                                           absl::FormatDuration(options_.still_limit))));
  }
}

void RankRoster::Leave(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  own().set_left(true);
  TellStates();
  // A stream that is given up before it has ended may lose what was written last, such as why the
  // node has failed.
  const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.here || peer.ended; });
  };
  const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended() || !failure_.ok(); };
  const absl::Time give_up = absl::Now() + timeout;
  mutex_.AwaitWithDeadline(absl::Condition(&over), give_up);
  // After a failure, which may come only now, a rank that stands still takes nothing, and callers
  // wait for this process.
  mutex_.AwaitWithTimeout(absl::Condition(&ended), std::min(give_up - absl::Now(), kLastWords));
}

// ---- What the rank does with the others ----

absl::Status RankRoster::Await(int rank, const std::function<bool()>& there, absl::Duration timeout,
                               const char* what) {
  const absl::Time give_up = absl::Now() + timeout;
  const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return there() || !failure_.ok() || IsGone(rank);
  };
  for (;;) {
    const absl::Duration left = give_up - absl::Now();
    mutex_.AwaitWithTimeout(absl::Condition(&over), std::min(left, kLook));
    SLUICE_RETURN_IF_ERROR(failure_);
    if (there()) return absl::OkStatus();
    if (IsGone(rank)) {
      return FailLocked(RankLost(rank, absl::StrCat("of '", options_.name, "' has ended")));
    }
    if (const RankGroup* const group = group_.load(); group != nullptr) {
      SLUICE_RETURN_IF_ERROR(group->status());
    }
    if (left <= kLook) {
      return FailLocked(
          RankLost(rank, absl::StrCat("of '", options_.name, "' did not come to ", what, " within ",
                                      absl::FormatDuration(timeout))));
    }
  }
}

void RankRoster::EndWith(const RankGroup* group) { group_.store(group); }

absl::Status RankRoster::Send(absl::Span<const uint8_t> plan) {
  SLUICE_CHECK(leads(), "rank 0 sends");
  absl::MutexLock lock(&mutex_);
  ++messages_;
  const uint64_t most = kAheadBytes - std::min<uint64_t>(kAheadBytes, plan.size());
  for (int rank = 1; rank < options_.size; ++rank) {
    const auto room = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return sent_bytes_ - states_[static_cast<size_t>(rank)].taken_bytes() <= most;
    };
    SLUICE_RETURN_IF_ERROR(Await(rank, room, options_.deadline, "a plan"));
  }
  sent_bytes_ += plan.size();
  for (int rank = 1; rank < options_.size; ++rank) {
    PeerOf(rank).next.add_plans(plan.data(), plan.size());
    PeerOf(rank).dirty = true;
  }
  return absl::OkStatus();
}

absl::Status RankRoster::Receive(std::string* plan) {
  SLUICE_CHECK(!leads(), "rank 0 sends");
  absl::MutexLock lock(&mutex_);
  const auto there = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !plans_.empty(); };
  SLUICE_RETURN_IF_ERROR(Await(0, there, absl::InfiniteDuration(), "a plan"));
  *plan = std::move(plans_.front());
  plans_.pop_front();
  ++messages_;
  own().set_taken_bytes(own().taken_bytes() + plan->size());
  if (own().taken_bytes() - told_bytes_ >= kTellBytes) {
    told_bytes_ = own().taken_bytes();
    TellStates();
  }
  return absl::OkStatus();
}

uint32_t RankRoster::sent() const {
  absl::MutexLock lock(&mutex_);
  return messages_;
}

void RankRoster::Done() {
  absl::MutexLock lock(&mutex_);
  own().set_done(messages_);
  TellStates();
}

absl::Status RankRoster::AwaitDone(uint32_t plans) {
  absl::MutexLock lock(&mutex_);
  for (int rank = 1; rank < options_.size; ++rank) {
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return Reached(states_[static_cast<size_t>(rank)].done(), plans);
    };
    SLUICE_RETURN_IF_ERROR(Await(rank, there, options_.deadline, "the end of an order"));
  }
  return absl::OkStatus();
}

void RankRoster::Show(uint32_t number) {
  absl::MutexLock lock(&mutex_);
  own().set_shown(number);
  TellStates();
}

uint32_t RankRoster::Shown(int rank) const {
  absl::MutexLock lock(&mutex_);
  return states_[static_cast<size_t>(rank)].shown();
}

// It goes with the next message, at the next beat.
void RankRoster::Report(absl::Span<const uint8_t> bytes) {
  SLUICE_CHECK(!leads(), "ranks report to rank 0");
  SLUICE_CHECK(bytes.size() <= RankChannel::kMostReportBytes, "more than a report may have");
  absl::MutexLock lock(&mutex_);
  reports_[static_cast<size_t>(options_.rank)].assign(bytes.begin(), bytes.end());
}

std::optional<std::vector<uint8_t>> RankRoster::ReportOf(int rank) const {
  SLUICE_CHECK(leads(), "ranks report to rank 0");
  absl::MutexLock lock(&mutex_);
  const std::string& bytes = reports_[static_cast<size_t>(rank)];
  if (bytes.empty()) return std::nullopt;
  return std::vector<uint8_t>(bytes.begin(), bytes.end());
}

absl::Status RankRoster::Meet(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const uint32_t meeting = own().meetings() + 1;
  own().set_meetings(meeting);
  TellStates();
  for (int rank = 0; rank < options_.size; ++rank) {
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return Reached(states_[static_cast<size_t>(rank)].meetings(), meeting);
    };
    SLUICE_RETURN_IF_ERROR(Await(rank, there, timeout, "the start"));
  }
  return absl::OkStatus();
}

absl::Status RankRoster::Share(absl::Span<uint8_t> bytes, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  if (leads()) {
    for (Peer& peer : peers_) {
      peer.next.set_shared(bytes.data(), bytes.size());
      peer.dirty = true;
    }
    return failure_;
  }
  const auto there = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !shared_.empty(); };
  SLUICE_RETURN_IF_ERROR(Await(0, there, timeout, "what rank 0 shares"));
  SLUICE_CHECK(shared_.size() == bytes.size(), "ranks share the same");
  std::memcpy(bytes.data(), shared_.data(), bytes.size());
  return absl::OkStatus();
}

void RankRoster::Part(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  own().set_parted(true);
  TellStates();
  const auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() ||
           std::all_of(states_.begin(), states_.end(),
                       [](const v1::RankState& state) { return state.parted() || state.left(); });
  };
  mutex_.AwaitWithTimeout(absl::Condition(&over), timeout);
}

bool RankRoster::OneHost() const {
  absl::MutexLock lock(&mutex_);
  return one_host_;
}

}  // namespace sluice
