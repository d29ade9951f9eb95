#include "src/service/prefill/handoff.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/service/ingest/rank_pushers.h"
#include "src/service/links/link_peers.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/trace_headers.h"

namespace sluice {
namespace {

absl::Duration FromProtoDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace

// Reserves and opens the stream only when the prompt's turn has come, so that a prompt that waits
// for another has no room at the decode node and no lease that runs.
class Handoff::Sink : public LayerSink {
 public:
  Sink(Handoff* handoff, const std::vector<MissingRange>* missing)
      : handoff_(handoff), missing_(missing) {}

  absl::Status Begin() override {
    if (handoff_->transfer_id_.empty()) SLUICE_RETURN_IF_ERROR(handoff_->Reserve());
    KvPusher::Options options;
    options.transfer_id = handoff_->transfer_id_;
    options.max_chunk_bytes = handoff_->max_chunk_bytes_;
    options.cached_tokens = handoff_->cached_tokens_;
    if (missing_ != nullptr) {
      options.filter = true;
      options.missing = *missing_;
    }
    options.stream_context = [h = handoff_] { return h->NewContext(h->options_.push_timeout); };
    options.call_context = [h = handoff_] { return h->NewContext(h->options_.call_timeout); };
    options.max_kept_bytes = handoff_->options_.max_kept_bytes;
    // A second attempt goes over gRPC alone.
    if (!std::exchange(handoff_->link_tried_, true)) options.links = handoff_->options_.links;
    options.address = handoff_->options_.decode_address;
    options.link_context = [h = handoff_] { return h->LinkContext(); };
    pusher_.emplace(handoff_->stub_.get(), std::move(options), handoff_->rank_ports_,
                    handoff_->options_.channel_to);
    return absl::OkStatus();
  }
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    return pusher_->Layer(layer, kind, token_begin, token_end, pieces);
  }
  bool OnDevice() override { return pusher_->OnDevice(); }
  absl::StatusOr<bool> LayerOnDevice(int layer, const CacheKind& kind, int token_begin,
                                     int token_end,
                                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    return pusher_->LayerOnDevice(layer, kind, token_begin, token_end, pieces);
  }
  absl::StatusOr<bool> FlushDevice() override { return pusher_->FlushDevice(); }
  std::string tenant() const override { return handoff_->options_.reserve.manifest().tenant(); }
  int64_t cached_tokens() const override { return handoff_->cached_tokens_; }
  int64_t hint_tokens() const override { return handoff_->hint_tokens_; }
  bool wants_queries() const override { return handoff_->wants_queries_; }
  // Null before Begin.
  RankPushers* pusher() { return pusher_.has_value() ? &*pusher_ : nullptr; }

 private:
  Handoff* const handoff_;
  const std::vector<MissingRange>* const missing_;
  std::optional<RankPushers> pusher_;
};

Handoff::Handoff(Options options)
    : options_(std::move(options)), stub_(v1::KvIngest::NewStub(options_.channel)) {}

absl::Status Handoff::Run(v1::RunResponse* response) {
  absl::Status status = Attempt(nullptr, response);
  if (!status.ok() && retryable_ && !options_.cancelled()) {
    Log(LogLevel::kWarn, "a push could not be resumed: computing again",
        {{"transfer_id", transfer_id_}, {"error", status.ToString()}});
    // The landing that a broken stream left behind ends when the decode node notices.
    if (ReasonOf(status) == reasons::kBlockBusy) absl::SleepFor(absl::Milliseconds(100));
    const auto context = NewContext(options_.call_timeout);
    context->set_wait_for_ready(true);  // the connection may just be coming back
    const auto progress = GetProgress(stub_.get(), context.get(), transfer_id_);
    if (progress.ok() && progress->committed) {
      status = absl::OkStatus();  // only the answer of Commit was lost
    } else if (progress.ok()) {
      // More is missing than the pusher had kept, or the stream broke too often. The same prompt
      // gives the same bytes, so computing again is as good as having kept them.
      status = Attempt(progress->everything ? nullptr : &progress->missing, response);
    }
  }
  if (!status.ok()) {
    if (!transfer_id_.empty()) Abort(status);
    return status;
  }
  const Metrics& metrics = *options_.metrics;
  metrics.push_bytes(KvTransport::kGrpc).Add(static_cast<double>(grpc_bytes_));
  if (link_bytes_ > 0) {
    metrics.push_bytes(options_.links->transport()).Add(static_cast<double>(link_bytes_));
  }
  response->set_transfer_id(transfer_id_);
  const absl::Time end = absl::Now();
  *response->mutable_timings()->mutable_push() =
      ToProto(first_sent_ > end ? absl::ZeroDuration() : end - first_sent_);
  return absl::OkStatus();
}

absl::Status Handoff::Reserve() {
  const auto context = NewContext(options_.call_timeout);
  v1::ReserveResponse reserved;
  SLUICE_RETURN_IF_ERROR(
      FromDecodeNode(FromGrpcStatus(stub_->Reserve(context.get(), options_.reserve, &reserved))));
  transfer_id_ = reserved.transfer_id();
  max_chunk_bytes_ = reserved.max_chunk_bytes();
  cached_tokens_ =
      static_cast<int64_t>(std::min<uint64_t>(reserved.cached_tokens(), options_.prompt.size()));
  hint_tokens_ = static_cast<int64_t>(std::min<uint64_t>(reserved.hint_tokens(), INT64_MAX));
  rank_ports_ = reserved.rank_ports();
  wants_queries_ = reserved.hint_queries() > 0;
  return absl::OkStatus();
}

absl::Status Handoff::Attempt(const std::vector<MissingRange>* missing, v1::RunResponse* response) {
  retryable_ = false;
  Sink sink(this, missing);
  const absl::StatusOr<PrefillResult> result = options_.prefiller->Run(
      options_.prompt, options_.sampling, options_.want_first_token, sink, options_.cancelled);
  // the prompt was refused, by Reserve or before it
  if (sink.pusher() == nullptr) return result.status();
  RankPushers& pusher = *sink.pusher();
  // A broken stream ends the computation, and then the stream's error is the one that explains.
  const absl::Status pushed = result.ok() ? pusher.Finish() : pusher.Abandon();
  v1::RunResponse::Timings* timings = response->mutable_timings();
  grpc_bytes_ += pusher.bytes_sent();
  link_bytes_ += pusher.bytes_by_link();
  timings->set_bytes_pushed(grpc_bytes_ + link_bytes_);
  if (pusher.link_use().has_value()) options_.metrics->link_writes(*pusher.link_use()).Add();
  first_sent_ = std::min(first_sent_, pusher.first_sent());
  if (!pushed.ok()) {
    retryable_ = MayMend(pushed);
    return FromDecodeNode(pushed);
  }
  SLUICE_RETURN_IF_ERROR(result.status());
  *timings->mutable_queued() = ToProto(FromProtoDuration(timings->queued()) + result->queued);
  *timings->mutable_compute() = ToProto(FromProtoDuration(timings->compute()) + result->compute);
  response->clear_first_token();
  if (result->first_token.has_value()) {
    *response->mutable_first_token() = ToProto(*result->first_token);
  }
  absl::Status committed = Commit(*response, result->hints);
  // Hints only warm a sequence up, so the caches are not given up for them.
  if (!result->hints.empty() &&
      (absl::IsResourceExhausted(committed) || absl::IsInvalidArgument(committed))) {
    committed = Commit(*response, {});
  }
  retryable_ = MayMend(committed);
  return FromDecodeNode(committed);
}

absl::Status Handoff::Commit(const v1::RunResponse& response, const SelectionHints& hints) {
  const auto context = NewContext(options_.call_timeout);
  v1::CommitRequest request;
  v1::CommitResponse answer;
  request.set_transfer_id(transfer_id_);
  if (response.has_first_token()) *request.add_first_tokens() = response.first_token();
  if (!hints.empty()) *request.mutable_hints() = ToProto(hints);
  return FromGrpcStatus(stub_->Commit(context.get(), request, &answer));
}

void Handoff::Abort(const absl::Status& why) {
  // This context is not the parent's child, because that call may be cancelled already and this is
  // its clean-up.
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.call_timeout));
  PassOn(TraceOf(*options_.parent), &context);
  v1::AbortRequest request;
  v1::AbortResponse answer;
  request.set_transfer_id(transfer_id_);
  request.set_reason(absl::StrCat("prefill failed: ", absl::StatusCodeToString(why.code())));
  // If this fails too, the lease ends the transfer.
  (void)stub_->Abort(&context, request, &answer);
}

std::unique_ptr<grpc::ClientContext> Handoff::NewContext(absl::Duration timeout) const {
  std::unique_ptr<grpc::ClientContext> context =
      grpc::ClientContext::FromCallbackServerContext(*options_.parent);
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  PassOn(TraceOf(*options_.parent), context.get());
  return context;
}

std::unique_ptr<grpc::ClientContext> Handoff::LinkContext() const {
  auto context = std::make_unique<grpc::ClientContext>();
  const absl::Time by = absl::Now() + options_.push_timeout;
  context->set_deadline(std::min(options_.parent->deadline(), absl::ToChronoTime(by)));
  PassOn(TraceOf(*options_.parent), context.get());
  return context;
}

absl::Status Handoff::FromDecodeNode(const absl::Status& status) const {
  return WithMessagePrefix(status, absl::StrCat("decode node ", options_.decode_address));
}

}  // namespace sluice
