#include "src/engine/rank_follower.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

absl::Status Differs(const char* what, int slot) {
  return absl::InternalError(
      absl::StrCat("ranks differ: slot ", slot, " could not be ", what, " here"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankFollower>> RankFollower::Create(const Options& options,
                                                                   const Parts& parts) {
  SLUICE_RETURN_IF_ERROR(CheckAttends(*parts.policy, parts.model->cache_layout()));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<BatchState> batch,
                          BatchState::Create({.slots = options.slots,
                                              .max_context = options.max_context,
                                              .ranks = parts.rows,
                                              .halves_from = options.halves_from},
                                             parts.device, *parts.model));
  std::unique_ptr<Stream> stream = parts.device->NewStream(Device::StreamKind::kCompute);
  SLUICE_RETURN_IF_ERROR(batch->RecordPrograms(*stream, *parts.model, *parts.policy));
  return std::unique_ptr<RankFollower>(
      new RankFollower(parts, options, std::move(batch), std::move(stream)));
}

RankFollower::RankFollower(const Parts& parts, const Options& options,
                           std::unique_ptr<BatchState> batch, std::unique_ptr<Stream> stream)
    : parts_(parts),
      part_(options.part),
      batch_(std::move(batch)),
      stream_(std::move(stream)),
      held_(static_cast<size_t>(options.slots), false) {}

RankFollower::~RankFollower() {
  // The enqueued steps end: with their work, or with the group.
  for (int buffer = 0; buffer < BatchState::kDepth; ++buffer) batch_->event(buffer).Wait();
  for (size_t slot = 0; slot < held_.size(); ++slot) {
    if (held_[slot]) Release(static_cast<int>(slot)).IgnoreError();
  }
}

absl::Status RankFollower::Run() {
  absl::Status status = RunOrders();
  if (!status.ok()) parts_.ranks->Abort(std::string(status.message()));
  const absl::Status health = parts_.device->Health();
  return status.ok() || health.ok() ? status : health;
}

absl::Status RankFollower::RunOrders() {
  for (;;) {
    SLUICE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> message, parts_.channel->Receive());
    SLUICE_FAILPOINT_PAUSE(kRankOrder);
    SLUICE_ASSIGN_OR_RETURN(const bool stop, CarryOut(message, *this));
    if (stop) return FinishAll();
    if (parts_.rows != nullptr) CountCopies();
    parts_.channel->Done();
  }
}

void RankFollower::Copies(int slot) {
  if (parts_.rows != nullptr) copying_.push_back(slot);
}

void RankFollower::CountCopies() {
  const uint32_t before = copied_;
  while (!copying_.empty() && (copying_.front() < 0 || parts_.policy->Warm(copying_.front()))) {
    copying_.pop_front();
    ++copied_;
  }
  if (copied_ != before) parts_.channel->Show(copied_);
}

absl::Status RankFollower::Finish(int buffer) {
  batch_->event(buffer).Wait();
  SLUICE_RETURN_IF_ERROR(parts_.device->Health());
  for (const int slot : members_[static_cast<size_t>(buffer)]) {
    SLUICE_RETURN_IF_ERROR(parts_.policy->SlotHealth(slot));
  }
  members_[static_cast<size_t>(buffer)].clear();
  return absl::OkStatus();
}

absl::Status RankFollower::FinishAll() {
  for (int buffer = 0; buffer < BatchState::kDepth; ++buffer) {
    SLUICE_RETURN_IF_ERROR(Finish(buffer));
  }
  return absl::OkStatus();
}

absl::Status RankFollower::Admit(int slot, RankAdmission admission) {
  if (parts_.rows != nullptr) parts_.rows->Give(slot, admission.owner);
  if (Elsewhere(slot)) return absl::OkStatus();
  std::unique_ptr<SequenceCache> home;
  if (admission.has_home) home = SequenceCache::OfRankZero(parts_.dram, std::move(admission.home));
  if (!parts_.policy->Admit(slot, admission.context, admission.total,
                            admission.firm ? Promise::kFirm : Promise::kSoft, home)) {
    return Differs("admitted", slot);
  }
  held_[static_cast<size_t>(slot)] = true;
  Copies(slot);
  return absl::OkStatus();
}

absl::Status RankFollower::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  if (!Elsewhere(slot)) parts_.policy->BeginPrompt(slot, tokens, cached);
  return absl::OkStatus();
}

absl::Status RankFollower::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  if (Elsewhere(slot)) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(FinishAll());
  hints = HintsOf(hints, part_);
  parts_.policy->EndPrompt(slot, tokens, std::move(hints));
  Copies(slot);
  return absl::OkStatus();
}

absl::Status RankFollower::Warm(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  while (!parts_.policy->Warm(slot)) {
    parts_.policy->WarmEvent(slot).Wait();
    SLUICE_RETURN_IF_ERROR(parts_.device->Health());
  }
  std::replace(copying_.begin(), copying_.end(), slot, -1);
  return absl::OkStatus();
}

absl::Status RankFollower::Grow(int slot, int64_t tokens) {
  if (Elsewhere(slot)) return absl::OkStatus();
  return parts_.policy->Grow(slot, tokens) ? absl::OkStatus() : Differs("grown", slot);
}

absl::Status RankFollower::Rest(int slot) {
  if (parts_.device->Health().ok()) SLUICE_RETURN_IF_ERROR(FinishAll());
  SLUICE_RETURN_IF_ERROR(Warm(slot));
  batch_->joined(slot).Wait();
  return absl::OkStatus();
}

absl::Status RankFollower::Release(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(Rest(slot));
  parts_.policy->Release(slot);
  held_[static_cast<size_t>(slot)] = false;
  return absl::OkStatus();
}

absl::Status RankFollower::MakeFirm(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  return parts_.policy->MakeFirm(slot) ? absl::OkStatus() : Differs("made firm", slot);
}

absl::Status RankFollower::ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) {
  if (Elsewhere(slot)) return absl::OkStatus();
  return parts_.policy->ReserveHostCopy(slot, tokens, std::move(prefix))
             ? absl::OkStatus()
             : Differs("given room in DRAM", slot);
}

absl::Status RankFollower::Evict(int slot, int64_t tokens, RankPages home) {
  if (Elsewhere(slot)) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(Rest(slot));
  if (!home.empty()) parts_.dram->ChoosePages(std::move(home));
  parts_.policy->Evict(slot, tokens);
  Copies(slot);
  return absl::OkStatus();
}

// Rank 0 keeps the pages.
absl::Status RankFollower::Detach(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(Rest(slot));
  parts_.policy->DetachHostCache(slot).reset();
  held_[static_cast<size_t>(slot)] = false;
  return absl::OkStatus();
}

absl::Status RankFollower::Join(int slot, const BatchState::Joining& joining) {
  if (Elsewhere(slot)) return absl::OkStatus();
  batch_->Join(*stream_, slot, joining);
  return absl::OkStatus();
}

absl::Status RankFollower::Step(int buffer, const StepPlan& plan) {
  SLUICE_RETURN_IF_ERROR(Finish(buffer));
  for (const PlanRow& row : plan.rows) {
    if (!Elsewhere(row.slot)) members_[static_cast<size_t>(buffer)].push_back(row.slot);
  }
  batch_->Launch(*stream_, buffer, plan, *parts_.model, *parts_.policy);
  return absl::OkStatus();
}

}  // namespace sluice
