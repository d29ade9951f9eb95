#include "src/service/kv_pusher.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/service/chunking.h"
#include "src/service/status_mapping.h"

namespace sluice {

KvPusher::KvPusher(v1::KvIngest::Stub* stub, std::unique_ptr<grpc::ClientContext> context,
                   Options options)
    : options_(std::move(options)),
      context_(std::move(context)),
      writer_(stub->Write(context_.get(), &response_)),
      thread_([this] { SendLoop(); }) {}

KvPusher::~KvPusher() {
  if (thread_.joinable()) (void)Abandon();
}

absl::Status KvPusher::Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                             absl::Span<const absl::Span<const uint8_t>> pieces) {
  SLUICE_ASSIGN_OR_RETURN(const std::vector<ChunkPlan> chunks,
                          PlanChunks(kind, token_begin, token_end, options_.max_chunk_bytes));
  for (const ChunkPlan& plan : chunks) {
    const auto missing = [&](const MissingRange& range) {
      return range.layer == static_cast<uint32_t>(layer) && range.kind == kind.name &&
             Overlaps(plan, range);
    };
    if (options_.filter &&
        std::none_of(options_.missing.begin(), options_.missing.end(), missing)) {
      continue;
    }
    v1::WriteRequest chunk;
    v1::ChunkHeader* header = chunk.mutable_header();
    header->set_transfer_id(options_.transfer_id);
    header->set_layer(static_cast<uint32_t>(layer));
    header->set_kind(kind.name);
    header->set_head_begin(plan.head_begin);
    header->set_head_end(plan.head_end);
    header->set_token_begin(plan.token_begin);
    header->set_token_end(plan.token_end);
    *chunk.mutable_payload() = CopyRange(pieces, plan.offset, plan.bytes);
    header->set_crc32c(
        Crc32c({reinterpret_cast<const uint8_t*>(chunk.payload().data()), chunk.payload().size()}));
    SLUICE_RETURN_IF_ERROR(Enqueue(std::move(chunk)));
  }
  return absl::OkStatus();
}

absl::Status KvPusher::Enqueue(v1::WriteRequest chunk) {
  if (SLUICE_FAILPOINT(kPrefillPush)) context_->TryCancel();
  absl::MutexLock lock(&mutex_);
  // The stream's deadline bounds this wait: a write that outlives it fails.
  mutex_.Await(absl::Condition(this, &KvPusher::CanEnqueue));
  if (broken_) return absl::UnavailableError("the stream to the decode node is broken");
  queued_bytes_ += chunk.payload().size();
  queue_.push_back(std::move(chunk));
  return absl::OkStatus();
}

void KvPusher::SendLoop() {
  for (;;) {
    v1::WriteRequest chunk;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &KvPusher::CanSend));
      if (queue_.empty()) break;
      chunk = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= chunk.payload().size();
    }
    if (first_sent_ == absl::InfiniteFuture()) first_sent_ = absl::Now();
    if (!writer_->Write(chunk)) {
      absl::MutexLock lock(&mutex_);
      broken_ = true;
      break;
    }
    bytes_sent_ += chunk.payload().size();
  }
  writer_->WritesDone();
  status_ = FromGrpcStatus(writer_->Finish());
  absl::MutexLock lock(&mutex_);
  if (broken_ && status_.ok()) {
    status_ = absl::UnavailableError("the stream ended before everything was sent");
  }
}

absl::Status KvPusher::Finish() {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  thread_.join();
  return status_;
}

absl::Status KvPusher::Abandon() {
  bool broken;
  {
    absl::MutexLock lock(&mutex_);
    broken = broken_;
    closed_ = true;
    queue_.clear();
  }
  if (!broken) context_->TryCancel();
  thread_.join();
  return broken ? status_ : absl::OkStatus();
}

}  // namespace sluice
