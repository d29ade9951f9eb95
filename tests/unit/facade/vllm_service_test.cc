#include "src/facade/vllm_service.h"

#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "facade/vllm_engine.grpc.pb.h"
#include "src/base/readiness.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_engine.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;

struct Fixture {
  Fixture() {
    FacadeOptions options;
    options.info.max_running = 4;
    options.info.block_tokens = 32;
    options.load = [](const auto& done) { done({2, 1, 300, 1000, 0.3, 12.5, false}); };
    options.readiness = &readiness;
    options.generate.vocab_size = 1000;
    options.generate.max_context = 64;
    options.generate.generator = &engine;
    options.generate.pump = &pump;
    service = NewVllmService(std::move(options));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service.service.get());
    server = builder.BuildAndStart();
    stub = ve::VllmEngine::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                                       grpc::InsecureChannelCredentials()));
  }
  ~Fixture() { server->Shutdown(std::chrono::system_clock::now()); }

  FakeEngine engine;
  CallPump pump;
  Readiness readiness;
  GrpcService service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<ve::VllmEngine::Stub> stub;
};

ve::GenerateRequest Prompt(bool stream) {
  ve::GenerateRequest request;
  request.set_request_id("r");
  request.mutable_tokenized()->add_input_ids(5);
  request.set_stream(stream);
  return request;
}

TEST_CASE("health is the node's readiness") {
  Fixture f;
  const auto health = [&] {
    grpc::ClientContext context;
    ve::HealthCheckResponse response;
    CHECK(f.stub->HealthCheck(&context, {}, &response).ok());
    return response;
  };
  CHECK_FALSE(health().healthy());
  f.readiness.SetReady();
  CHECK(health().healthy());
  f.readiness.SetDraining(true);
  CHECK_FALSE(health().healthy());
  CHECK_FALSE(health().message().empty());
}

TEST_CASE("loads and server info say what the node does") {
  Fixture f;
  grpc::ClientContext context;
  ve::GetLoadsResponse loads;
  REQUIRE(f.stub->GetLoads(&context, {}, &loads).ok());
  REQUIRE(loads.loads_size() == 1);
  CHECK(loads.loads(0).num_total_reqs() == 3);
  CHECK(loads.loads(0).utilization() == 0.5);
  CHECK(loads.loads(0).gen_throughput() == 12.5);
  grpc::ClientContext other;
  ve::GetServerInfoResponse info;
  REQUIRE(f.stub->GetServerInfo(&other, {}, &info).ok());
  CHECK(info.max_num_seqs() == 4);
  CHECK(info.block_size() == 32);
  CHECK(info.active_requests() == 3);
}

TEST_CASE("Abort ends a running request with its tokens so far") {
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt(true));
  const std::string id = f.engine.WaitForRequest().request_id;
  REQUIRE(f.engine.Emit(id, 7));
  ve::GenerateResponse response;
  REQUIRE(reader->Read(&response));
  CHECK(response.chunk().token_ids(0) == 7);
  grpc::ClientContext other;
  ve::AbortRequest abort;
  abort.add_request_ids(id);
  abort.add_request_ids(std::string("unknown"));
  ve::AbortResponse aborted;
  CHECK(f.stub->Abort(&other, abort, &aborted).ok());
  REQUIRE(reader->Read(&response));
  CHECK(response.complete().finish_reason() == "abort");
  CHECK(response.complete().output_ids_size() == 1);
  CHECK_FALSE(reader->Read(&response));
  CHECK(reader->Finish().ok());
}

TEST_CASE("a caller that hangs up cancels its sequence, streamed or not") {
  const bool stream = GENERATE(true, false);
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt(stream));
  f.engine.WaitForRequest();
  context.TryCancel();
  CHECK(absl::IsCancelled(f.engine.CancelledWith()));
  CHECK(reader->Finish().error_code() == grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace sluice
