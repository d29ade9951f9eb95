#include "src/service/telemetry/span_exporter.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>
#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.grpc.pb.h"
#include "src/base/logging.h"
#include "src/base/rng.h"
#include "src/metrics/metrics.h"

namespace sluice {
namespace {

namespace collector = opentelemetry::proto::collector::trace::v1;

// While the exporter ends, there is no time for more than short pauses.
constexpr absl::Duration kLastBackoff = absl::Milliseconds(100);

// Returns whether the specification has such a call made again.
bool MayMend(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DATA_LOSS:
      return true;
    default:
      return false;
  }
}

// Returns between a half and all of `backoff`, so that nodes do not come back to a collector at
// once.
absl::Duration Jittered(absl::Duration backoff) {
  return backoff / 2 + backoff / 2 * (static_cast<double>(RandomU64() >> 11) * 0x1p-53);
}

}  // namespace

// The stub, of which the header says nothing.
class SpanExporter::Collector {
 public:
  explicit Collector(const Options& options) {
    grpc::ChannelArguments arguments;
    // A collector that is back is found within the time between two tries.
    const auto reconnect = static_cast<int>(absl::ToInt64Milliseconds(options.min_backoff));
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, reconnect);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, reconnect);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, reconnect);
    stub = collector::TraceService::NewStub(
        grpc::CreateCustomChannel(options.endpoint, options.credentials, arguments));
  }
  std::unique_ptr<collector::TraceService::Stub> stub;
};

SpanExporter::SpanExporter(Options options)
    : options_(std::move(options)),
      collector_(std::make_unique<Collector>(options_)),
      thread_([this] { Loop(); }) {}

SpanExporter::~SpanExporter() {
  {
    absl::MutexLock lock(&mutex_);
    end_by_ = absl::Now() + options_.flush;
    mutex_.AwaitWithDeadline(absl::Condition(&done_), end_by_);
    if (call_ != nullptr) call_->TryCancel();
  }
  thread_.join();
}

void SpanExporter::Add(std::vector<Span> spans) {
  absl::MutexLock lock(&mutex_);
  if (queue_.size() + spans.size() > options_.max_queued) {
    options_.metrics->spans_dropped(SpanLoss::kFull).Add(static_cast<double>(spans.size()));
    return;
  }
  std::move(spans.begin(), spans.end(), std::back_inserter(queue_));
}

void SpanExporter::Loop() {
  pthread_setname_np(pthread_self(), "otlp-export");
  for (std::vector<Span> batch = NextBatch(); !batch.empty(); batch = NextBatch()) Export(batch);
  absl::MutexLock lock(&mutex_);
  done_ = true;
}

std::vector<Span> SpanExporter::NextBatch() {
  absl::MutexLock lock(&mutex_);
  const auto begun = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !queue_.empty() || end_by_ != absl::InfiniteFuture();
  };
  const auto full = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return queue_.size() >= options_.max_batch || end_by_ != absl::InfiniteFuture();
  };
  mutex_.Await(absl::Condition(&begun));
  mutex_.AwaitWithTimeout(absl::Condition(&full), options_.export_every);
  if (absl::Now() >= end_by_) {
    options_.metrics->spans_dropped(SpanLoss::kFailed).Add(static_cast<double>(queue_.size()));
    queue_.clear();
  }
  const auto count = static_cast<ptrdiff_t>(std::min(queue_.size(), options_.max_batch));
  std::vector<Span> batch(std::make_move_iterator(queue_.begin()),
                          std::make_move_iterator(queue_.begin() + count));
  queue_.erase(queue_.begin(), queue_.begin() + count);
  return batch;
}

void SpanExporter::Export(const std::vector<Span>& batch) {
  const absl::Time give_up = absl::Now() + options_.give_up;
  const auto size = static_cast<int64_t>(batch.size());
  for (absl::Duration backoff = options_.min_backoff;;
       backoff = std::min(2 * backoff, options_.max_backoff)) {
    int64_t rejected = 0;
    const grpc::Status status = Call(batch, &rejected);
    if (status.ok()) {
      rejected = std::clamp<int64_t>(rejected, 0, size);
      options_.metrics->spans_exported.Add(static_cast<double>(size - rejected));
      options_.metrics->spans_dropped(SpanLoss::kFailed).Add(static_cast<double>(rejected));
      if (std::exchange(failing_, false)) Log(LogLevel::kInfo, "spans arrive again");
      return;
    }
    LogOnce(status);
    if (!MayMend(status) || !WaitToRetry(Jittered(backoff), give_up)) break;
  }
  options_.metrics->spans_dropped(SpanLoss::kFailed).Add(static_cast<double>(size));
}

grpc::Status SpanExporter::Call(const std::vector<Span>& batch, int64_t* rejected) {
  collector::ExportTraceServiceRequest request;
  collector::ExportTraceServiceResponse response;
  MakeExportRequest(options_.resource, batch, &request);
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    context.set_deadline(
        absl::ToChronoTime(std::min(absl::Now() + options_.call_timeout, end_by_)));
    call_ = &context;
  }
  const grpc::Status status = collector_->stub->Export(&context, request, &response);
  *rejected = response.partial_success().rejected_spans();
  absl::MutexLock lock(&mutex_);
  call_ = nullptr;
  return status;
}

bool SpanExporter::WaitToRetry(absl::Duration backoff, absl::Time give_up) {
  absl::MutexLock lock(&mutex_);
  const auto ending = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return end_by_ != absl::InfiniteFuture();
  };
  if (ending()) {  // nothing will wake this thread
    const bool never = false;
    mutex_.AwaitWithTimeout(absl::Condition(&never), std::min(backoff, kLastBackoff));
  } else {
    mutex_.AwaitWithTimeout(absl::Condition(&ending), backoff);
  }
  return absl::Now() < std::min(give_up, end_by_);
}

void SpanExporter::LogOnce(const grpc::Status& status) {
  if (std::exchange(failing_, true)) return;
  Log(LogLevel::kWarn, "spans do not arrive: they are kept for a while, and then dropped",
      {{"otlp_endpoint", options_.endpoint},
       {"code", static_cast<int>(status.error_code())},
       {"error", status.error_message()}});
}

}  // namespace sluice
