// Tests the exporter against a collector that takes, hangs, refuses, is not there, dies and comes
// back.
#include "src/service/telemetry/span_exporter.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.grpc.pb.h"
#include "src/metrics/metrics.h"
#include "tests/support/eventually.h"

namespace sluice {
namespace {

namespace collector = opentelemetry::proto::collector::trace::v1;
using testing::Eventually;

constexpr absl::Duration kSoon = absl::Seconds(30);

class Collector final : public collector::TraceService::Service {
 public:
  // Listens on a free port, or on one that was `port` before.
  explicit Collector(int port = 0) : port_(port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(),
                             &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
  }
  ~Collector() override {
    open_.Notify();
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
  }

  grpc::Status Export(grpc::ServerContext* context,
                      const collector::ExportTraceServiceRequest* request,
                      collector::ExportTraceServiceResponse* response) override {
    ++calls;
    while (hangs.load() && !open_.HasBeenNotified() && !context->IsCancelled()) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    if (refusal.load() != grpc::StatusCode::OK) return {refusal.load(), "refused by the test"};
    response->mutable_partial_success()->set_rejected_spans(rejects.load());
    absl::MutexLock lock(&mutex_);
    for (const auto& span : request->resource_spans(0).scope_spans(0).spans()) {
      names_.insert(span.name());
    }
    return grpc::Status::OK;
  }

  std::set<std::string> names() const {
    absl::MutexLock lock(&mutex_);
    return names_;
  }
  int port() const { return port_; }

  std::atomic<int> calls = 0;
  std::atomic<bool> hangs = false;
  std::atomic<grpc::StatusCode> refusal = grpc::StatusCode::OK;
  std::atomic<int> rejects = 0;

 private:
  int port_;
  std::unique_ptr<grpc::Server> server_;
  absl::Notification open_;
  mutable absl::Mutex mutex_;
  std::set<std::string> names_;
};

SpanExporter::Options Fast(int port, const Metrics& metrics) {
  SpanExporter::Options options;
  options.endpoint = absl::StrCat("127.0.0.1:", port);
  options.credentials = grpc::InsecureChannelCredentials();
  options.metrics = &metrics;
  options.export_every = absl::Milliseconds(5);
  options.call_timeout = absl::Milliseconds(200);
  options.min_backoff = absl::Milliseconds(10);
  options.max_backoff = absl::Milliseconds(50);
  options.give_up = absl::Minutes(1);
  return options;
}

std::vector<Span> SpanNamed(const std::string& name) {
  Span span;
  span.trace_id = std::string(16, 'a');
  span.span_id = std::string(8, 'b');
  span.name = name;
  span.begin = span.end = absl::Now();
  return {span};
}

double Dropped(const Metrics& metrics) {
  return metrics.spans_dropped(SpanLoss::kFull).Value() +
         metrics.spans_dropped(SpanLoss::kFailed).Value();
}

TEST_CASE("spans arrive in batches, and the last ones when the exporter ends") {
  Metrics metrics;
  Collector collector;
  std::set<std::string> names;
  {
    SpanExporter::Options options = Fast(collector.port(), metrics);
    options.export_every = absl::Hours(1);
    options.max_batch = 100;
    SpanExporter exporter(std::move(options));
    for (int i = 0; i < 250; ++i) {
      const std::string& name = *names.insert(absl::StrCat("span ", i)).first;
      exporter.Add(SpanNamed(name));
    }
    CHECK(Eventually(kSoon, [&] { return collector.calls.load() == 2; }));
  }
  CHECK(collector.calls.load() == 3);
  CHECK(collector.names() == names);
  CHECK(metrics.spans_exported.Value() == 250);
  CHECK(Dropped(metrics) == 0);
}

TEST_CASE("a span waits no longer than export_every for others") {
  Metrics metrics;
  Collector collector;
  SpanExporter exporter(Fast(collector.port(), metrics));
  exporter.Add(SpanNamed("alone"));
  CHECK(Eventually(kSoon, [&] { return collector.names().contains("alone"); }));
}

TEST_CASE(
    "a collector that hangs holds nobody up: the queue fills, and what is too much is counted") {
  Metrics metrics;
  Collector collector;
  collector.hangs = true;
  constexpr int kCalls = 5000;
  const absl::Time begin = absl::Now();
  absl::Duration longest, adding;
  {
    SpanExporter::Options options = Fast(collector.port(), metrics);
    options.max_queued = 1000;
    options.max_batch = 10;
    options.flush = absl::Milliseconds(300);
    SpanExporter exporter(std::move(options));
    exporter.Add(SpanNamed("first"));
    REQUIRE(Eventually(kSoon, [&] { return collector.calls.load() > 0; }));
    for (int i = 0; i < kCalls; ++i) {
      std::vector<Span> spans = SpanNamed("x");
      const absl::Time before = absl::Now();
      exporter.Add(std::move(spans));
      longest = std::max(longest, absl::Now() - before);
      adding += absl::Now() - before;
    }
    CHECK(metrics.spans_dropped(SpanLoss::kFull).Value() >= kCalls - 1000 - 10);
  }
  // A busy machine may stop a thread for a while, but no call waited for the collector.
  CHECK(adding / kCalls < absl::Microseconds(100));
  CHECK(longest < absl::Seconds(5));
  CHECK(absl::Now() - begin < absl::Seconds(20));  // the end is bounded too
  CHECK(metrics.spans_exported.Value() == 0);
  CHECK(Dropped(metrics) == kCalls + 1);
}

TEST_CASE("a collector that was not there, and one that came back, get what was kept") {
  Metrics metrics;
  auto first = std::make_unique<Collector>();
  const int port = first->port();
  SpanExporter exporter(Fast(port, metrics));
  exporter.Add(SpanNamed("to the first"));
  REQUIRE(Eventually(kSoon, [&] { return first->names().contains("to the first"); }));
  first.reset();
  exporter.Add(SpanNamed("to nobody"));
  absl::SleepFor(absl::Milliseconds(100));  // some tries
  CHECK(Dropped(metrics) == 0);
  Collector second(port);
  CHECK(Eventually(kSoon, [&] { return second.names().contains("to nobody"); }));
  exporter.Add(SpanNamed("to the second"));
  CHECK(Eventually(kSoon, [&] { return second.names().contains("to the second"); }));
  CHECK(Eventually(kSoon, [&] { return metrics.spans_exported.Value() == 3; }));
  CHECK(Dropped(metrics) == 0);
}

TEST_CASE("a collector that dies in a call gets the batch again") {
  Metrics metrics;
  auto first = std::make_unique<Collector>();
  first->hangs = true;
  const int port = first->port();
  SpanExporter::Options options = Fast(port, metrics);
  options.call_timeout = absl::Seconds(30);
  SpanExporter exporter(std::move(options));
  exporter.Add(SpanNamed("cut off"));
  REQUIRE(Eventually(kSoon, [&] { return first->calls.load() == 1; }));
  first->refusal = grpc::StatusCode::UNAVAILABLE;  // if it is let go before its connection
  first.reset();
  Collector second(port);
  CHECK(Eventually(kSoon, [&] { return second.names().contains("cut off"); }));
}

TEST_CASE("what a collector refuses for good is dropped at once, what it may take later is kept") {
  Metrics metrics;
  Collector collector;
  collector.refusal = grpc::StatusCode::INVALID_ARGUMENT;
  SpanExporter exporter(Fast(collector.port(), metrics));
  exporter.Add(SpanNamed("bad"));
  CHECK(Eventually(kSoon, [&] { return Dropped(metrics) == 1; }));
  CHECK(collector.calls.load() == 1);
  collector.refusal = grpc::StatusCode::RESOURCE_EXHAUSTED;
  exporter.Add(SpanNamed("later"));
  CHECK(Eventually(kSoon, [&] { return collector.calls.load() >= 3; }));
  collector.refusal = grpc::StatusCode::OK;
  CHECK(Eventually(kSoon, [&] { return collector.names().contains("later"); }));
  CHECK_FALSE(collector.names().contains("bad"));
  CHECK(Dropped(metrics) == 1);
}

TEST_CASE("spans that a collector does not take are counted, even if it claims more than it got") {
  Metrics metrics;
  Collector collector;
  collector.rejects = 7;
  SpanExporter exporter(Fast(collector.port(), metrics));
  exporter.Add(SpanNamed("x"));
  CHECK(Eventually(kSoon, [&] { return Dropped(metrics) == 1; }));
  CHECK(metrics.spans_exported.Value() == 0);
}

TEST_CASE("a batch that nobody takes for long is dropped, and the next one has its turn") {
  Metrics metrics;
  Collector collector;
  collector.refusal = grpc::StatusCode::UNAVAILABLE;
  SpanExporter::Options options = Fast(collector.port(), metrics);
  options.give_up = absl::Milliseconds(50);
  SpanExporter exporter(std::move(options));
  exporter.Add(SpanNamed("old"));
  CHECK(Eventually(kSoon, [&] { return metrics.spans_dropped(SpanLoss::kFailed).Value() == 1; }));
  collector.refusal = grpc::StatusCode::OK;
  exporter.Add(SpanNamed("new"));
  CHECK(Eventually(kSoon, [&] { return collector.names().contains("new"); }));
}

TEST_CASE("an exporter ends in its time whoever listens, with every span told") {
  Metrics metrics;
  Collector hanging;
  hanging.hangs = true;
  const int nobody = [] { return Collector().port(); }();
  int spans = 0;
  for (const int port : {hanging.port(), nobody}) {
    SpanExporter::Options options = Fast(port, metrics);
    options.call_timeout = absl::Minutes(1);
    options.max_backoff = options.min_backoff = absl::Minutes(1);
    options.flush = absl::Milliseconds(200);
    const int before = hanging.calls.load();
    auto exporter = std::make_unique<SpanExporter>(std::move(options));
    for (int i = 0; i < 3; ++i, ++spans) exporter->Add(SpanNamed("x"));
    if (port == hanging.port()) {
      REQUIRE(Eventually(kSoon, [&] { return hanging.calls.load() > before; }));
    }
    const absl::Time begin = absl::Now();
    exporter.reset();
    CHECK(absl::Now() - begin < absl::Seconds(10));
  }
  CHECK(Dropped(metrics) == spans);
}

TEST_CASE("what a call's spans cost the thread that ends it", "[.][benchmark]") {
  Metrics metrics;
  Collector collector;
  SpanExporter::Options options = Fast(collector.port(), metrics);
  options.max_queued = size_t{1} << 20;
  SpanExporter exporter(std::move(options));
  constexpr int kCalls = 100'000;
  absl::Duration spent;
  for (int i = 0; i < kCalls; ++i) {
    std::vector<Span> spans = SpanNamed("generate");
    for (int k = 0; k < 5; ++k) spans.push_back(spans.front());
    const absl::Time begin = absl::Now();
    exporter.Add(std::move(spans));
    spent += absl::Now() - begin;
  }
  WARN("queueing six spans: " << absl::FormatDuration(spent / kCalls));
  CHECK(spent / kCalls < absl::Microseconds(100));
}

}  // namespace
}  // namespace sluice
