#include "src/service/wire/request_log.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_join.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/metrics/reasons.h"
#include "src/request/request_end.h"
#include "src/service/wire/call_record.h"
#include "src/service/wire/call_stages.h"

namespace sluice {

std::string LoggedError(const absl::Status& status) {
  if (absl::IsInvalidArgument(status)) return FieldOf(status).value_or("");
  return std::string(status.message());
}

std::string LoggedTokens(absl::Span<const int32_t> ids) {
  return absl::StrJoin(ids.first(std::min(ids.size(), kMaxLoggedTokens)), " ");
}

void RequestLog::Refused(const std::string& request_id, const absl::Status& why) {
  if (!LogEnabled(LogLevel::kInfo)) return;
  const std::optional<uint64_t> suppressed = refusals_.Admit();
  if (!suppressed.has_value()) return;
  Log(LogLevel::kInfo, "request refused",
      {{"request_id", request_id},
       {"reason", ReasonLabel(why)},
       {"error", LoggedError(why)},
       {"suppressed", *suppressed}});
}

void RequestLog::NoteRefused(const grpc::ServerContextBase& context,
                             const std::string& request_id) {
  NoteCall(context, [&](CallFields& call) { call.request_id = request_id; });
}

void RequestLog::NoteEnded(const grpc::ServerContextBase& context, const std::string& request_id,
                           const FinishInfo& end) {
  NoteCall(context, [&](CallFields& call) {
    call.request_id = request_id;
    call.transfer_id = end.transfer_id;
    call.reason = EndOf(end).reason;
    call.queued = end.queued;
    call.first_token = end.first_token;
    call.prompt_tokens = end.prompt_tokens;
    call.cached_tokens = end.cached_tokens;
    call.output_tokens = end.completion_tokens;
    call.stages = StagesOf(end, call.arrived, call.pulled);
  });
}

void RequestLog::Ended(const std::string& request_id, SequenceId sequence, const FinishInfo& end,
                       absl::Span<const int32_t> prompt, absl::Span<const int32_t> output) const {
  if (!LogEnabled(LogLevel::kInfo)) return;
  const RequestEnd how = EndOf(end);
  Log(LogLevel::kInfo, "request ended",
      {{"request_id", request_id},
       {"sequence_id", sequence.value()},
       {"transfer_id", end.transfer_id},
       {"outcome", kRequestOutcomeNames[static_cast<size_t>(how.outcome)]},
       {"reason", how.reason},
       {"error", LoggedError(end.status)},
       {"prompt_tokens", end.prompt_tokens},
       {"cached_tokens", end.cached_tokens},
       {"reused_tokens", end.reused_tokens},
       {"output_tokens", end.completion_tokens},
       {"queue_seconds", absl::ToDoubleSeconds(end.queued)},
       {"first_token_seconds", absl::ToDoubleSeconds(end.first_token)},
       {"total_seconds", absl::ToDoubleSeconds(end.total)}});
  if (!log_prompts_) return;
  Log(LogLevel::kInfo, "request tokens",
      {{"request_id", request_id},
       {"sequence_id", sequence.value()},
       {"prompt_token_ids", LoggedTokens(prompt)},
       {"output_token_ids", LoggedTokens(output)}});
}

}  // namespace sluice
