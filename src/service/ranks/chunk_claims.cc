#include "src/service/ranks/chunk_claims.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/device/rank_group.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {

// ---- Rank 0 ----

ChunkClaims::ChunkClaims(int size, std::function<absl::Status(int rank)> lost)
    : size_(size), lost_(std::move(lost)) {}

void ChunkClaims::ServeWith(Open open) {
  absl::MutexLock lock(&mutex_);
  open_ = std::move(open);
  if (open_ != nullptr) return;
  for (grpc::ServerContext* const context : serving_) context->TryCancel();
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return serving_.empty(); };
  mutex_.Await(absl::Condition(&none));
}

absl::Status ChunkClaims::Serve(grpc::ServerContext* context, Stream* stream) {
  Open open;
  {
    absl::MutexLock lock(&mutex_);
    if (open_ == nullptr) {
      return absl::UnavailableError("rank 0 takes no caches yet, or no more");
    }
    open = open_;
    serving_.insert(context);
  }
  const absl::Status status = Converse(std::move(open), stream);
  absl::MutexLock lock(&mutex_);
  serving_.erase(context);
  return status;
}

absl::Status ChunkClaims::Converse(Open open, Stream* stream) {
  v1::ClaimRequest request;
  if (!stream->Read(&request)) return absl::OkStatus();
  const int rank = static_cast<int>(request.rank());
  if (rank < 1 || rank >= size_) {
    return absl::FailedPreconditionError(absl::StrCat("ranks: this node has no rank ", rank));
  }
  const std::unique_ptr<ClaimStream> claims = open(rank);
  do {
    v1::ClaimAnswer answer;
    if (absl::Status status = claims->Take(request, &answer); !status.ok()) return status;
    if (!request.has_broke() && !stream->Write(answer)) break;
  } while (stream->Read(&request));
  if (!claims->claimed()) return absl::OkStatus();
  {
    absl::MutexLock lock(&mutex_);
    if (open_ == nullptr) return absl::OkStatus();  // this end broke it, since the node ends
  }
  return lost_(rank);
}

// ---- The other ranks ----

ClaimCall::ClaimCall(int rank, const std::shared_ptr<grpc::Channel>& channel,
                     std::function<bool()> arrived, std::function<absl::Status()> failure,
                     std::function<void(ClaimCall*)> gone)
    : rank_(rank),
      channel_(channel),
      arrived_(std::move(arrived)),
      failure_(std::move(failure)),
      gone_(std::move(gone)) {}

ClaimCall::~ClaimCall() {
  if (stream_ != nullptr && !ended_) {
    stream_->WritesDone();
    stream_->Finish();
  }
  gone_(this);
}

absl::StatusOr<v1::ClaimAnswer> ClaimCall::Ask(v1::ClaimRequest request) {
  request.set_rank(static_cast<uint32_t>(rank_));
  v1::ClaimAnswer answer;
  if (stream_ == nullptr) stream_ = v1::RankService::NewStub(channel_)->Claim(&context_);
  if (stream_->Write(request) && stream_->Read(&answer)) return answer;
  ended_ = true;
  const absl::Status status = FromGrpcStatus(stream_->Finish());
  if (absl::Status failure = failure_(); !failure.ok()) return failure;
  // Rank 0's own answers have a reason or a field; a connection that breaks has neither.
  if (status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status)) {
    return RankLost(0, absl::StrCat("claims no pages for rank ", rank_, ": ", status.message()));
  }
  return status;
}

absl::StatusOr<v1::ClaimAnswer> ClaimCall::Begin(v1::ClaimRequest::Begin begin) {
  v1::ClaimRequest request;
  *request.mutable_begin() = std::move(begin);
  return Ask(std::move(request));
}

absl::StatusOr<v1::ClaimAnswer> ClaimCall::End(uint32_t crc32c, bool differs) {
  if (!arrived_()) return failure_();
  v1::ClaimRequest request;
  request.mutable_end()->set_crc32c(crc32c);
  request.mutable_end()->set_differs(differs);
  return Ask(std::move(request));
}

void ClaimCall::Broke(const absl::Status& why) {
  if (stream_ == nullptr || ended_) return;
  v1::ClaimRequest request;
  request.set_rank(static_cast<uint32_t>(rank_));
  request.mutable_broke()->set_code(static_cast<int32_t>(why.code()));
  request.mutable_broke()->set_message(std::string(why.message().substr(0, 512)));
  stream_->Write(request);
}

}  // namespace sluice
