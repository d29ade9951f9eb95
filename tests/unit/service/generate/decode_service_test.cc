#include "src/service/generate/decode_service.h"

#include <grpcpp/grpcpp.h>
#include <malloc.h>

#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "google/rpc/error_details.pb.h"
#include "sluice/v1/decode.grpc.pb.h"
#include "src/base/error.h"
#include "src/metrics/metrics.h"
#include "src/service/wire/status_mapping.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_engine.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

struct Fixture {
  explicit Fixture(size_t capacity = 16, absl::Duration cancel_after = absl::Seconds(30)) {
    DecodeServiceOptions options;
    options.generate.vocab_size = 1000;
    options.generate.max_context = 64;
    options.generate.stream_capacity = capacity;
    options.generate.generator = &engine;
    options.generate.pump = &pump;
    options.generate.metrics = &metrics;
    options.generate.cancel_after = cancel_after;
    options.engine = &engine;
    service = NewDecodeService(options);
    grpc::ServerBuilder builder;
    builder.RegisterService(service.service.get());
    server = builder.BuildAndStart();
    stub = v1::Decode::NewStub(server->InProcessChannel({}));
  }
  ~Fixture() { server->Shutdown(std::chrono::system_clock::now()); }

  FakeEngine engine;
  CallPump pump;
  Metrics metrics;
  GrpcService service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::Decode::Stub> stub;
};

v1::GenerateRequest Prompt(const std::string& id = "r") {
  v1::GenerateRequest request;
  request.set_request_id(id);
  request.add_prompt_token_ids(1);
  return request;
}

FinishInfo Length() {
  FinishInfo info;
  info.reason = FinishInfo::Reason::kLength;
  info.prompt_tokens = 1;
  info.completion_tokens = 3;
  return info;
}

TEST_CASE("tokens stream in order, and the last message carries the finish") {
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  CHECK(f.engine.WaitForRequest().deadline == absl::InfiniteFuture());
  std::vector<uint32_t> ids;
  v1::GenerateResponse message;
  for (int32_t token = 10; token < 13; ++token) {
    REQUIRE(f.engine.Emit("r", token));
    // Tokens come one by one, because a token is sent as soon as it is there.
    REQUIRE(reader->Read(&message));
    CHECK(message.request_id() == "r");
    CHECK_FALSE(message.has_finish());
    for (const auto& t : message.tokens()) ids.push_back(t.id());
  }
  FinishInfo info = Length();
  info.reason = FinishInfo::Reason::kStop;
  info.stop_token_id = 12;
  REQUIRE(f.engine.Finish("r", info));
  REQUIRE(reader->Read(&message));
  CHECK(message.finish().reason() == v1::FINISH_REASON_STOP);
  CHECK(message.finish().stop_token_id() == 12);
  CHECK_FALSE(message.finish().has_stop_string());
  CHECK(message.finish().usage().completion_tokens() == 3);
  CHECK_FALSE(reader->Read(&message));
  CHECK(reader->Finish().ok());
  CHECK(ids == std::vector<uint32_t>{10, 11, 12});
}

TEST_CASE("tokens before an error arrive, and the error brings its details") {
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  f.engine.WaitForRequest();
  REQUIRE(f.engine.Emit("r", 5));
  FinishInfo info;
  info.status = WithReason(absl::AbortedError("its reader is too slow"), "SLOW_READER");
  REQUIRE(f.engine.Finish("r", info));
  v1::GenerateResponse message;
  REQUIRE(reader->Read(&message));
  CHECK(message.tokens(0).id() == 5);
  CHECK_FALSE(message.has_finish());
  CHECK_FALSE(reader->Read(&message));
  const grpc::Status status = reader->Finish();
  CHECK(status.error_code() == grpc::StatusCode::ABORTED);
  google::rpc::ErrorInfo detail;
  REQUIRE(DetailOf(status, &detail));
  CHECK(detail.reason() == "SLOW_READER");
}

TEST_CASE("a caller who never reads keeps its call for a bounded time after its sequence ended") {
  Fixture f(16, absl::Milliseconds(100));
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  f.engine.WaitForRequest();
  for (int32_t token = 0; token < 5; ++token) REQUIRE(f.engine.Emit("r", token));
  FinishInfo info;
  info.status = WithReason(absl::AbortedError("its reader is too slow"), "SLOW_READER");
  REQUIRE(f.engine.Finish("r", info));
  // Shutdown returns once every call is over, and ends them by force only long after.
  const absl::Time begin = absl::Now();
  f.server->Shutdown(absl::ToChronoTime(begin + absl::Seconds(60)));
  CHECK(absl::Now() - begin < absl::Seconds(30));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  CHECK_FALSE(reader->Finish().ok());
}

TEST_CASE("what is wrong with a request is said before it reaches the engine") {
  Fixture f;
  grpc::ClientContext context;
  v1::GenerateRequest request = Prompt();
  request.set_prompt_token_ids(0, 1000);
  auto reader = f.stub->Generate(&context, request);
  v1::GenerateResponse message;
  CHECK_FALSE(reader->Read(&message));
  const absl::Status status = FromGrpcStatus(reader->Finish());
  CHECK(FieldOf(status) == "prompt_token_ids[0]");
  CHECK_FALSE(f.engine.Alive());
}

TEST_CASE("a refusal of the engine ends the call with its details") {
  Fixture f;
  f.engine.refusal = ResourceExhausted("TOO_MANY_WAITING", "later", absl::Seconds(3));
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  v1::GenerateResponse message;
  CHECK_FALSE(reader->Read(&message));
  const absl::Status status = FromGrpcStatus(reader->Finish());
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK(RetryAfterOf(status) == absl::Seconds(3));
}

TEST_CASE("a request without a name gets one of its own") {
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt(""));
  const std::string id = f.engine.WaitForRequest().request_id;
  CHECK(id.size() == 32);
  REQUIRE(f.engine.Finish(id, Length()));
  v1::GenerateResponse message;
  REQUIRE(reader->Read(&message));
  CHECK(message.request_id() == id);
  CHECK(reader->Finish().ok());
}

TEST_CASE("a caller that goes away cancels its sequence") {
  Fixture f;
  {
    grpc::ClientContext context;
    auto reader = f.stub->Generate(&context, Prompt());
    f.engine.WaitForRequest();
    context.TryCancel();
    CHECK(reader->Finish().error_code() == grpc::StatusCode::CANCELLED);
  }
  CHECK(absl::IsCancelled(f.engine.CancelledWith()));
  CHECK_FALSE(f.engine.Alive());
}

TEST_CASE("the call's deadline is the request's, and ends it") {
  Fixture f;
  grpc::ClientContext context;
  const absl::Time deadline = absl::Now() + absl::Milliseconds(300);
  context.set_deadline(absl::ToChronoTime(deadline));
  auto reader = f.stub->Generate(&context, Prompt());
  const absl::Time seen = f.engine.WaitForRequest().deadline;
  CHECK(absl::AbsDuration(seen - deadline) < absl::Milliseconds(100));
  CHECK(reader->Finish().error_code() == grpc::StatusCode::DEADLINE_EXCEEDED);
  CHECK(absl::IsDeadlineExceeded(f.engine.CancelledWith()));
  CHECK_FALSE(f.engine.Alive());
}

TEST_CASE("Cancel says whether the sequence was there, and its stream ends with CANCELLED") {
  Fixture f;
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  f.engine.WaitForRequest();
  for (const bool alive : {true, false}) {
    grpc::ClientContext cancel_context;
    v1::CancelRequest cancel;
    v1::CancelResponse answer;
    cancel.set_request_id("r");
    REQUIRE(f.stub->Cancel(&cancel_context, cancel, &answer).ok());
    CHECK(answer.found() == alive);
  }
  CHECK(reader->Finish().error_code() == grpc::StatusCode::CANCELLED);
  grpc::ClientContext empty_context;
  v1::CancelResponse answer;
  const grpc::Status empty = f.stub->Cancel(&empty_context, v1::CancelRequest(), &answer);
  CHECK(FieldOf(FromGrpcStatus(empty)) == "request_id");
}

TEST_CASE("a reader that does not read fills its stream, and wakes the engine when it reads on") {
  Fixture f(/*capacity=*/4);
  grpc::ClientContext context;
  auto reader = f.stub->Generate(&context, Prompt());
  f.engine.WaitForRequest();
  // The transport buffers messages too, and must still come to an end.
  int sent = 0;
  int refused = 0;
  while (refused < 50 && sent < 1'000'000) {
    if (f.engine.Emit("r", sent % 1000)) {
      ++sent;
      refused = 0;
    } else {
      ++refused;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  REQUIRE(sent < 1'000'000);
  const int wakes_before = f.engine.wakes;
  std::thread engine([&] {
    while (!f.engine.Emit("r", sent % 1000)) absl::SleepFor(absl::Milliseconds(1));
    ++sent;
    f.engine.Finish("r", Length());
  });
  int received = 0;
  size_t most = 0;
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
    most = std::max(most, static_cast<size_t>(message.tokens_size()));
    for (const auto& token : message.tokens()) {
      REQUIRE(token.id() == static_cast<uint32_t>(received % 1000));
      ++received;
    }
  }
  engine.join();
  CHECK(reader->Finish().ok());
  CHECK(received == sent);
  CHECK(most > 1);  // a backlog goes out several tokens to a message
  CHECK(f.engine.wakes > wakes_before);
}

TEST_CASE("memory does not grow with the number of calls") {
  Fixture f;
  std::atomic<bool> stop = false;
  std::thread engine([&] {
    while (!stop) f.engine.Finish("r", Length());
  });
  const auto call = [&](int times) {
    for (int i = 0; i < times; ++i) {
      grpc::ClientContext context;
      auto reader = f.stub->Generate(&context, Prompt());
      v1::GenerateResponse message;
      while (reader->Read(&message)) {
      }
      REQUIRE(reader->Finish().ok());
    }
  };
  call(500);
  const size_t before = mallinfo2().uordblks;
  call(4000);
  const auto grown = [&] {
    return static_cast<int64_t>(mallinfo2().uordblks) - static_cast<int64_t>(before);
  };
  const bool came_back =
      testing::Eventually(absl::Seconds(10), [&] { return grown() < 4000 * 64; });
  INFO(grown() << " bytes more are allocated");
  CHECK(came_back);
  stop = true;
  engine.join();
}

TEST_CASE("calls, ends and cancellations in any interleaving leave nothing behind") {
  Fixture f(/*capacity=*/8);
  std::atomic<bool> stop = false;
  const unsigned long long seed = TestSeed();
  std::thread engine([&] {
    std::mt19937_64 random(seed);
    while (!stop) {
      if (!f.engine.Alive()) {
        std::this_thread::yield();
        continue;
      }
      const std::string id = std::to_string(random() % 4);
      if (random() % 8 == 0) {
        f.engine.Finish(id, Length());
      } else {
        f.engine.Emit(id, 1);
      }
    }
  });
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      std::mt19937_64 random(seed + 1 + static_cast<unsigned>(c));
      for (int round = 0; round < 150; ++round) {
        grpc::ClientContext context;
        if (random() % 3 == 0) {
          context.set_deadline(std::chrono::system_clock::now() +
                               std::chrono::microseconds(random() % 3000));
        }
        auto reader = f.stub->Generate(&context, Prompt(std::to_string(c)));
        v1::GenerateResponse message;
        const auto reads = random() % 12;
        for (unsigned i = 0; i < reads && reader->Read(&message); ++i) {
        }
        if (random() % 2 == 0) context.TryCancel();
        while (reader->Read(&message)) {
        }
        (void)reader->Finish();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  // Cancellations reach the engine a little after their callers are done.
  CHECK(testing::Eventually(absl::Seconds(5), [&] { return !f.engine.Alive(); }));
  stop = true;
  engine.join();
}

}  // namespace
}  // namespace sluice
