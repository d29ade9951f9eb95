#include "src/engine/rank_follower.h"

#include <utility>

#include "absl/strings/str_cat.h"
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
      new RankFollower(parts, options.slots, std::move(batch), std::move(stream)));
}

RankFollower::RankFollower(const Parts& parts, int slots, std::unique_ptr<BatchState> batch,
                           std::unique_ptr<Stream> stream)
    : parts_(parts),
      batch_(std::move(batch)),
      stream_(std::move(stream)),
      held_(static_cast<size_t>(slots), false) {}

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
    SLUICE_ASSIGN_OR_RETURN(const bool stop, CarryOut(message, *this));
    if (stop) return FinishAll();
  }
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

absl::Status RankFollower::Admit(int slot, int64_t total, bool firm, int owner) {
  if (parts_.rows != nullptr) parts_.rows->Give(slot, owner);
  if (Elsewhere(slot)) return absl::OkStatus();
  std::unique_ptr<SequenceCache> home;
  if (!parts_.policy->Admit(slot, 0, total, firm ? Promise::kFirm : Promise::kSoft, home)) {
    return Differs("admitted", slot);
  }
  held_[static_cast<size_t>(slot)] = true;
  return absl::OkStatus();
}

absl::Status RankFollower::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  if (!Elsewhere(slot)) parts_.policy->BeginPrompt(slot, tokens, cached);
  return absl::OkStatus();
}

absl::Status RankFollower::EndPrompt(int slot, int64_t tokens) {
  if (Elsewhere(slot)) return absl::OkStatus();
  SLUICE_RETURN_IF_ERROR(FinishAll());
  parts_.policy->EndPrompt(slot, tokens, {});
  return absl::OkStatus();
}

absl::Status RankFollower::Warm(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  while (!parts_.policy->Warm(slot)) {
    parts_.policy->WarmEvent(slot).Wait();
    SLUICE_RETURN_IF_ERROR(parts_.device->Health());
  }
  return absl::OkStatus();
}

absl::Status RankFollower::Grow(int slot, int64_t tokens) {
  if (Elsewhere(slot)) return absl::OkStatus();
  return parts_.policy->Grow(slot, tokens) ? absl::OkStatus() : Differs("grown", slot);
}

absl::Status RankFollower::Release(int slot) {
  if (Elsewhere(slot)) return absl::OkStatus();
  if (parts_.device->Health().ok()) SLUICE_RETURN_IF_ERROR(FinishAll());
  SLUICE_RETURN_IF_ERROR(Warm(slot));
  batch_->joined(slot).Wait();
  parts_.policy->Release(slot);
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
