#include "src/facade/smg_service.h"

#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "facade/sglang_scheduler.grpc.pb.h"
#include "facade/vllm_engine.grpc.pb.h"
#include "src/base/readiness.h"
#include "src/metrics/metrics.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_engine.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;
namespace sg = sglang::grpc::scheduler;

struct Fixture {
  explicit Fixture(const std::string& gateway = "vllm") {
    FacadeOptions options;
    options.info.max_running = 4;
    options.info.block_tokens = 32;
    options.load = [](const auto& done) { done({2, 1, 300, 1000, 0.3, 12.5, false}); };
    options.readiness = &readiness;
    options.generate.vocab_size = 1000;
    options.generate.max_context = 64;
    options.generate.generator = &engine;
    options.generate.pump = &pump;
    options.generate.metrics = &metrics;
    service = NewGatewayService(gateway, std::move(options));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service.service.get());
    server = builder.BuildAndStart();
    channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                  grpc::InsecureChannelCredentials());
    stub = ve::VllmEngine::NewStub(channel);
  }
  ~Fixture() { server->Shutdown(std::chrono::system_clock::now()); }

  FakeEngine engine;
  CallPump pump;
  Metrics metrics;
  Readiness readiness;
  GrpcService service;
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> channel;
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

TEST_CASE("a node for SGLang's gateway says the same in its words, and nothing in vLLM's") {
  Fixture f("sglang");
  const auto stub = sg::SglangScheduler::NewStub(f.channel);
  {
    grpc::ClientContext context;
    ve::HealthCheckResponse health;
    CHECK(f.stub->HealthCheck(&context, {}, &health).error_code() ==
          grpc::StatusCode::UNIMPLEMENTED);
  }
  {
    grpc::ClientContext context;
    sg::GetLoadsResponse loads;
    REQUIRE(stub->GetLoads(&context, {}, &loads).ok());
    REQUIRE(loads.loads_size() == 1);
    CHECK(loads.loads(0).num_total_reqs() == 3);
    CHECK(loads.loads(0).utilization() == 0.5);
  }
  {
    grpc::ClientContext context;
    sg::GetServerInfoResponse info;
    REQUIRE(stub->GetServerInfo(&context, {}, &info).ok());
    const auto& args = info.server_args().fields();
    CHECK(args.at("disaggregation_mode").string_value() == "decode");
    CHECK(args.at("max_running_requests").number_value() == 4);
    CHECK(args.at("page_size").number_value() == 32);
    CHECK(info.active_requests() == 3);
    CHECK(info.max_total_num_tokens() == 1000);
  }
  grpc::ClientContext context;
  sg::GenerateRequest prompt;
  prompt.set_request_id("r");
  prompt.mutable_tokenized()->add_input_ids(5);
  const auto reader = stub->Generate(&context, prompt);
  CHECK(f.engine.WaitForRequest().request_id == "r");
  {
    grpc::ClientContext nameless;
    sg::AbortResponse aborted;
    CHECK(stub->Abort(&nameless, {}, &aborted).error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  }
  grpc::ClientContext other;
  sg::AbortRequest abort;
  abort.set_request_id("r");
  abort.set_reason("Stream dropped");
  sg::AbortResponse aborted;
  CHECK(stub->Abort(&other, abort, &aborted).ok());
  CHECK(aborted.success());
  sg::GenerateResponse response;
  REQUIRE(reader->Read(&response));
  CHECK(response.complete().finish_reason() == "abort");
  CHECK(reader->Finish().ok());
}

}  // namespace
}  // namespace sluice
