// Admin.Trace: takes what the engine's recorder has on the engine's thread, which is a copy of at
// most some MiB, makes the file on another, and sends it in pieces.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "sluice/v1/admin.pb.h"

namespace sluice {

class Engine;
class StepRecorder;
class WorkerQueue;

// `recorder` may be null; everything else outlives the call. Deletes itself.
grpc::ServerWriteReactor<v1::TraceResponse>* NewTraceReactor(Engine* engine,
                                                             const StepRecorder* recorder,
                                                             WorkerQueue* workers,
                                                             const v1::TraceRequest& request);

}  // namespace sluice
