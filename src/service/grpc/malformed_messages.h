// Answers bytes that are no message of the called method with INVALID_ARGUMENT, field "message",
// which a caller cannot mistake. gRPC's callback API alone answers them with a bare UNIMPLEMENTED,
// as if there were no such method.
#pragma once

#include <memory>

#include <grpcpp/support/server_interceptor.h>

namespace sluice {

// Handles the unary and server-streaming methods of sluice.*, whose services never answer
// UNIMPLEMENTED themselves. Calls of other services go without an interceptor.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewMalformedMessages();

}  // namespace sluice
