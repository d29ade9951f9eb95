// One Generate of any dialect: from its request to a Generator, and from the sequence's tokens to
// messages. Tokens pass through a bounded TokenStream; the pump's thread starts a write when none
// is under way, so no thread ever waits for a reader. generate_reactor.h ties it to gRPC.
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

// What the services of all dialects share.
struct GenerateOptions {
  // Of the served model.
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;
  // Tokens that a slow reader may leave unread before its sequence is parked.
  size_t stream_capacity = 256;
  // For a caller to take what is left after its sequence has ended; then its call is cancelled, so
  // that one who never reads keeps nothing here.
  absl::Duration linger = absl::Seconds(30);
  // Outlive the service. The generator counts what it ends, this service
  // what never became a sequence.
  Generator* generator = nullptr;
  CallPump* pump = nullptr;
  Metrics* metrics = nullptr;
  // Of requests whose caches another node holds; null: the generator has none such.
  Puller* puller = nullptr;
  // Makes every request a tenant's. Outlives the service; null: nobody is asked.
  const TenantGate* gate = nullptr;
  // Writes token ids into the log.
  bool log_prompts = false;
};

// A dialect's part in one call: it reads the request and makes the messages. One thread at a time.
class GenerateDialect {
 public:
  virtual ~GenerateDialect() = default;
  // The caller's name for the request as it came, before anything is checked.
  virtual std::string request_id() const = 0;
  // All but the deadline and the sink; an empty request_id is made up by the call.
  virtual absl::StatusOr<Request> Read() = 0;
  // An error in the caller's words: fields have other names in other dialects.
  virtual absl::Status Translated(const absl::Status& status) const = 0;
  // `request_id`: Read's, or what was made up. Before everything below.
  virtual void Begin(const std::string& request_id) = 0;

  // Makes a message of new tokens. False: they go out later, with others.
  virtual bool SetTokens(absl::Span<const OutputToken> tokens) = 0;
  // Whether the last message has tokens as well, so that those that come with the end need no other
  // one.
  virtual bool EndHasTokens() const = 0;
  // Makes the last message, or adds to the one just made where EndHasTokens(). False: the call ends
  // with the status of `end` alone.
  virtual bool SetEnd(const FinishInfo& end, bool add) = 0;
};

// The pump's thread, which the engine's wakes through the TokenStream, and gRPC's threads meet in
// Pump().
//
// Its one Finish follows the generator's one Finish, whatever ended the sequence: a client that is
// gone makes the generator end the sequence, and what that then says ends the call. gRPC reports
// the call's end after that and after every other reaction has returned; SetReadyCallback(nullptr)
// waits for the engine's thread, and Forget for the pump's. So nothing can reach a call that is
// deleted.
class GenerateCall : private CallPump::Source {
 public:
  // Everything outlives the call but `dialect`, which its owner keeps as long.
  GenerateCall(const GenerateOptions& options, RequestLog* log,
               grpc::CallbackServerContext* context, GenerateDialect* dialect);
  ~GenerateCall() override = default;

 protected:
  // To be called once the object is whole.
  void Start();
  // gRPC's reactions: a write has ended; the client has cancelled, its connection broke or its
  // deadline passed; the call is over.
  void Written(bool ok);
  void CallerGone();
  void Over();

  // gRPC's actions, upon the dialect's message; never two at once.
  virtual void Write() = 0;
  virtual void WriteLast() = 0;
  virtual void EndWith(const grpc::Status& status) = 0;

 private:
  class Linger;
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
  std::vector<int32_t> prompt_;          // for the log, if it takes it
  std::shared_ptr<TokenStream> stream_;  // null: Submit was refused

  absl::Mutex mutex_;
  std::optional<FinishInfo> end_ ABSL_GUARDED_BY(mutex_);  // read from the stream
  std::vector<int32_t> output_ ABSL_GUARDED_BY(mutex_);    // the same
  std::shared_ptr<Linger> linger_;  // set once, under mutex_, when the sequence has ended
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // the dialect's message is gRPC's
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;       // nobody reads any more
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // the generator was told
};

}  // namespace sluice
