// sluice-token-bench measures the cost of a streamed token between the engine and its caller, in
// each dialect of Generate.
//
// One thread stands in for the engine's: in every step it emits a token to each stream, and its CPU
// time for that is measured. The callers are threads of this process, over gRPC on loopback; a
// token's latency runs from its Emit to its arrival there. The callers share the cores, which makes
// latencies worse than a node's own, but equally so in everything that is compared.
#include <grpcpp/grpcpp.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "facade/vllm_engine.grpc.pb.h"
#include "sluice/v1/decode.grpc.pb.h"
#include "src/base/logging.h"
#include "src/base/readiness.h"
#include "src/facade/smg_service.h"
#include "src/metrics/metrics.h"
#include "src/service/generate/decode_service.h"
#include "tests/support/fake_engine.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;

constexpr char kHelp[] =
    R"(sluice-token-bench measures the cost of a streamed token between the engine and its caller.

  --streams N        streams that decode at once (default 1, 16 and 64 in turn)
  --steps N          tokens of each stream (default 1000)
  --step-us N        microseconds from the end of one step to the next (default 3000)
  --help             this text

Prints for each dialect the CPU time of the engine's thread per token, and the time from there to the
caller. Example: sluice-token-bench --streams 16
)";

struct Options {
  std::vector<int> streams = {1, 16, 64};
  int steps = 1000, step_us = 3000;
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "sluice-token-bench: %s (see --help)\n", message.c_str());
  std::exit(2);
}

Options Parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (i + 1 >= argc) Fail(flag + " needs a value");
    const std::string value = argv[++i];
    int number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < 1) {
      Fail(absl::StrCat(flag, ": '", value, "' is not a positive number"));
    }
    if (flag == "--streams") {
      o.streams = {number};
    } else if (flag == "--steps") {
      o.steps = number;
    } else if (flag == "--step-us") {
      o.step_us = number;
    } else {
      Fail("unknown flag " + flag);
    }
  }
  return o;
}

// Keeps submitted requests; the bench's thread drives them.
class SinkEngine : public FakeEngine {
 public:
  absl::StatusOr<SequenceId> Submit(Request request) override {
    absl::MutexLock lock(&mutex_);
    sinks_.push_back(std::move(request.sink));
    return SequenceId(sinks_.size() - 1);
  }
  void Cancel(SequenceId /*id*/, absl::Status /*why*/) override {}
  std::vector<std::shared_ptr<TokenSink>> WaitFor(size_t count) {
    const auto here = [&] {
      mutex_.AssertHeld();
      return sinks_.size() == count;
    };
    absl::MutexLock lock(&mutex_, absl::Condition(&here));
    return std::move(sinks_);
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<TokenSink>> sinks_ ABSL_GUARDED_BY(mutex_);
};

// Reads a call's messages to their end and calls `arrived(count)` with the tokens of each.
using Caller = std::function<void(const std::function<void(int)>& arrived)>;

Caller SluiceCaller(const std::shared_ptr<grpc::Channel>& channel) {
  return [channel](const auto& arrived) {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    request.add_prompt_token_ids(5);
    const auto reader = v1::Decode::NewStub(channel)->Generate(&context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) arrived(response.tokens_size());
    if (const grpc::Status end = reader->Finish(); !end.ok()) Fail(end.error_message());
  };
}

Caller VllmCaller(const std::shared_ptr<grpc::Channel>& channel) {
  return [channel](const auto& arrived) {
    grpc::ClientContext context;
    ve::GenerateRequest request;
    request.mutable_tokenized()->add_input_ids(5);
    request.set_stream(true);
    const auto reader = ve::VllmEngine::NewStub(channel)->Generate(&context, request);
    ve::GenerateResponse response;
    while (reader->Read(&response)) arrived(response.chunk().token_ids_size());
    if (const grpc::Status end = reader->Finish(); !end.ok()) Fail(end.error_message());
  };
}

absl::Duration ThreadTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

double MicrosecondsAt(std::vector<absl::Duration>& values, double rank) {
  const auto at =
      values.begin() + static_cast<int64_t>(rank * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return absl::ToDoubleMicroseconds(*at);
}

void Measure(const char* dialect, const Options& o, int streams, SinkEngine& engine,
             const Caller& call) {
  const auto count = static_cast<size_t>(streams);
  const auto steps = static_cast<size_t>(o.steps);
  // Written before the token's Emit and read after its arrival.
  std::vector<absl::Time> emitted(steps);
  std::vector<std::vector<absl::Duration>> latencies(count);
  std::vector<int> messages(count, 0);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < count; ++i) {
    callers.emplace_back([&, i] {
      call([&, i](int tokens) {
        const absl::Time now = absl::Now();
        for (int t = 0; t < tokens; ++t) {
          latencies[i].push_back(now - emitted[latencies[i].size()]);
        }
        messages[i] += tokens > 0 ? 1 : 0;
      });
    });
  }
  const auto sinks = engine.WaitFor(count);
  std::vector<absl::Duration> cpu, wall;
  for (size_t step = 0; step < steps; ++step) {
    absl::SleepFor(absl::Microseconds(o.step_us));
    for (const auto& sink : sinks) {
      while (!sink->HasRoom(1)) absl::SleepFor(absl::Microseconds(100));
    }
    emitted[step] = absl::Now();
    const absl::Duration before = ThreadTime();
    for (const auto& sink : sinks) sink->Emit({static_cast<int32_t>(step % 1000), {}, {}});
    cpu.push_back((ThreadTime() - before) / streams);
    wall.push_back((absl::Now() - emitted[step]) / streams);
  }
  for (const auto& sink : sinks) {
    FinishInfo end;
    end.reason = FinishInfo::Reason::kLength;
    sink->Finish(std::move(end));
  }
  for (std::thread& caller : callers) caller.join();
  std::vector<absl::Duration> all;
  for (const auto& of : latencies) all.insert(all.end(), of.begin(), of.end());
  if (all.size() != count * steps) Fail(absl::StrCat(all.size(), " tokens arrived"));
  int sent = 0;
  for (const int of : messages) sent += of;
  std::printf("%-8s %7d %12.1f %12.1f %12.1f %12.0f %12.0f %14.3f\n", dialect, streams,
              MicrosecondsAt(cpu, 0.5), MicrosecondsAt(cpu, 0.99), MicrosecondsAt(wall, 0.5),
              MicrosecondsAt(all, 0.5), MicrosecondsAt(all, 0.99),
              static_cast<double>(sent) / static_cast<double>(all.size()));
}

int Main(int argc, char** argv) {
  const Options o = Parse(argc, argv);
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  SinkEngine engine;
  CallPump pump;
  Metrics metrics;
  Readiness readiness;
  FacadeOptions facade;
  facade.readiness = &readiness;
  facade.generate.vocab_size = 1000;
  facade.generate.max_context = 1 << 20;
  facade.generate.generator = &engine;
  facade.generate.pump = &pump;
  facade.generate.metrics = &metrics;
  const GrpcService vllm = NewGatewayService("vllm", facade);
  const GrpcService sluice = NewDecodeService({facade.generate, &engine});
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(vllm.service.get());
  builder.RegisterService(sluice.service.get());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const auto channel =
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  std::printf("%d cores, %d steps, %d us apart; microseconds per token\n",
              static_cast<int>(std::thread::hardware_concurrency()), o.steps, o.step_us);
  std::printf("%-8s %7s %12s %12s %12s %12s %12s %14s\n", "dialect", "streams", "engine CPU",
              "99th", "engine wall", "to caller", "99th", "messages/token");
  for (const int streams : o.streams) {
    Measure("sluice", o, streams, engine, SluiceCaller(channel));
    Measure("vllm", o, streams, engine, VllmCaller(channel));
  }
  server->Shutdown(std::chrono::system_clock::now());
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
