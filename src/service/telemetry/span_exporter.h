// Sends spans to a collector over OTLP/gRPC, in batches, from a thread of its own. A caller only
// puts spans into a bounded queue: no call and no step waits for a collector, whatever it does. The
// spans of a call that finds the queue full are dropped, and so are those that the collector
// refuses or that it cannot be given within Options::give_up. sluice_otel_spans_dropped_total
// counts them. Thread-safe.
#pragma once

#include <grpcpp/security/credentials.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/service/telemetry/otlp.h"
#include "src/service/telemetry/span.h"

namespace grpc {
class ClientContext;
class Status;
}  // namespace grpc

namespace sluice {

class Metrics;

class SpanExporter {
 public:
  struct Options {
    std::string endpoint;  // host:port of the collector
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    SpanResource resource;
    const Metrics* metrics = nullptr;  // outlives the exporter
    size_t max_queued = 8192;          // spans, of about 1 KiB each
    size_t max_batch = 512;            // spans of one message
    // How long a span waits for others to go with it.
    absl::Duration export_every = absl::Seconds(1);
    absl::Duration call_timeout = absl::Seconds(10);
    // A batch is sent again after min_backoff, which doubles up to max_backoff, until it is
    // give_up old.
    absl::Duration min_backoff = absl::Seconds(1);
    absl::Duration max_backoff = absl::Seconds(30);
    absl::Duration give_up = absl::Minutes(2);
    // The longest time that the destructor takes for what is queued.
    absl::Duration flush = absl::Seconds(2);
  };
  explicit SpanExporter(Options options);
  // Sends what is queued, for Options::flush at most, and drops the rest.
  ~SpanExporter();
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  // Queues the spans of one call, all of them or none.
  void Add(std::vector<Span> spans);

 private:
  class Collector;
  void Loop();
  // Waits for spans and takes a batch of them; an empty one means that there will be no more.
  std::vector<Span> NextBatch();
  void Export(const std::vector<Span>& batch);
  // Makes one call. Returns its status and the spans that the collector says it did not take.
  grpc::Status Call(const std::vector<Span>& batch, int64_t* rejected);
  // Sleeps until the next try. Returns false if there is none.
  bool WaitToRetry(absl::Duration backoff, absl::Time give_up);
  // Logs that spans do not arrive, once until they do again.
  void LogOnce(const grpc::Status& status);

  const Options options_;
  const std::unique_ptr<Collector> collector_;
  bool failing_ = false;  // used by the thread only
  absl::Mutex mutex_;
  std::deque<Span> queue_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the call that is under way
  bool done_ ABSL_GUARDED_BY(mutex_) = false;                    // the thread is at its end
  absl::Time end_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // finite: ending
  std::thread thread_;                                                  // last
};

}  // namespace sluice
