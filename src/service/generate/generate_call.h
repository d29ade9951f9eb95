// One Generate call of any dialect: it turns a request into a sequence of the Generator, and the
// sequence's tokens into messages. Tokens pass through a bounded TokenStream. The pump's thread
// starts a write when none is under way, so no thread ever waits for a reader. generate_reactor.h
// ties the call to gRPC.
#pragma once

#include <grpcpp/server_context.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/request/generator.h"
#include "src/request/token_sink.h"
#include "src/service/generate/call_pump.h"
#include "src/service/wire/request_log.h"

namespace sluice {

class Metrics;
class Puller;
class TenantGate;

// The options that the services of all dialects share.
struct GenerateOptions {
  // The served model's limits.
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;
  // Tokens that a slow reader may leave unread before its sequence is parked.
  size_t stream_capacity = 256;
  // How long a caller has to take the rest after its sequence has ended. Its call is then
  // cancelled, so that a caller who never reads keeps nothing here.
  absl::Duration cancel_after = absl::Seconds(30);
  // These outlive the service. The generator counts the requests that it ends, and this service
  // those that never became a sequence.
  Generator* generator = nullptr;
  CallPump* pump = nullptr;
  Metrics* metrics = nullptr;
  // Pulls the caches that another node holds. Null if no request of this generator has a source.
  Puller* puller = nullptr;
  // Gives every request to a tenant. Outlives the service. Null if nobody is asked.
  const TenantGate* gate = nullptr;
  // Whether token ids are written into the log.
  bool log_prompts = false;
};

// A dialect's part in one call: it reads the request and makes the messages. One thread at a time
// calls it.
class GenerateDialect {
 public:
  virtual ~GenerateDialect() = default;
  // Returns the caller's name for the request as it came, before anything is checked.
  virtual std::string request_id() const = 0;
  // Returns the request without deadline and sink. The call makes up an empty request_id.
  virtual absl::StatusOr<Request> Read() = 0;
  // Returns the error in the caller's words, since fields have other names in other dialects.
  virtual absl::Status Translated(const absl::Status& status) const = 0;
  // Called before everything below. `request_id` is the one in Read's request, or the one that was
  // made up.
  virtual void Begin(const std::string& request_id) = 0;

  // Makes a message of new tokens. Returns false if they go out later, with others.
  virtual bool SetTokens(absl::Span<const OutputToken> tokens) = 0;
  // Returns whether the last message has tokens too, so that tokens that come with the end need no
  // message of their own.
  virtual bool EndHasTokens() const = 0;
  // Makes the last message, or adds to the one just made if EndHasTokens(). Returns false if the
  // call ends with the status of `end` alone.
  virtual bool SetEnd(const FinishInfo& end, bool add) = 0;
};

// The pump's thread, which the engine's thread wakes through the TokenStream, and gRPC's threads
// meet in Pump().
//
// A call has one Finish, which follows the generator's one Finish whatever ended the sequence. A
// client that is gone makes the generator end the sequence, and that end then ends the call. gRPC
// reports the end of the call after that, and after every other reaction has returned.
// SetReadyCallback(nullptr) waits for the engine's thread, and Forget for the pump's. So nothing
// can reach a call that is deleted.
class GenerateCall : private CallPump::Source {
 public:
  // Everything outlives the call except `dialect`, which its owner keeps for as long.
  GenerateCall(const GenerateOptions& options, RequestLog* log,
               grpc::CallbackServerContext* context, GenerateDialect* dialect);
  ~GenerateCall() override = default;

 protected:
  // Must be called once the object is whole.
  void Start();
  // gRPC's reactions: a write has ended; the client has cancelled, its connection broke or its
  // deadline passed; the call is over.
  void Written(bool ok);
  void CallerGone();
  void Over();

  // gRPC's actions on the dialect's message. Two are never under way at once.
  virtual void Write() = 0;
  virtual void WriteLast() = 0;
  virtual void EndWith(const grpc::Status& status) = 0;

 private:
  class CancelTimer;
  absl::Status Submit();
  void Pump() override;
  void WriteEnd(bool add) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelSequence();

  const GenerateOptions& options_;
  RequestLog* const log_;
  grpc::CallbackServerContext* const context_;
  GenerateDialect* const dialect_;
  std::string request_id_;
  SequenceId sequence_;
  std::vector<int32_t> prompt_;          // kept for the log only
  std::shared_ptr<TokenStream> stream_;  // null if Submit was refused

  absl::Mutex mutex_;
  std::optional<FinishInfo> end_ ABSL_GUARDED_BY(mutex_);  // read from the stream
  std::vector<int32_t> output_ ABSL_GUARDED_BY(mutex_);    // kept for the log only
  // set once, under mutex_, when the sequence has ended
  std::shared_ptr<CancelTimer> cancel_timer_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // gRPC has the dialect's message
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;       // nobody reads any more
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // the generator was told
};

}  // namespace sluice
