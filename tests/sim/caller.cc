#include "tests/sim/caller.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "tests/sim/sender.h"
#include "tests/sim/world.h"

namespace sluice::sim {
namespace {

constexpr int kSubmitAttempts = 3;

}  // namespace

// The real stream, observed on the engine's side.
class Caller::Sink : public TokenSink {
 public:
  Sink(Caller* caller, size_t capacity, std::function<void()> on_room)
      : caller_(caller), stream_(capacity, std::move(on_room)) {}

  bool HasRoom(size_t count) const override {
    const bool room = stream_.HasRoom(count);
    caller_->parked_ = !room;
    caller_->was_parked_ = caller_->was_parked_ || !room;
    return room;
  }
  void Emit(OutputToken token) override {
    const Plant plant = caller_->world_->scenario().plant;
    const bool planted = OneIn(caller_->random_, 100);
    if (plant == Plant::kTokenTwice && planted && stream_.HasRoom(2)) {
      caller_->Emitted(token);
      stream_.Emit(token);
    }
    if (plant == Plant::kTokenLost && planted) return;
    caller_->Emitted(token);
    stream_.Emit(std::move(token));
  }
  void Finish(FinishInfo info) override {
    const Plant plant = caller_->world_->scenario().plant;
    const bool planted = OneIn(caller_->random_, 20);
    if (plant == Plant::kEndLost && planted) return;
    caller_->Ended(info);
    if (plant == Plant::kEndTwice && planted) caller_->Ended(info);
    stream_.Finish(std::move(info));
  }
  TokenStream& stream() { return stream_; }

 private:
  Caller* const caller_;
  TokenStream stream_;
};

Caller::Caller(World* world, const RequestSpec& request, Sender* sender)
    : world_(world),
      request_(request),
      sender_(sender),
      name_(absl::StrCat("request ", request.index)),
      random_(~request.seed) {
  sink_ = std::make_shared<Sink>(this, request.stream_capacity, [this] {
    if (world_->scenario().plant == Plant::kWakeLost) return;
    world_->engine().Wake();
  });
}

void Caller::Fail(const std::string& why) const { world_->Fail(request_.index, why); }

void Caller::Start() {
  if (request_.never_generates) return world_->Note(Situation::kGenerateNever);
  if (request_.meeting == Meeting::kById) return;
  world_->clock().After(request_.generate_at, [this] { Submit(); });
}

void Caller::Reserved() {
  if (request_.never_generates || request_.meeting != Meeting::kById) return;
  if (!request_.generate_after_commit) {
    world_->clock().After(request_.generate_at, [this] { Submit(); });
  }
}

void Caller::Committed() {
  if (request_.never_generates || request_.meeting != Meeting::kById) return;
  if (request_.generate_after_commit) {
    world_->clock().After(request_.generate_at, [this] { Submit(); });
  }
}

Request Caller::MakeRequest() const {
  Request request;
  request.request_id = name_;
  request.sampling = request_.sampling;
  request.sink = sink_;
  switch (request_.meeting) {
    case Meeting::kById:
      request.handoff.transfer_id = sender_->transfer_id();
      break;
    case Meeting::kByKey:
      request.handoff.rendezvous_key = sender_->rendezvous_key();
      break;
    case Meeting::kLocal:
      request.prompt = request_.prompt;
      break;
  }
  return request;
}

void Caller::Submit() {
  const absl::Time now = world_->clock().Now();
  Request request = MakeRequest();
  if (request_.deadline.has_value()) {
    deadline_ = now + *request_.deadline;
    if (world_->scenario().plant != Plant::kDeadlineForgotten) request.deadline = deadline_;
  }
  // This is set before Submit, because the engine's next turn may already see the request.
  submitted_at_ = last_read_ = now;
  const auto id = world_->engine().Submit(std::move(request));
  if (!id.ok()) {
    world_->Trace("caller ", request_.index, ": Generate: ", ReasonOr(id.status()));
    const std::string reason = ReasonOf(id.status()).value_or("");
    if (reason == "TOO_MANY_WAITING" && RetryAfterOf(id.status()).has_value()) {
      world_->Note(Situation::kTooManyWaiting);
      if (++attempts_ < kSubmitAttempts) {
        world_->clock().After(*RetryAfterOf(id.status()), [this] { Submit(); });
      }
    } else if (reason == "DRAINING" && world_->draining()) {
      world_->Note(Situation::kRefusedWhileDraining);
    } else if (!(reason == "TRANSFER_NOT_FOUND" && sender_ != nullptr && sender_->MayBeGone()) &&
               !(reason == "POISONED" && sender_ != nullptr && sender_->is_poisoned())) {
      Fail(absl::StrCat("Generate was refused: ", std::string(id.status().ToString())));
    }
    return;
  }
  if (world_->draining()) Fail("Generate was accepted while draining");
  id_ = *id;
  submitted_ = true;
  world_->Trace("caller ", request_.index, ": Generate is accepted");
  if (sender_ == nullptr) {
    world_->Note(Situation::kLocalPrefill);
  } else {
    sender_->CallerAttached();
    world_->Note(sender_->transfer_id().empty() ? Situation::kGenerateBeforeReserve
                 : sender_->is_committed()      ? Situation::kGenerateAfterCommit
                                                : Situation::kGenerateDuringTransfer);
    if (request_.context < request_.prompt.size()) world_->Note(Situation::kPartialContext);
    if (!request_.first.empty()) world_->Note(Situation::kFirstTokens);
  }
  if (request_.sampling.temperature > 0) world_->Note(Situation::kSampled);
  if (request_.cancel.has_value()) {
    world_->clock().After(*request_.cancel, [this] { Cancel(); });
  }
  if (request_.generates_twice && request_.meeting == Meeting::kById) {
    world_->clock().After(DrawDuration(random_, absl::Milliseconds(40)), [this] { SubmitAgain(); });
  }
  sink_->stream().SetReadyCallback([this] {
    switch (request_.reading) {
      case Reading::kNever:
        if (ended_) ReadAfter(request_.pause);
        return;
      case Reading::kNowAndThen:
        return ReadAfter(request_.pause / 4);
      case Reading::kPausing:
        if (!paused_ && (emitted_ > 2 || ended_)) {
          paused_ = true;
          return ReadAfter(request_.pause);
        }
        [[fallthrough]];
      case Reading::kAtOnce:
        return ReadAfter(absl::Microseconds(10));
    }
  });
}

void Caller::SubmitAgain() {
  world_->Note(Situation::kGenerateTwice);
  Request again = MakeRequest();
  const bool same_name = OneIn(random_, 2);
  if (!same_name) absl::StrAppend(&again.request_id, " again");
  const absl::Status status = world_->engine().Submit(std::move(again)).status();
  const std::string reason = ReasonOf(status).value_or("");
  const bool expected = reason == "GENERATE_EXISTS" || reason == "TRANSFER_NOT_FOUND" ||
                        reason == "TOO_MANY_WAITING" ||
                        (reason == "DRAINING" && world_->draining()) ||
                        (reason == "REQUEST_ID_IN_USE" && same_name && alive()) ||
                        (reason == "POISONED" && sender_->is_poisoned());
  if (!expected) Fail(absl::StrCat("a second Generate: ", std::string(status.ToString())));
}

void Caller::Cancel() {
  world_->Trace("caller ", request_.index, ": Cancel");
  if (ended_) world_->Note(Situation::kCancelMissed);
  if (!cancelled_at_.has_value()) cancelled_at_ = world_->clock().Now();
  if (OneIn(random_, 2)) {
    world_->engine().Cancel(id_, absl::CancelledError("simulated"));
    return;
  }
  world_->engine().CancelRequest(name_, absl::CancelledError("simulated"),
                                 [this, was_over = ended_](bool found) {
                                   if (found && was_over) Fail("Cancel found what had ended");
                                   if (found && !ended_) Fail("Cancel found it and left it");
                                 });
}

void Caller::EverythingWasCancelled() {
  if (alive() && !cancelled_at_.has_value()) cancelled_at_ = world_->clock().Now();
}

void Caller::Emitted(const OutputToken& token) {
  world_->Trace("caller ", request_.index, ": token ", emitted_, " is ", token.id);
  const std::vector<OutputToken>& want = request_.expected.tokens;
  if (ended_) Fail("a token after the end");
  if (emitted_ >= want.size()) {
    Fail(absl::StrCat("token ", emitted_, " is ", token.id, ", but ", want.size(),
                      " are all that there are"));
  }
  const OutputToken& expected = want[emitted_];
  if (token.id != expected.id) {
    Fail(absl::StrCat("token ", emitted_, " is ", token.id, ", expected ", expected.id));
  }
  if (token.logprob != expected.logprob || token.top_logprobs != expected.top_logprobs) {
    Fail(absl::StrCat("token ", emitted_, ": its log-probabilities differ"));
  }
  ++emitted_;
}

void Caller::Ended(const FinishInfo& info) {
  world_->Trace("caller ", request_.index, ": ends after ", emitted_, " tokens: ",
                info.reason == FinishInfo::Reason::kError ? ReasonOr(info.status) : "well");
  if (ended_) Fail("a stream ended twice");
  ended_ = true;
  if (sender_ != nullptr) sender_->CallerEnded();
  if (info.completion_tokens != emitted_) {
    Fail(absl::StrCat("the end counts ", info.completion_tokens, " tokens, ", emitted_, " came"));
  }
  CheckExact(info);
  CheckDrafts(info);
  if (info.reason == FinishInfo::Reason::kError) return CheckError(info);
  const bool all = emitted_ == request_.expected.tokens.size();
  if (info.reason == FinishInfo::Reason::kStop) {
    if (!all || request_.expected.end != Expected::End::kStop ||
        info.stop_token_id != request_.expected.stop_token) {
      Fail("it stopped where it should not");
    }
    world_->Note(Situation::kEndedByStop);
  } else {
    if (!all || request_.expected.end != Expected::End::kLength)
      Fail("it ended short of its length");
    world_->Note(Situation::kEndedByLength);
  }
  if (was_parked_) world_->Note(Situation::kReadAgainAfterParking);
}

void Caller::CheckExact(const FinishInfo& info) {
  const int64_t limit = world_->node().policy().exact_tokens();
  const auto prompt = static_cast<int64_t>(request_.prompt.size());
  // The first token comes from the prompt's last row, or with others from the prefill node.
  const int64_t given = std::max<int64_t>(std::ssize(request_.first), 1);
  const int64_t fit = std::max(given, limit - prompt + 1);
  if (info.exact_tokens != std::min<int64_t>(fit, static_cast<int64_t>(emitted_))) {
    Fail(absl::StrCat("the end counts ", info.exact_tokens, " exact tokens of ", emitted_,
                      ", the policy is exact up to ", limit, " tokens"));
  }
  for (size_t i = 0; i < info.exact_tokens; ++i) {
    if (i < request_.exact.size() && request_.exact[i].id == request_.expected.tokens[i].id) {
      continue;
    }
    Fail(absl::StrCat("token ", i, " is not what full attention gives"));
  }
  if (info.exact_tokens > given && info.exact_tokens < emitted_) {
    world_->Note(Situation::kOutgrewItsBudget);
  }
}

void Caller::CheckDrafts(const FinishInfo& info) {
  const uint32_t most = world_->scenario().node.engine.draft_tokens;
  // Every step with drafts gives one token more than it accepts drafts, except one with bad logits.
  if (info.accepted_tokens > info.drafted_tokens || info.accepted_tokens > emitted_ ||
      info.drafted_tokens > uint64_t{most} * (emitted_ + 1)) {
    Fail(absl::StrCat("the end counts ", info.drafted_tokens, " drafts and ", info.accepted_tokens,
                      " accepted ones for ", emitted_, " tokens"));
  }
  if (info.accepted_tokens > 0) world_->Note(Situation::kDraftAccepted);
  if (info.accepted_tokens < info.drafted_tokens) world_->Note(Situation::kDraftRefuted);
}

void Caller::CheckError(const FinishInfo& info) {
  const absl::Time now = world_->clock().Now();
  const std::string reason = ReasonOf(info.status).value_or("");
  const auto ends = [&](bool may, Situation situation) {
    if (!may) {
      Fail(absl::StrCat("ended without a cause by ", std::string(info.status.ToString())));
    }
    world_->Note(situation);
  };
  if (absl::IsCancelled(info.status)) {
    ends(cancelled_at_.has_value(), Situation::kEndedByCancel);
  } else if (reason == "TRANSFER_WAIT") {
    ends(sender_ != nullptr && now >= submitted_at_ + world_->scenario().node.engine.transfer_wait,
         Situation::kEndedByTransferWait);
  } else if (reason == "LEASE_EXPIRED") {
    ends(sender_ != nullptr && sender_->LeaseMayBeOver(), Situation::kLeaseExpired);
  } else if (absl::IsDeadlineExceeded(info.status)) {
    ends(now >= deadline_, Situation::kEndedByDeadline);
  } else if (reason == "SLOW_READER") {
    ends(now >= last_read_ + world_->scenario().node.engine.slow_reader_timeout,
         Situation::kEndedBySlowReader);
  } else if (reason == "TRANSFER_ABORTED") {
    ends(sender_ != nullptr && sender_->is_aborted(), Situation::kEndedByAbort);
  } else if (reason == "POISONED") {
    ends(sender_ != nullptr && sender_->is_poisoned(), Situation::kEndedByPoison);
  } else if (reason == "BAD_LOGITS") {
    ends(request_.expected.end == Expected::End::kBadLogits &&
             emitted_ == request_.expected.tokens.size(),
         Situation::kEndedByBadLogits);
  } else if (reason == "WORKER_FAILED" || reason == "TRANSFER_FAILED") {
    const SimDeviceOptions& device = world_->scenario().node.device;
    ends(device.worker_failures > 0 || device.late_workers > 0 || device.leaving_workers > 0,
         Situation::kEndedByWorker);
  } else if (reason == "DRAINING") {
    ends(world_->has_drained(), Situation::kEndedByDrain);
  } else if (reason == "DRAIN_TIME") {
    ends(now >= world_->drain_deadline(), Situation::kEndedByDrainTime);
  } else {
    ends(false, Situation::kCount);
  }
}

void Caller::ReadAfter(absl::Duration delay) {
  if (read_is_due_) return;
  read_is_due_ = true;
  world_->clock().After(delay, [this] { Read(); });
}

void Caller::Read() {
  read_is_due_ = false;
  last_read_ = world_->clock().Now();
  const TokenStream::Batch batch = sink_->stream().Read();
  for (const OutputToken& token : batch.tokens) {
    if (token.id != request_.expected.tokens[read_].id) Fail("the reader got another token");
    ++read_;
  }
  if (batch.finish.has_value()) {
    if (end_read_) Fail("the reader met the end twice");
    end_read_ = true;
    if (sender_ == nullptr && batch.finish->reused_tokens > 0) {
      world_->Note(Situation::kPrefixFoundLocally);
    }
    if (read_ != emitted_) {
      Fail(absl::StrCat("the reader got ", read_, " tokens of ", emitted_));
    }
  }
}

absl::Time Caller::Due() const {
  if (!alive()) return absl::InfiniteFuture();
  absl::Time due = std::min(deadline_, world_->drain_deadline());
  if (cancelled_at_.has_value()) due = std::min(due, *cancelled_at_);
  if (sender_ != nullptr && !sender_->is_committed() && added_at_.has_value()) {
    due = std::min(due, *added_at_ + world_->scenario().node.engine.transfer_wait);
  }
  return due;
}

void Caller::CheckAfterTurn(absl::Time start) {
  if (!alive()) return;
  // A turn that waits for the device, as a warm-up may, lets requests come meanwhile: they are
  // added by the next one.
  if (!added_at_.has_value() && submitted_at_ <= start) added_at_ = start;
  // The engine had its chance to see the free space, even if the sequence is preempted and was not
  // asked.
  if (parked_ && sink_->stream().HasRoom(1)) parked_ = false;
  if (Due() <= start) Fail("it is past its time, and a turn did not end it");
}

const char* Caller::Stranded() const {
  if (!alive()) return nullptr;
  if (parked_ && sink_->stream().HasRoom(1)) return "its reader has made room";
  if (sender_ != nullptr && sender_->IsReady()) return "its transfer is ready";
  return nullptr;
}

void Caller::CheckOver() const {
  if (alive()) Fail("its stream never ended");
  if (!submitted_) return;
  if (!end_read_ || read_ != emitted_) Fail("its reader never met the end");
}

}  // namespace sluice::sim
