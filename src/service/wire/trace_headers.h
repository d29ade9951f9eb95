// Reads and writes RequestTrace in a call's metadata: x-request-id, traceparent, tracestate. A node
// passes the headers of a call on with the calls that it makes for it, from prefill node to decode
// node and back.
#pragma once

#include "src/request/request_trace.h"

namespace grpc {
class ClientContext;
class ServerContextBase;
}  // namespace grpc

namespace sluice {

// Returns the trace of a live call. A header that is malformed or came twice (tracestate may) is
// dropped, and with a traceparent its tracestate; the call goes on without it. `dropped`, which may
// be null, gets the number of dropped headers.
RequestTrace TraceOf(const grpc::ServerContextBase& context, int* dropped = nullptr);

// Adds the trace to a call. Must come before the call is made.
void PassOn(const RequestTrace& trace, grpc::ClientContext* context);

}  // namespace sluice
