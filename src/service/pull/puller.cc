#include "src/service/pull/puller.h"

#include <grpcpp/grpcpp.h>
#include <pthread.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "sluice/v1/source.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/channels.h"
#include "src/service/ingest/kv_pusher.h"
#include "src/service/pull/link_reader.h"
#include "src/service/pull/pull_stream.h"
#include "src/service/wire/host_port.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"
#include "src/service/wire/trace_headers.h"

namespace sluice {
namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(50);
constexpr size_t kMaxRanges = 1024;  // beyond it, everything is asked for again
// Below this size a second stream costs more than it brings.
constexpr int64_t kBytesOfAStream = int64_t{16} << 20;

absl::Status Mismatch(const std::string& what) {
  return WithReason(absl::FailedPreconditionError(what), reasons::kSourceMismatch);
}

// Returns whether a second attempt over another connection may mend the error.
bool MayMendByReading(const absl::Status& status) {
  const auto reason = ReasonOf(status);
  if (reason == reasons::kSourceNotFound || reason == reasons::kSourceMismatch) return false;
  return MayMend(status) || absl::IsDeadlineExceeded(status);
}

// Returns whether the code means at this node what it says. Others, such as UNIMPLEMENTED from a
// server without KvSource or UNAUTHENTICATED of this node itself, are no fault of the caller's.
bool IsOfPulls(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) ||
         absl::IsDataLoss(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
}

absl::Status NobodyWaits() { return absl::CancelledError("nobody waits for it any more"); }

// Returns an error about the manifest in the words of the request that the manifest was made of.
absl::Status AsOfRequest(const absl::Status& status) {
  const auto field = FieldOf(status);
  if (!field.has_value()) return status;
  return WithField(
      status, *field == "manifest.max_new_tokens" ? "sampling.max_tokens" : "prompt_token_ids");
}

}  // namespace

struct Puller::Pull {
  SourceRef source;
  std::string tenant;
  std::string transfer_id;
  std::string prompt_digest;
  uint32_t context_length = 0;
  int64_t hint_tokens = 0, hint_queries = 0;
  uint32_t cached_tokens = 0;  // leading tokens that are here already and are not read
  int64_t bytes = 0;           // of the rest
  int64_t link_bytes = 0;      // of those, what came over a link
  RequestTrace trace;
  absl::Time begin, deadline;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::KvSource::Stub> stub;
  SelectionHints hints;

  void Connect(Channels& channels, bool again) {
    channel = again ? channels.GetNew(source.address) : channels.Get(source.address);
    stub = v1::KvSource::NewStub(channel);
  }
  std::unique_ptr<grpc::ClientContext> NewContext(absl::Duration timeout) const {
    auto context = std::make_unique<grpc::ClientContext>();
    const absl::Time by =
        timeout == absl::InfiniteDuration() ? deadline : std::min(deadline, absl::Now() + timeout);
    if (by != absl::InfiniteFuture()) context->set_deadline(absl::ToChronoTime(by));
    PassOn(trace, context.get());
    return context;
  }
};

// Waits without a thread for a prompt that is being computed, so that any number may wait.
class Puller::PromptWait : public std::enable_shared_from_this<PromptWait> {
 public:
  PromptWait(Puller* puller, std::shared_ptr<Pull> pull) : puller_(puller), pull_(std::move(pull)) {
    request_.set_room(*pull_->source.room);
    request_.set_tenant(pull_->tenant);
    request_.set_prompt_digest(pull_->prompt_digest);
    request_.set_reader(pull_->transfer_id);
  }

  void Ask(bool again) {
    pull_->Connect(*puller_->options_.channels, again);
    grpc::ClientContext* context = nullptr;
    {
      absl::MutexLock lock(&puller_->mutex_);
      // A source answers within seconds, if only that the prompt is not ready yet.
      context_ = pull_->NewContext(2 * puller_->options_.call_timeout);
      context = context_.get();
    }
    pull_->stub->async()->AwaitPrompt(context, &request_, &answer_,
                                      [self = shared_from_this()](const grpc::Status& status) {
                                        self->Answered(FromGrpcStatus(status));
                                      });
  }

  // Called by Watch() with its lock.
  void CancelIfUnwanted(bool stopping) {
    if (context_ != nullptr && (stopping || !puller_->Wanted(*pull_))) context_->TryCancel();
  }

 private:
  void Answered(absl::Status status) {
    const bool wanted = puller_->Wanted(*pull_) && !puller_->ending_.load();
    if (status.ok() && answer_.source_id().empty() && wanted) {
      // its leg is there, and takes as long as it takes
      if (answer_.expected()) begin_ = absl::Now();
      if (absl::Now() - begin_ < puller_->options_.room_timeout) return Ask(/*again=*/false);
      status = WithReason(
          absl::DeadlineExceededError(absl::StrCat(
              "no prefill leg has come to room ", *pull_->source.room, " within ",
              absl::FormatDuration(puller_->options_.room_timeout),
              ": both legs go out at once, to the prefill node that bootstrap_host names")),
          reasons::kRoomEmpty);
    } else if (wanted && !again_ && !ReasonOf(status).has_value() && MayMendByReading(status)) {
      again_ = true;
      return Ask(/*again=*/true);
    }
    if (status.ok() && !answer_.source_id().empty()) {
      // This happens also if nobody waits any more, because the prompt must be released.
      pull_->source.source_id = answer_.source_id();
      pull_->begin = absl::Now();
      puller_->Post(pull_);
    } else {
      puller_->Failed(*pull_, status.ok() ? NobodyWaits() : status);
    }
    const std::shared_ptr<PromptWait> self = shared_from_this();  // goes after the lock
    absl::MutexLock lock(&puller_->mutex_);
    puller_->prompt_waits_.remove(self);
  }

  Puller* const puller_;
  const std::shared_ptr<Pull> pull_;
  absl::Time begin_ = absl::Now();
  bool again_ = false;
  v1::AwaitPromptRequest request_;
  v1::AwaitPromptResponse answer_;
  std::unique_ptr<grpc::ClientContext> context_;  // guarded by the puller's mutex
};

Puller::Puller(Options options)
    : options_(std::move(options)),
      watch_([this] { Watch(); }),
      workers_(std::make_unique<WorkerQueue>("pull", options_.threads, options_.max_queued)) {
  SLUICE_CHECK(options_.metrics != nullptr);
}

Puller::~Puller() {
  ending_.store(true);
  {
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return prompt_waits_.empty(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&none));  // Watch() cancels them
  }
  workers_.reset();  // runs the waiting pulls too, watched until the last has ended
  {
    absl::MutexLock lock(&mutex_);
    unwatched_ = true;
  }
  watch_.join();
}

void Puller::Watch() {
  pthread_setname_np(pthread_self(), "pull-watch");
  const auto busy = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return unwatched_ || !streams_.empty() || !prompt_waits_.empty();
  };
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(&busy));  // a node that reads nothing is not woken
    if (mutex_.AwaitWithTimeout(absl::Condition(&unwatched_), kWatchInterval)) return;
    const absl::Time now = absl::Now();
    for (const auto& [stream, pull] : streams_) {
      stream->EndIfIdle(now, ending_.load() || !Wanted(*pull));
    }
    for (const std::shared_ptr<PromptWait>& wait : prompt_waits_)
      wait->CancelIfUnwanted(ending_.load());
  }
}

absl::StatusOr<std::function<void()>> Puller::Begin(Request* request) {
  const SourceRef source = request->handoff.source;
  SLUICE_RETURN_IF_ERROR(CheckSourceRef(source, "source"));
  const absl::StatusOr<HostPort> address = ParseHostPort(source.address);
  if (!address.ok() || address->port == 0) {
    return InvalidField("source.address", address.ok() ? "port 0 cannot be called"
                                                       : std::string(address.status().message()));
  }
  if (!options_.sources.Allows(*address)) {
    return WithReason(absl::PermissionDeniedError(
                          absl::StrCat("source.address: this node does not read from ",
                                       address->ToString(), ": pull_from does not name it")),
                      reasons::kSourceNotAllowed);
  }
  if (request->prompt.empty()) {
    return InvalidField("prompt_token_ids",
                        "is empty: a prompt that is read from where it is held "
                        "comes with the request too");
  }
  if (request->prompt.size() > options_.max_context) {
    return InvalidField(
        "prompt_token_ids",
        absl::StrCat("at most ", options_.max_context, " tokens, found ", request->prompt.size()));
  }
  auto pull = std::make_shared<Pull>();
  pull->prompt_digest = PromptDigest(request->prompt);
  if (!source.prompt_digest.empty() && source.prompt_digest != pull->prompt_digest) {
    return InvalidField("prompt_token_ids",
                        "is not the prompt whose caches are held: source.prompt_digest differs");
  }
  if (!source.model_fingerprint.empty() && source.model_fingerprint != options_.model_fingerprint) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "source.model_fingerprint: the caches are of another model, ", source.model_fingerprint,
            ", this node runs ", options_.model_fingerprint)),
        reasons::kFingerprintMismatch);
  }
  Manifest manifest;
  manifest.model_fingerprint = options_.model_fingerprint;
  manifest.context_length = static_cast<uint32_t>(request->prompt.size());
  manifest.prompt_token_ids.assign(request->prompt.begin(), request->prompt.end());
  // A caller that sets no limit gets what context and memory leave.
  const uint32_t room = std::min(options_.max_context, options_.max_tokens);
  manifest.max_new_tokens = request->sampling.max_tokens.value_or(
      room > manifest.context_length ? room - manifest.context_length : 1);
  manifest.tenant = request->handoff.tenant;
  const absl::StatusOr<TransferTable::Reserved> opened = options_.transfers->Reserve(manifest);
  if (!opened.ok()) return AsOfRequest(opened.status());
  const TransferTable::Reserved& reserved = *opened;
  pull->source = source;
  pull->source.address = address->ToString();
  pull->tenant = manifest.tenant;
  pull->transfer_id = reserved.transfer_id;
  pull->context_length = manifest.context_length;
  pull->cached_tokens = static_cast<uint32_t>(reserved.cached_tokens);
  pull->hint_tokens = reserved.hint_tokens;
  pull->hint_queries = reserved.hint_queries;
  pull->trace = request->trace;
  pull->begin = absl::Now();
  // The engine's clock is converted to the wall clock.
  pull->deadline = request->deadline == absl::InfiniteFuture()
                       ? absl::InfiniteFuture()
                       : absl::Now() + (request->deadline - RealClock()->Now());
  for (const CacheKind& kind : options_.layout.kinds) {
    pull->bytes += kind.bytes_per_token * kind.heads *
                   (pull->context_length - pull->cached_tokens) * options_.layout.layers;
  }
  request->handoff.source = {};
  request->handoff.transfer_id = reserved.transfer_id;
  return [this, pull] { Start(pull); };
}

void Puller::Start(const std::shared_ptr<Pull>& pull) {
  if (!pull->source.room.has_value()) return Post(pull);
  const auto meeting = std::make_shared<PromptWait>(this, pull);
  {
    absl::MutexLock lock(&mutex_);
    prompt_waits_.push_back(meeting);
  }
  meeting->Ask(/*again=*/false);
}

void Puller::Post(const std::shared_ptr<Pull>& pull) {
  if (workers_->TryPost([this, pull] { Run(pull); })) return;
  options_.transfers->Fail(
      pull->transfer_id,
      ResourceExhausted(reasons::kPullsFull,
                        absl::StrCat("more than ", options_.max_queued,
                                     " prompts wait to be read: try again, or another node"),
                        absl::Seconds(1)));
}

void Puller::Abandon(const std::string& transfer_id) {
  options_.transfers->Fail(transfer_id, absl::CancelledError("its Generate was refused"));
}

void Puller::Run(const std::shared_ptr<Pull>& pull) {
  absl::Status status = Attempt(*pull, /*again=*/false);
  if (MayMendByReading(status) && Wanted(*pull) && absl::Now() < pull->deadline) {
    Log(LogLevel::kWarn, "a pull broke: reading what is missing on another connection",
        {{"transfer_id", pull->transfer_id},
         {"source", pull->source.address},
         {"error", status.ToString()}});
    status = Attempt(*pull, /*again=*/true);
  }
  // After a failure the caches stay where they are: another node may fare better, and otherwise
  // their lease ends.
  if (status.ok()) Count(*pull, status);  // before Release, whose answer may take its time
  if (status.ok() || !Wanted(*pull)) Release(*pull);
  if (!status.ok()) Failed(*pull, status);
}

void Puller::Failed(const Pull& pull, absl::Status status) {
  status = WithMessagePrefix(status, absl::StrCat("source ", pull.source.address));
  if (absl::IsUnavailable(status) && !ReasonOf(status).has_value()) {
    status = WithReason(status, reasons::kSourceUnreachable);
  } else if (!IsOfPulls(status)) {
    status = WithReason(absl::UnavailableError(status.message()), reasons::kSourceUnreachable);
  }
  if (options_.transfers->Fail(pull.transfer_id, status)) {
    Log(LogLevel::kWarn, "a pull failed",
        {{"transfer_id", pull.transfer_id}, {"error", status.ToString()}});
  } else {
    status = WithReason(NobodyWaits(), reasons::kCallerGone);
  }
  Count(pull, status);
}

bool Puller::Wanted(const Pull& pull) const {
  return options_.transfers->Get(pull.transfer_id, 0).ok();
}

void Puller::Count(const Pull& pull, const absl::Status& status) const {
  const absl::Duration elapsed = absl::Now() - pull.begin;
  if (status.ok()) {
    Log(LogLevel::kDebug, "pulled",
        {{"transfer_id", pull.transfer_id},
         {"bytes", pull.bytes},
         {"bytes_by_link", pull.link_bytes},
         {"transport", pull.link_bytes > 0 ? options_.links->peers().links().transport() : "grpc"},
         {"seconds", absl::ToDoubleSeconds(elapsed)}});
  }
  const Metrics& metrics = *options_.metrics;
  metrics.pull_seconds.Observe(elapsed);
  if (status.ok()) {
    metrics.pulls_done.Add();
    metrics.pull_bytes(KvTransport::kGrpc)
        .Add(static_cast<double>(std::max<int64_t>(pull.bytes - pull.link_bytes, 0)));
    if (pull.link_bytes > 0) {
      metrics.pull_bytes(options_.links->peers().transport())
          .Add(static_cast<double>(pull.link_bytes));
    }
  } else {
    metrics.pulls_failed(ReasonLabel(status)).Add();
  }
}

absl::Status Puller::Attempt(Pull& pull, bool again) {
  if (ending_.load()) {
    return WithReason(absl::UnavailableError("this node is ending: use another one"),
                      reasons::kDraining);
  }
  if (!Wanted(pull)) return NobodyWaits();
  pull.Connect(*options_.channels, again);
  SLUICE_RETURN_IF_ERROR(Describe(pull));
  const bool by_link = options_.links != nullptr && !again && pull.bytes > 0;
  if (by_link) SLUICE_RETURN_IF_ERROR(ReadByLink(pull));
  SLUICE_RETURN_IF_ERROR(ReadAll(pull, again || pull.link_bytes > 0));
  return Commit(pull);
}

absl::Status Puller::Describe(Pull& pull) {
  v1::DescribeRequest request;
  v1::DescribeResponse held;
  request.set_source_id(pull.source.source_id);
  request.set_tenant(pull.tenant);
  request.set_want_queries(pull.hint_queries > 0);
  const auto context = pull.NewContext(options_.call_timeout);
  const absl::Status answer = FromGrpcStatus(pull.stub->Describe(context.get(), request, &held));
  if (absl::IsDeadlineExceeded(answer) && absl::Now() < pull.deadline) {
    return WithReason(absl::DeadlineExceededError(absl::StrCat(
                          "it did not answer for ", absl::FormatDuration(options_.call_timeout))),
                      reasons::kSourceSilent);
  }
  SLUICE_RETURN_IF_ERROR(answer);
  if (held.model_fingerprint() != options_.model_fingerprint) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat("it holds caches of another model, ",
                                                   held.model_fingerprint().substr(0, 64))),
        reasons::kFingerprintMismatch);
  }
  if (held.prompt_digest() != pull.prompt_digest || held.context_length() != pull.context_length) {
    return Mismatch("it holds the caches of another prompt than prompt_token_ids");
  }
  if (held.cache_kinds_size() != static_cast<int>(options_.layout.kinds.size())) {
    return Mismatch(absl::StrCat("it holds ", held.cache_kinds_size(),
                                 " kinds of caches, expected ", options_.layout.kinds.size()));
  }
  for (int i = 0; i < held.cache_kinds_size(); ++i) {
    const CacheKind& kind = options_.layout.kinds[static_cast<size_t>(i)];
    if (held.cache_kinds(i).SerializeAsString() != ToProto(kind).SerializeAsString()) {
      return Mismatch(absl::StrCat("its caches of kind ", kind.name,
                                   " have another layout: give "
                                   "both nodes the same kv_dtype and block_tokens"));
    }
  }
  if (pull.hint_tokens > 0 && held.has_hints()) {
    absl::StatusOr<SelectionHints> hints = FromProto(held.hints());
    if (!hints.ok()) return Mismatch(std::string(hints.status().message()));
    pull.hints = *std::move(hints);
    const auto unit = std::max<int64_t>(pull.hints.unit_tokens, 1);
    const auto most = static_cast<size_t>(std::max<int64_t>(pull.hint_tokens / unit, 1));
    for (SelectionHints::Entry& entry : pull.hints.entries) {
      if (entry.units.size() > most) entry.units.resize(most);
    }
  }
  return absl::OkStatus();
}

void Puller::AddRanges(const Pull& pull, int layer, v1::ReadRequest* request) const {
  for (const CacheKind& kind : options_.layout.kinds) {
    *request->add_ranges() =
        ToProto({static_cast<uint32_t>(layer), kind.name, 0, static_cast<uint32_t>(kind.heads),
                 pull.cached_tokens, pull.context_length});
  }
}

absl::Status Puller::ReadByLink(Pull& pull) {
  LinkReader::Read read;
  read.address = pull.source.address;
  read.request.set_source_id(pull.source.source_id);
  read.request.set_tenant(pull.tenant);
  if (pull.cached_tokens > 0) {
    for (int layer = 0; layer < options_.layout.layers; ++layer) {
      AddRanges(pull, layer, &read.request);
    }
  }
  read.transfer_id = pull.transfer_id;
  read.transfers = options_.transfers;
  read.call = [&](const v1::ReadByLinkRequest& request,
                  absl::Duration timeout) -> absl::StatusOr<v1::ReadByLinkResponse> {
    v1::ReadByLinkResponse response;
    const auto context = pull.NewContext(timeout);
    SLUICE_RETURN_IF_ERROR(
        FromGrpcStatus(pull.stub->ReadByLink(context.get(), request, &response)));
    return response;
  };
  read.unwanted = [this] { return ending_.load(); };
  const LinkReader::Result result = options_.links->Run(read);
  pull.link_bytes = static_cast<int64_t>(result.bytes);
  options_.metrics->link_reads(result.outcome).Add();
  if (result.outcome != LinkUse::kDone) {
    const bool broken = result.outcome == LinkUse::kBroken;
    Log(broken ? LogLevel::kWarn : LogLevel::kInfo,
        broken ? "a link broke: reading what is missing over gRPC" : "a pull goes over gRPC",
        {{"transfer_id", pull.transfer_id},
         {"source", pull.source.address},
         {"bytes_by_link", pull.link_bytes},
         {"why", result.why.ToString()}});
  }
  return result.transfer;
}

absl::Status Puller::ReadAll(Pull& pull, bool again) {
  std::vector<v1::ReadRequest> requests(1);
  if (again) {
    SLUICE_ASSIGN_OR_RETURN(const TransferInfo info,
                            options_.transfers->Get(pull.transfer_id, kMaxRanges));
    if (info.blocks_landed == info.blocks_total) return absl::OkStatus();
    if (info.missing.size() < kMaxRanges) {
      for (const MissingRange& range : info.missing) *requests[0].add_ranges() = ToProto(range);
    }
  } else if (pull.bytes == 0) {
    return absl::OkStatus();
  } else if (pull.cached_tokens > 0 ||
             (pull.bytes >= 2 * kBytesOfAStream && options_.streams > 1)) {
    // Layers go to the streams in turn, so that each stream has as much.
    const auto streams = static_cast<size_t>(
        std::clamp<int64_t>(pull.bytes / kBytesOfAStream, 1, std::max(options_.streams, 1)));
    requests.resize(std::min<size_t>(streams, static_cast<size_t>(options_.layout.layers)));
    for (int layer = 0; layer < options_.layout.layers; ++layer) {
      AddRanges(pull, layer, &requests[static_cast<size_t>(layer) % requests.size()]);
    }
  }
  std::list<PullStream> streams;
  for (v1::ReadRequest& request : requests) {
    request.set_source_id(pull.source.source_id);
    request.set_tenant(pull.tenant);
    request.set_max_chunk_bytes(options_.max_chunk_bytes);
    PullStream::Options stream;
    // Each stream has its own connection, because a connection is the work of one thread at either
    // end.
    stream.channel = streams.empty() ? pull.channel
                                     : options_.channels->Get(pull.source.address,
                                                              static_cast<int>(streams.size()));
    stream.context = pull.NewContext(absl::InfiniteDuration());
    stream.request = std::move(request);
    stream.transfer_id = pull.transfer_id;
    stream.transfers = options_.transfers;
    stream.idle_timeout = options_.idle_timeout;
    streams.emplace_back(std::move(stream));
    absl::MutexLock lock(&mutex_);
    streams_.emplace(&streams.back(), &pull);
  }
  absl::Status status;
  for (PullStream& stream : streams) {
    status.Update(stream.Join());
    absl::MutexLock lock(&mutex_);
    streams_.erase(&stream);
  }
  return status;
}

absl::Status Puller::Commit(Pull& pull) {
  // There is no first token: this node computes the prompt's last position, by the caller's own
  // parameters.
  TransferInfo missing;
  absl::Status status =
      options_.transfers->Commit(pull.transfer_id, {}, &missing, pull.hints).status();
  // Hints only warm a sequence up, so the caches are not given up for them.
  if (!pull.hints.empty() &&
      (absl::IsResourceExhausted(status) || absl::IsInvalidArgument(status))) {
    status = options_.transfers->Commit(pull.transfer_id, {}, &missing, {}).status();
  }
  if (ReasonOf(status) == reasons::kMissingBlocks) {
    return absl::DataLossError(absl::StrCat("it did not send everything: ", status.message()));
  }
  return status;
}

void Puller::Release(const Pull& pull) {
  if (pull.stub == nullptr) return;
  v1::ReleaseRequest request;
  v1::ReleaseResponse answer;
  request.set_source_id(pull.source.source_id);
  request.set_tenant(pull.tenant);
  // not bound to the request's time, so that its lease need not end it
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.call_timeout));
  PassOn(pull.trace, &context);
  (void)pull.stub->Release(&context, request, &answer);
}

}  // namespace sluice
