#include "src/attention/offload/slot_workers.h"

#include <bit>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Returns the first `count` workers, as bits.
uint64_t Bits(int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Returns what a worker does for a sequence, for messages.
const char* Does(WorkerDuty duty) {
  return duty == WorkerDuty::kAttend ? "attends to this sequence" : "fetches for this sequence";
}

}  // namespace

SlotWorkers::Held::Held(SlotWorkers& workers, int worker)
    : team_(*workers.team_), worker_(worker), held_(team_.Hold(worker)) {}

SlotWorkers::Held::~Held() {
  if (held_) team_.LetGo(worker_);
}

void SlotWorkers::SlotRest::Wait() const {
  while (!Ready()) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

absl::StatusOr<std::unique_ptr<SlotWorkers>> SlotWorkers::Create(const Options& options,
                                                                 Share share) {
  auto made = std::unique_ptr<SlotWorkers>(new SlotWorkers(options, std::move(share)));
  SLUICE_RETURN_IF_ERROR(made->Begin());
  return made;
}

SlotWorkers::SlotWorkers(const Options& options, Share share)
    : options_(options),
      share_(std::move(share)),
      states_(std::make_unique<WorkerState[]>(static_cast<size_t>(AllWorkers()))),
      servers_(std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(options.slots))) {
  for (int slot = 0; slot < options_.slots; ++slot) rests_.emplace_back(this, slot);
}

absl::Status SlotWorkers::Begin() {
  WorkerTeamOptions team;
  team.mailbox = {options_.channels, AllWorkers(), options_.slots, options_.deadline};
  SLUICE_ASSIGN_OR_RETURN(
      team_, options_.device->NewWorkerTeam(
                 team, [this](int worker, int channel) { return Work(worker, channel); }));
  for (int slot = 0; slot < options_.slots; ++slot) Join(slot);
  return absl::OkStatus();
}

void SlotWorkers::Join(int slot) {
  uint64_t servers = WorkersLeftFor(slot);
  if (!common_retired_.load(std::memory_order_relaxed)) {
    servers |= CommonBit() & ~team_->gone() & ~team_->late();
  }
  servers_[static_cast<size_t>(slot)].store(servers, std::memory_order_relaxed);
  team_->SetServers(slot, servers);
  team_->Reset(slot);
}

// Returns the workers of the slot's group that are left; if none is, those of the next group.
uint64_t SlotWorkers::WorkersLeftFor(int slot) const {
  const uint64_t gone = team_->gone();
  for (int i = 0; i < options_.groups; ++i) {
    const int group = (slot + i) % options_.groups;
    const int begin = group * options_.workers / options_.groups;
    const int end = (group + 1) * options_.workers / options_.groups;
    const uint64_t left = Bits(end) & ~Bits(begin) & ~gone;
    if (left != 0) return left;
  }
  return Bits(options_.workers);  // all have died: the next round says so
}

absl::Status SlotWorkers::Health(int slot) const {
  const char* what = nullptr;
  switch (team_->error(slot)) {
    case MailboxError::kNone:
      return absl::OkStatus();
    case MailboxError::kFailed:
      what = "failed";
      break;
    case MailboxError::kLeft:
      what = "has died";
      break;
    case MailboxError::kDeadline:
      what = "did not answer in time";
      break;
  }
  return WithReason(
      absl::InternalError(absl::StrCat("a CPU worker that ", Does(options_.duty), " ", what)),
      reasons::kWorkerFailed);
}

// A worker that is at work on a sequence past its step has missed the deadline, and the sequence's
// health says so before the step is done. If the sequence is healthy, the workers belong to a step
// under way.
bool SlotWorkers::AtRest(int slot) const {
  if (team_->error(slot) == MailboxError::kNone) return true;
  for (int w = 0; w < options_.workers; ++w) {
    const WorkerState& state = states_[static_cast<size_t>(w)];
    if (state.slot.load(std::memory_order_acquire) == slot) return false;
  }
  return true;
}

WorkerStatistics SlotWorkers::Statistics() const {
  WorkerStatistics out;
  out.duty = options_.duty;
  out.workers = options_.workers - std::popcount(team_->gone() & ~CommonBit());
  out.failed = team_->failures(MailboxError::kFailed);
  out.left = team_->failures(MailboxError::kLeft);
  out.late = team_->failures(MailboxError::kDeadline);
  for (int w = 0; w < options_.workers; ++w) {
    const WorkerState& state = states_[static_cast<size_t>(w)];
    out.busy += absl::Nanoseconds(state.busy_ns.load(std::memory_order_relaxed));
    out.tokens += state.tokens.load(std::memory_order_relaxed);
  }
  return out;
}

// Stored with release for -1, so that whoever finds the slot at rest comes after the last read.
void SlotWorkers::SetReading(int worker, int slot) {
  states_[static_cast<size_t>(worker)].slot.store(slot, std::memory_order_release);
}

void SlotWorkers::SetTokens(int worker, int64_t tokens) {
  states_[static_cast<size_t>(worker)].tokens.store(tokens, std::memory_order_relaxed);
}

void SlotWorkers::SetWaited(int worker, absl::Duration waited) {
  states_[static_cast<size_t>(worker)].waited = waited;
}

absl::Status SlotWorkers::InjectedFault() {
  if (SLUICE_FAILPOINT(kAttentionWorkerExit)) {
    return absl::AbortedError("failpoint attention.worker_exit");
  }
  if (SLUICE_FAILPOINT(kAttentionWorker)) {
    return absl::InternalError("failpoint attention.worker");
  }
  return absl::OkStatus();
}

absl::Status SlotWorkers::Work(int worker, int channel) {
  const auto begin = std::chrono::steady_clock::now();
  WorkerState& state = states_[static_cast<size_t>(worker)];
  state.waited = absl::ZeroDuration();
  SLUICE_ASSIGN_OR_RETURN(const bool served, share_(worker, channel));
  if (!served) return absl::OkStatus();
  const absl::Duration busy =
      absl::FromChrono(std::chrono::steady_clock::now() - begin) - state.waited;
  state.busy_ns.store(
      state.busy_ns.load(std::memory_order_relaxed) + absl::ToInt64Nanoseconds(busy),
      std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace sluice
