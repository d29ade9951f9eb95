// Admin.Trace. Copies the engine's record on the engine's thread, which is at most some MiB, makes
// the file on another thread, and sends it in pieces.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "sluice/v1/admin.pb.h"

namespace sluice {

class Engine;
class StepRecorder;
class WorkerQueue;

// `recorder` may be null. Everything else outlives the call. The reactor deletes itself.
grpc::ServerWriteReactor<v1::TraceResponse>* NewTraceReactor(Engine* engine,
                                                             const StepRecorder* recorder,
                                                             WorkerQueue* workers,
                                                             const v1::TraceRequest& request);

}  // namespace sluice
