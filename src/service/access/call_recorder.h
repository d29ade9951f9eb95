// The interceptor that makes a record of every call (call_record.h), and hands it to the access log
// and to traces when the call is over.
#pragma once

#include <memory>

namespace grpc::experimental {
class ServerInterceptorFactoryInterface;
}

namespace sluice {

class Access;
class AccessLog;
class CallTracer;

// Names the readers of records. Either is null if it is off. Both outlive the server.
struct CallReaders {
  AccessLog* log = nullptr;
  const CallTracer* tracer = nullptr;
};

// Returns the interceptor. `access` outlives the server, and is null if nobody is asked who he is.
// It must be registered last, so that the recorded status is the one that other interceptors have
// made.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewCallRecorder(
    const CallReaders& readers, const Access* access);

}  // namespace sluice
