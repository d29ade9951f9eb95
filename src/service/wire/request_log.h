// The access log: one line for each Generate call that has ended, at info, from the thread that
// ends the call. Lines of refused calls are bounded in number, since anybody can cause them. No
// line has tokens of a prompt or an answer, unless log_prompts asks for them. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/base/clock.h"
#include "src/base/log_limiter.h"
#include "src/base/strong_id.h"
#include "src/request/token_sink.h"

namespace grpc {
class ServerContextBase;
}

namespace sluice {

class RequestLog {
 public:
  RequestLog(const Clock* clock, bool log_prompts)
      : log_prompts_(log_prompts), refusals_(clock, kBurst, absl::Seconds(1)) {}

  bool log_prompts() const { return log_prompts_; }

  // The call never became a sequence.
  void Refused(const std::string& request_id, const absl::Status& why);
  // The sequence ended. The tokens are written only with log_prompts.
  void Ended(const std::string& request_id, SequenceId sequence, const FinishInfo& end,
             absl::Span<const int32_t> prompt, absl::Span<const int32_t> output) const;

  // What the access log's line about the call is to say; before the call's context goes.
  static void NoteRefused(const grpc::ServerContextBase& context, const std::string& request_id);
  static void NoteEnded(const grpc::ServerContextBase& context, const std::string& request_id,
                        const FinishInfo& end);

 private:
  static constexpr int kBurst = 20;
  const bool log_prompts_;
  LogLimiter refusals_;
};

// What may be said of an error in a log: of a bad request the field, but not the message, which
// quotes what was found there; the message of any other error.
std::string LoggedError(const absl::Status& status);

// Token ids with blanks between; at most kMaxLoggedTokens.
std::string LoggedTokens(absl::Span<const int32_t> ids);
inline constexpr size_t kMaxLoggedTokens = 4096;

}  // namespace sluice
