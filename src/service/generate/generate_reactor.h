// Ties a GenerateCall to gRPC for one type of message.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "src/service/generate/generate_call.h"

namespace sluice {

// A dialect together with its message.
template <typename Response>
class GenerateDialectOf : public GenerateDialect {
 public:
  Response* message() { return &message_; }

 private:
  Response message_;
};

// The gRPC reactor of one call. Deletes itself.
template <typename Response>
class GenerateReactor final : public grpc::ServerWriteReactor<Response>, private GenerateCall {
 public:
  GenerateReactor(const GenerateOptions& options, RequestLog* log,
                  grpc::CallbackServerContext* context,
                  std::unique_ptr<GenerateDialectOf<Response>> dialect)
      : GenerateCall(options, log, context, dialect.get()), dialect_(std::move(dialect)) {
    Start();
  }

  void OnWriteDone(bool ok) override { Written(ok); }
  void OnCancel() override { CallerGone(); }
  void OnDone() override {
    Over();
    delete this;
  }

 private:
  void Write() override { this->StartWrite(dialect_->message()); }
  void WriteLast() override {
    this->StartWriteAndFinish(dialect_->message(), grpc::WriteOptions(), grpc::Status::OK);
  }
  void EndWith(const grpc::Status& status) override { this->Finish(status); }

  const std::unique_ptr<GenerateDialectOf<Response>> dialect_;
};

}  // namespace sluice
