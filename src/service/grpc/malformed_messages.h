// Bytes that are no message of the method that was called: gRPC's callback API answers them with a
// bare UNIMPLEMENTED, as if there were no such method. This makes it INVALID_ARGUMENT, field
// "message", which a caller cannot mistake.
#pragma once

#include <memory>

#include <grpcpp/support/server_interceptor.h>

namespace sluice {

// For the unary and server-streaming methods of sluice.*, whose services themselves never answer
// UNIMPLEMENTED; the others' calls go without an interceptor.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewMalformedMessages();

}  // namespace sluice
