#include "src/service/wire/trace_headers.h"

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <string>

namespace sluice {
namespace {

constexpr char kRequestId[] = "x-request-id";
constexpr char kTraceparent[] = "traceparent";
constexpr char kTracestate[] = "tracestate";

// Returns all values of a header with commas between them, since a list may come as several
// headers.
std::string ValueOf(const grpc::ServerContextBase& context, const char* name) {
  std::string out;
  const auto [begin, end] = context.client_metadata().equal_range(name);
  for (auto it = begin; it != end; ++it) {
    if (it != begin) out += ',';
    out.append(it->second.data(), it->second.size());
  }
  return out;
}

}  // namespace

RequestTrace TraceOf(const grpc::ServerContextBase& context, int* dropped) {
  int unused = 0;
  int& count = dropped != nullptr ? *dropped : unused;
  count = 0;
  RequestTrace trace;
  const auto once = [&](const char* name) { return context.client_metadata().count(name) == 1; };
  if (context.client_metadata().count(kRequestId) > 0) {
    trace.request_id = ValueOf(context, kRequestId);
    if (!once(kRequestId) || !IsExternalId(trace.request_id)) {
      trace.request_id.clear();
      ++count;
    }
  }
  if (context.client_metadata().count(kTraceparent) == 0) return trace;
  trace.traceparent = ValueOf(context, kTraceparent);
  if (!once(kTraceparent) || !IsTraceparent(trace.traceparent)) {
    trace.traceparent.clear();
    ++count;
    return trace;
  }
  if (context.client_metadata().count(kTracestate) == 0) return trace;
  trace.tracestate = ValueOf(context, kTracestate);
  if (!IsTracestate(trace.tracestate)) {
    trace.tracestate.clear();
    ++count;
  }
  return trace;
}

void PassOn(const RequestTrace& trace, grpc::ClientContext* context) {
  if (!trace.request_id.empty()) context->AddMetadata(kRequestId, trace.request_id);
  if (!trace.traceparent.empty()) context->AddMetadata(kTraceparent, trace.traceparent);
  if (!trace.tracestate.empty()) context->AddMetadata(kTracestate, trace.tracestate);
}

}  // namespace sluice
