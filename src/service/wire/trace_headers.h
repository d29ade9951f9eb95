// RequestTrace in a call's metadata: x-request-id, traceparent, tracestate. What came with a call
// goes on with the calls that are made for it, from prefill node to decode node and back.
#pragma once

#include "src/request/request_trace.h"

namespace grpc {
class ClientContext;
class ServerContextBase;
}  // namespace grpc

namespace sluice {

// A malformed header, or one that came twice (tracestate may), is dropped, a tracestate without
// its traceparent with it: the call goes on without. `dropped` (may be null): how many. While the
// call lives.
RequestTrace TraceOf(const grpc::ServerContextBase& context, int* dropped = nullptr);

// Before the call is made.
void PassOn(const RequestTrace& trace, grpc::ClientContext* context);

}  // namespace sluice
