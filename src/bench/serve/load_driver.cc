#include "src/bench/serve/load_driver.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "sluice/v1/decode.grpc.pb.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/service/wire/status_mapping.h"

namespace sluice::bench {
namespace {

// A request refused without RetryInfo is retried after this time.
constexpr double kRetrySeconds = 0.5;
constexpr double kProgressSeconds = 0.2;

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  // Each channel has its own connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

void SetDeadline(grpc::ClientContext& context, double seconds) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(seconds)));
}

struct Stubs {
  std::unique_ptr<v1::KvIngest::Stub> ingest;
  std::unique_ptr<v1::Decode::Stub> decode;
};

// The state that all requests of a run share.
struct Shared {
  const LoadOptions* options = nullptr;
  KvSource* kv = nullptr;
  const v1::ModelInfo* model = nullptr;
  grpc::CompletionQueue queue;
  absl::Time start;
  std::vector<uint32_t> tokens;
  uint64_t bytes_pushed = 0;

  double Now() const { return absl::ToDoubleSeconds(absl::Now() - start); }
  void CountTokens(double at, int count) {
    const auto bucket = static_cast<size_t>(at / LoadResult::kBucketSeconds);
    if (tokens.size() <= bucket) tokens.resize(bucket + 1);
    tokens[bucket] += static_cast<uint32_t>(count);
  }
};

// One request. It always has exactly one operation in flight, or waits for a retry. The driver's
// thread calls Proceed at the end of each operation.
class Call {
 public:
  Call(Shared* shared, Stubs* stubs, size_t index, const PlannedRequest& plan, bool retry,
       const RequestRecord& begun)
      : record(begun),
        index_(index),
        shared_(shared),
        stubs_(stubs),
        plan_(plan),
        retry_(retry),
        prompt_(shared->kv->Prompt(plan.seed, plan.prompt)) {
    record.prompt_tokens = static_cast<int64_t>(prompt_.size());
    record.output_wanted = plan.output;
  }

  RequestRecord record;
  size_t index() const { return index_; }
  double retry_at() const { return retry_at_; }

  enum class Next { kWait, kRetry, kEnded };
  // Begins the request, or repeats the refused call.
  Next Begin() { return transfer_id_.empty() ? Reserve() : Generate(); }

  Next Proceed(bool ok) {
    switch (state_) {
      case State::kReserve:
        return AfterReserve();
      case State::kWrite:
        return ok ? WriteNext() : FinishWrite();
      case State::kWriteDone:
        return FinishWrite();
      case State::kWriteFinish:
        if (!status_.ok()) return Failed();
        return Commit();
      case State::kCommit:
        if (!status_.ok()) return Failed();
        record.committed = shared_->Now();
        return Generate();
      case State::kGenerate:
        return ok ? Read() : FinishGenerate();
      case State::kRead:
        if (!ok) return FinishGenerate();
        Take();
        return Read();
      case State::kGenerateFinish:
        return AfterGenerate();
      case State::kAbort:
        return End(RequestRecord::Outcome::kRefused);
    }
    return Next::kWait;
  }

 private:
  enum class State {
    kReserve,
    kWrite,
    kWriteDone,
    kWriteFinish,
    kCommit,
    kGenerate,
    kRead,
    kGenerateFinish,
    kAbort
  };

  // Returns a new context. A context serves one call; the call's object lies in the call's memory
  // and must be destroyed before the context.
  grpc::ClientContext* NewContext() {
    reserve_.reset();
    writer_.reset();
    commit_.reset();
    reader_.reset();
    abort_.reset();
    context_ = std::make_unique<grpc::ClientContext>();
    SetDeadline(*context_, shared_->options->timeout_seconds);
    return context_.get();
  }

  Next Reserve() {
    state_ = State::kReserve;
    v1::ReserveRequest request;
    v1::Manifest* manifest = request.mutable_manifest();
    manifest->set_model_fingerprint(shared_->model->fingerprint());
    manifest->set_context_length(static_cast<uint32_t>(prompt_.size()));
    for (const int32_t id : prompt_) manifest->add_prompt_token_ids(static_cast<uint32_t>(id));
    manifest->set_max_new_tokens(static_cast<uint32_t>(plan_.output));
    reserve_ = stubs_->ingest->AsyncReserve(NewContext(), request, &shared_->queue);
    reserve_->Finish(&reserved_, &status_, this);
    return Next::kWait;
  }

  Next AfterReserve() {
    if (status_.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) return Refused();
    if (!status_.ok()) return Failed();
    record.reserved = shared_->Now();
    transfer_id_ = reserved_.transfer_id();
    const auto chunks = shared_->kv->ChunkCount(record.prompt_tokens, reserved_.max_chunk_bytes());
    if (!chunks.ok()) {
      status_ = ToGrpcStatus(chunks.status());
      return Failed();
    }
    chunks_ = *chunks;
    state_ = State::kWrite;
    writer_ = stubs_->ingest->AsyncWrite(NewContext(), &written_, &shared_->queue, this);
    return Next::kWait;
  }

  Next WriteNext() {
    if (chunk_ == chunks_) {
      state_ = State::kWriteDone;
      writer_->WritesDone(this);
      return Next::kWait;
    }
    v1::WriteRequest& chunk =
        shared_->kv->Chunk(record.prompt_tokens, reserved_.max_chunk_bytes(), chunk_++);
    chunk.mutable_header()->set_transfer_id(transfer_id_);
    shared_->bytes_pushed += chunk.payload().size();
    writer_->Write(chunk, this);  // The message is serialised before this returns.
    return Next::kWait;
  }

  Next FinishWrite() {
    state_ = State::kWriteFinish;
    writer_->Finish(&status_, this);
    return Next::kWait;
  }

  Next Commit() {
    state_ = State::kCommit;
    v1::CommitRequest request;
    request.set_transfer_id(transfer_id_);
    commit_ = stubs_->ingest->AsyncCommit(NewContext(), request, &shared_->queue);
    commit_->Finish(&committed_, &status_, this);
    return Next::kWait;
  }

  Next Generate() {
    state_ = State::kGenerate;
    v1::GenerateRequest request;
    request.set_transfer_id(transfer_id_);
    v1::SamplingParams* sampling = request.mutable_sampling();
    sampling->set_temperature(static_cast<float>(shared_->options->temperature));
    sampling->set_seed(plan_.seed);
    sampling->set_max_tokens(static_cast<uint32_t>(plan_.output));
    sampling->set_ignore_eos(true);
    reader_ = stubs_->decode->AsyncGenerate(NewContext(), request, &shared_->queue, this);
    return Next::kWait;
  }

  Next Read() {
    state_ = State::kRead;
    message_.Clear();
    reader_->Read(&message_, this);
    return Next::kWait;
  }

  void Take() {
    finished_ = finished_ || message_.has_finish();
    if (message_.tokens_size() == 0) return;
    const double now = shared_->Now();
    if (record.first_token == 0) {
      record.first_token = now;
    } else {
      record.gaps.push_back(static_cast<float>(now - record.last_token));
      record.gap_ends.push_back(static_cast<float>(now));
    }
    record.last_token = now;
    shared_->CountTokens(now, message_.tokens_size());
    const std::vector<int32_t>& known = shared_->kv->Known();
    for (const v1::Token& token : message_.tokens()) {
      const auto at = static_cast<size_t>(record.output_tokens++);
      if (shared_->options->temperature == 0 && at < known.size() &&
          static_cast<int32_t>(token.id()) != known[at]) {
        wrong_token_ = true;
      }
    }
  }

  Next FinishGenerate() {
    state_ = State::kGenerateFinish;
    reader_->Finish(&status_, this);
    return Next::kWait;
  }

  Next AfterGenerate() {
    if (status_.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && record.output_tokens == 0) {
      return Refused();
    }
    if (!status_.ok()) return Failed();
    if (!finished_ || record.output_tokens != record.output_wanted) {
      return Wrong("WRONG_COUNT", absl::StrCat(record.output_tokens, " tokens came, ",
                                               record.output_wanted, " were asked for"));
    }
    if (wrong_token_) return Wrong("WRONG_TOKEN", "the tokens are not the recorded ones");
    return End(RequestRecord::Outcome::kDone);
  }

  Next Refused() {
    const absl::Status status = FromGrpcStatus(status_);
    const std::optional<absl::Duration> delay = RetryAfterOf(status);
    ++record.refusals;
    if (!delay.has_value()) ++record.refusals_without_retry_info;
    const double seconds = delay.has_value() ? absl::ToDoubleSeconds(*delay) : kRetrySeconds;
    record.longest_retry_delay = std::max(record.longest_retry_delay, seconds);
    NoteError();
    if (retry_) {
      retry_at_ = shared_->Now() + seconds;
      return Next::kRetry;
    }
    if (transfer_id_.empty()) return End(RequestRecord::Outcome::kRefused);
    // Nobody will use its caches any more.
    state_ = State::kAbort;
    v1::AbortRequest request;
    request.set_transfer_id(transfer_id_);
    request.set_reason("its Generate was refused");
    abort_ = stubs_->ingest->AsyncAbort(NewContext(), request, &shared_->queue);
    abort_->Finish(&aborted_, &status_, this);
    return Next::kWait;
  }

  void NoteError() {
    const absl::Status status = FromGrpcStatus(status_);
    const std::optional<std::string> reason = ReasonOf(status);
    record.error = absl::StrCat(absl::StatusCodeToString(status.code()),
                                reason.has_value() ? " " : "", reason.value_or(""));
    record.message = status_.error_message();
  }
  Next Failed() {
    NoteError();
    return End(RequestRecord::Outcome::kFailed);
  }
  Next Wrong(const std::string& what, const std::string& message) {
    record.error = what;
    record.message = message;
    return End(RequestRecord::Outcome::kFailed);
  }
  Next End(RequestRecord::Outcome outcome) {
    record.outcome = outcome;
    record.end = shared_->Now();
    return Next::kEnded;
  }

  const size_t index_;
  Shared* const shared_;
  Stubs* const stubs_;
  const PlannedRequest plan_;
  const bool retry_;
  const std::vector<int32_t> prompt_;

  State state_ = State::kReserve;
  grpc::Status status_;
  std::string transfer_id_;
  size_t chunk_ = 0, chunks_ = 0;
  bool finished_ = false, wrong_token_ = false;
  double retry_at_ = 0;
  v1::ReserveResponse reserved_;
  v1::WriteResponse written_;
  v1::CommitResponse committed_;
  v1::AbortResponse aborted_;
  v1::GenerateResponse message_;
  std::unique_ptr<grpc::ClientContext> context_;  // Destroyed after the next five: see NewContext.
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::ReserveResponse>> reserve_;
  std::unique_ptr<grpc::ClientAsyncWriter<v1::WriteRequest>> writer_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::CommitResponse>> commit_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::GenerateResponse>> reader_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::AbortResponse>> abort_;
};

class LoadDriver {
 public:
  LoadDriver(const LoadOptions& options, const v1::ModelInfo& model, KvSource& kv,
             const std::function<void(const LoadProgress&)>& progress)
      : options_(options), progress_(progress) {
    shared_.options = &options_;
    shared_.kv = &kv;
    shared_.model = &model;
    for (int i = 0; i < options.channels; ++i) {
      const std::shared_ptr<grpc::Channel> channel = Connect(options.address);
      stubs_.push_back({v1::KvIngest::NewStub(channel), v1::Decode::NewStub(channel)});
    }
  }

  LoadResult Run() {
    shared_.start = absl::Now();
    for (size_t phase = 0; phase < options_.phases.size(); ++phase) RunPhase(phase);
    while (!running_.empty()) Turn(shared_.Now() + kProgressSeconds);
    result_.end = shared_.Now();
    shared_.queue.Shutdown();
    for (void* tag = nullptr;;) {
      bool ok = false;
      if (!shared_.queue.Next(&tag, &ok)) break;
    }
    result_.tokens = std::move(shared_.tokens);
    result_.tokens.resize(static_cast<size_t>(result_.end / LoadResult::kBucketSeconds) + 1);
    result_.bytes_pushed = shared_.bytes_pushed;
    result_.client_cpu_seconds = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    return std::move(result_);
  }

 private:
  void RunPhase(size_t number) {
    Phase phase = options_.phases[number];
    if (phase.rate_is_factor) phase.rate *= FinishedPerSecond(number - 1);
    const double begin = shared_.Now();
    result_.phases.push_back({begin, begin, phase.rate});
    Arrivals arrivals(phase, options_.prompt, options_.output,
                      static_cast<int64_t>(shared_.model->max_context()),
                      options_.seed + 0x9E3779B9u * number);
    PlannedRequest next = arrivals.Next();
    number_ = number;
    for (int64_t came = 0; phase.requests == 0 || came < phase.requests;) {
      const double now = shared_.Now();
      const double end = phase.seconds > 0 ? begin + phase.seconds : now + 3600;
      if (now >= end) break;
      const bool open = phase.rate > 0;
      if (open ? begin + next.at <= now
               : running_.size() < static_cast<size_t>(phase.concurrency)) {
        Start(number, phase, next, open ? begin + next.at : now);
        next = arrivals.Next();
        ++came;
        continue;
      }
      Turn(std::min(end, open ? begin + next.at : end));
    }
    result_.phases.back().end = shared_.Now();
  }

  // Returns the requests per second that finished during the phase, including those of earlier
  // phases.
  double FinishedPerSecond(size_t phase) const {
    const LoadResult::PhaseTimes& times = result_.phases[phase];
    double finished = 0;
    for (const RequestRecord& r : result_.requests) {
      if (r.outcome == RequestRecord::Outcome::kDone && r.end >= times.begin &&
          r.end <= times.end) {
        ++finished;
      }
    }
    return std::max(finished, 1.0) / std::max(times.end - times.begin, 1e-3);
  }

  void Start(size_t phase, const Phase& description, const PlannedRequest& plan, double due) {
    const size_t index = result_.requests.size();
    RequestRecord record;
    record.phase = phase;
    record.due = due;
    result_.requests.push_back(record);
    auto call = std::make_unique<Call>(&shared_, &stubs_[index % stubs_.size()], index, plan,
                                       description.retry, record);
    Call* const raw = call.get();
    running_.emplace(raw, std::move(call));
    React(raw, raw->Begin());
  }

  void React(Call* call, Call::Next next) {
    if (next == Call::Next::kRetry) retries_.emplace(call->retry_at(), call);
    if (next != Call::Next::kEnded) return;
    switch (call->record.outcome) {
      case RequestRecord::Outcome::kDone:
        ++progress_now_.done;
        break;
      case RequestRecord::Outcome::kRefused:
        ++progress_now_.refused;
        break;
      default:
        ++progress_now_.failed;
    }
    result_.requests[call->index()] = std::move(call->record);
    running_.erase(call);
  }

  // Handles one completed operation. Waits for it until `until`, the next retry or the next
  // progress line.
  void Turn(double until) {
    const double now = shared_.Now();
    if (now >= next_progress_) Progress(now);
    while (!retries_.empty() && retries_.top().first <= now) {
      Call* const call = retries_.top().second;
      retries_.pop();
      React(call, call->Begin());
    }
    double wait = std::min(until, next_progress_);
    if (!retries_.empty()) wait = std::min(wait, retries_.top().first);
    void* tag = nullptr;
    bool ok = false;
    const auto got =
        shared_.queue.AsyncNext(&tag, &ok, absl::ToChronoTime(shared_.start + absl::Seconds(wait)));
    if (got != grpc::CompletionQueue::GOT_EVENT) return;
    auto* const call = static_cast<Call*>(tag);
    React(call, call->Proceed(ok));
  }

  void Progress(double now) {
    next_progress_ = now + kProgressSeconds;
    if (!progress_) return;
    progress_now_.seconds = now;
    progress_now_.phase = options_.phases[number_].name;
    progress_now_.running = running_.size();
    constexpr size_t kBuckets = 10;  // The last second.
    const size_t size = shared_.tokens.size();
    double sum = 0;
    for (size_t i = size - std::min(size, kBuckets); i < size; ++i) sum += shared_.tokens[i];
    progress_now_.tokens_per_second = sum / (kBuckets * LoadResult::kBucketSeconds);
    progress_(progress_now_);
  }

  const LoadOptions options_;
  const std::function<void(const LoadProgress&)> progress_;
  Shared shared_;
  std::vector<Stubs> stubs_;
  std::map<Call*, std::unique_ptr<Call>> running_;
  using Retry = std::pair<double, Call*>;
  std::priority_queue<Retry, std::vector<Retry>, std::greater<>> retries_;
  size_t number_ = 0;  // Number of the phase.
  double next_progress_ = 0;
  LoadProgress progress_now_;
  LoadResult result_;
};

}  // namespace

absl::StatusOr<v1::GetModelResponse> AskModel(const std::string& address) {
  const auto stub = v1::Admin::NewStub(Connect(address));
  grpc::ClientContext context;
  SetDeadline(context, 10);
  v1::GetModelResponse response;
  const grpc::Status status = stub->GetModel(&context, {}, &response);
  if (status.ok()) return response;
  return absl::UnavailableError(absl::StrCat("no decode node answers at ", address, " (",
                                             status.error_message(),
                                             "): start sluice-server there, or name another one "
                                             "with --decode"));
}

LoadResult RunLoad(const LoadOptions& options, const v1::ModelInfo& model, KvSource& kv,
                   const std::function<void(const LoadProgress&)>& progress) {
  return LoadDriver(options, model, kv, progress).Run();
}

}  // namespace sluice::bench
