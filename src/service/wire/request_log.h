// Writes one log line for each Generate call that has ended, at level info, from the thread that
// ends the call. Lines about refused calls are limited in number, since anybody can cause them. A
// line has tokens of the prompt or the answer only with log_prompts. Thread-safe.
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

  // Logs a call that never became a sequence.
  void Refused(const std::string& request_id, const absl::Status& why);
  // Logs the end of a sequence. The tokens are written only with log_prompts.
  void Ended(const std::string& request_id, SequenceId sequence, const FinishInfo& end,
             absl::Span<const int32_t> prompt, absl::Span<const int32_t> output) const;

  // Adds to the call's record what the access log says about the call. Must run before the call's
  // context goes.
  static void NoteRefused(const grpc::ServerContextBase& context, const std::string& request_id);
  static void NoteEnded(const grpc::ServerContextBase& context, const std::string& request_id,
                        const FinishInfo& end);

 private:
  static constexpr int kBurst = 20;
  const bool log_prompts_;
  LogLimiter refusals_;
};

// Returns the part of an error that may stand in a log. A bad request's message quotes what was
// found, so only its field is returned; any other error's message is returned whole.
std::string LoggedError(const absl::Status& status);

// Returns at most kMaxLoggedTokens token ids, with blanks between them.
std::string LoggedTokens(absl::Span<const int32_t> ids);
inline constexpr size_t kMaxLoggedTokens = 4096;

}  // namespace sluice
