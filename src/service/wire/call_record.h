// The facts about one call that the access log and traces have. The interceptor of call_recorder.h
// makes a record for every call and hands it on when the call is over. The code that serves the
// call adds what only it knows:
//
//   NoteCall(*context, [&](CallFields& call) { call.output_tokens = 24; });
//
// All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/request/request_trace.h"

namespace grpc {
class ServerContextBase;
}

namespace sluice {

// A part of a call, as times since its beginning.
struct CallStage {
  const char* name;  // a literal
  absl::Duration begin, end;
};

struct CallFields {
  std::string method;  // "/sluice.v1.Decode/Generate"
  std::string peer;    // "ipv4:127.0.0.1:41022"
  std::string identity, tenant;
  std::string request_id;  // the name that the caller gave
  RequestTrace trace;      // from the call's metadata
  std::string transfer_id;
  std::string status = "NONE";  // name of the code; "NONE" if the connection broke first
  std::string reason;           // ErrorInfo.reason, or how a sequence ended
  absl::Time begin;
  absl::Duration queued, first_token, total;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t output_tokens = 0;
  uint64_t bytes = 0;  // bytes of caches that the call received or sent
  // For traces only.
  absl::Duration arrived;  // when its sequence arrived, since the call's beginning
  bool pulled = false;     // its caches are read from another node
  std::vector<CallStage> stages;
  std::optional<uint32_t> max_tokens;
  std::optional<double> temperature, top_p;
};

class CallRecord {
 public:
  explicit CallRecord(CallFields fields) : fields_(std::move(fields)) {}

  void Update(const std::function<void(CallFields&)>& update) {
    absl::MutexLock lock(&mutex_);
    update(fields_);
  }
  CallFields Fields() const {
    absl::MutexLock lock(&mutex_);
    return fields_;
  }

 private:
  mutable absl::Mutex mutex_;
  CallFields fields_ ABSL_GUARDED_BY(mutex_);
};

// Updates the record of a call that is alive. Does nothing if no record is kept.
void NoteCall(const grpc::ServerContextBase& context,
              const std::function<void(CallFields&)>& update);

// Called by the interceptor: NoteCall finds the record by its call's context from KeepRecord until
// ForgetRecord.
void KeepRecord(const grpc::ServerContextBase* context, std::shared_ptr<CallRecord> record);
void ForgetRecord(const grpc::ServerContextBase* context);

}  // namespace sluice
