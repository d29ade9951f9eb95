#include "src/service/grpc/malformed_messages.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

namespace ge = grpc::experimental;

class MalformedMessage : public ge::Interceptor {
 public:
  explicit MalformedMessage(std::string method) : method_(std::move(method)) {}

  void Intercept(ge::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(ge::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = methods->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
          status.error_message().empty()) {
        methods->ModifySendStatus(ToGrpcStatus(InvalidField(
            "message", absl::StrCat("the bytes are no request of ", method_,
                                    ": not protobuf, or a string in it is not UTF-8"))));
      }
    }
    methods->Proceed();
  }

 private:
  const std::string method_;
};

class Factory : public ge::ServerInterceptorFactoryInterface {
 public:
  ge::Interceptor* CreateServerInterceptor(ge::ServerRpcInfo* info) override {
    const bool one_request = info->type() == ge::ServerRpcInfo::Type::UNARY ||
                             info->type() == ge::ServerRpcInfo::Type::SERVER_STREAMING;
    // gRPC answers the calls of its own services.
    if (!one_request || absl::StartsWith(info->method(), "/grpc.")) return nullptr;
    return new MalformedMessage(info->method());  // gRPC owns it
  }
};

}  // namespace

std::unique_ptr<ge::ServerInterceptorFactoryInterface> NewMalformedMessages() {
  return std::make_unique<Factory>();
}

}  // namespace sluice
