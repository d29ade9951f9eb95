#include "src/service/ingest/kv_pusher.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/wire/proto_conversion.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

constexpr size_t kMaxRangesOfGet = 1024;  // GetTransferResponse.missing
// before the first resume; then twice as long each time
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);

bool Overlaps(const v1::ChunkHeader& header, const std::vector<MissingRange>& missing) {
  ChunkPlan plan;
  plan.head_begin = header.head_begin();
  plan.head_end = header.head_end();
  plan.token_begin = header.token_begin();
  plan.token_end = header.token_end();
  return Overlaps(header.layer(), header.kind(), plan, missing);
}

}  // namespace

bool MayMend(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsDataLoss(status) ||
         absl::IsInternal(status) || absl::IsUnknown(status) ||
         ReasonOf(status) == reasons::kMissingBlocks || ReasonOf(status) == reasons::kBlockBusy;
}

absl::StatusOr<TransferProgress> GetProgress(v1::KvIngest::Stub* stub, grpc::ClientContext* context,
                                             const std::string& transfer_id) {
  v1::GetTransferRequest request;
  v1::GetTransferResponse answer;
  request.set_transfer_id(transfer_id);
  SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub->GetTransfer(context, request, &answer)));
  TransferProgress out;
  out.committed = answer.state() == v1::GetTransferResponse::STATE_COMMITTED;
  for (const v1::BlockRange& range : answer.missing().ranges()) {
    out.missing.push_back(FromProto(range));
  }
  out.everything = out.missing.size() >= kMaxRangesOfGet;  // there may be more than the list has
  return out;
}

KvPusher::KvPusher(v1::KvIngest::Stub* stub, Options options)
    : stub_(stub),
      options_(std::move(options)),
      to_rank_(options_.rank_stub != nullptr),
      filter_(options_.filter),
      missing_(options_.missing) {}

KvPusher::~KvPusher() {
  if (thread_.joinable()) (void)Abandon();
}

absl::StatusOr<std::vector<KvPusher::Chunk>> KvPusher::ChunksOf(int layer, const CacheKind& kind,
                                                                int token_begin, int token_end,
                                                                uint64_t most,
                                                                HeadRange heads) const {
  SLUICE_ASSIGN_OR_RETURN(
      const std::vector<ChunkPlan> plans,
      PlanChunksOfHeads(kind, token_begin, token_end, options_.cached_tokens, most, heads));
  std::vector<Chunk> chunks;
  for (const ChunkPlan& plan : plans) {
    Chunk chunk{HeaderOf(layer, kind.name, plan), plan};
    chunk.header.set_transfer_id(options_.transfer_id);
    if (filter_ && !Overlaps(chunk.header, missing_)) continue;
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

absl::Status KvPusher::Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                             Pieces pieces, HeadRange heads) {
  if (token_end <= options_.cached_tokens) return absl::OkStatus();
  if (link_use_ == LinkUse::kBroken && !std::exchange(asked_, true)) FindMissing();
  SLUICE_ASSIGN_OR_RETURN(
      const std::vector<Chunk> chunks,
      ChunksOf(layer, kind, token_begin, token_end, options_.max_chunk_bytes, heads));
  for (const Chunk& planned : chunks) {
    v1::WriteRequest chunk;
    *chunk.mutable_header() = planned.header;
    *chunk.mutable_payload() = CopyChunk(kind, token_begin, planned.plan, pieces);
    chunk.mutable_header()->set_crc32c(
        Crc32c({reinterpret_cast<const uint8_t*>(chunk.payload().data()), chunk.payload().size()}));
    SLUICE_RETURN_IF_ERROR(Enqueue(std::move(chunk)));
  }
  return absl::OkStatus();
}

bool KvPusher::OnDevice() {
  if (options_.links != nullptr && !link_use_.has_value()) OpenLink();
  return link_ != nullptr;
}

absl::StatusOr<bool> KvPusher::LayerOnDevice(int layer, const CacheKind& kind, int token_begin,
                                             int token_end, Pieces pieces) {
  SLUICE_CHECK(link_ != nullptr, "nothing takes caches on the device");
  if (token_end <= options_.cached_tokens) return true;
  SLUICE_ASSIGN_OR_RETURN(
      const std::vector<Chunk> chunks,
      ChunksOf(layer, kind, token_begin, token_end,
               std::min<uint64_t>(link_->message_bytes(), options_.max_chunk_bytes),
               {0, static_cast<uint32_t>(kind.heads)}));
  if (first_sent_ == absl::InfiniteFuture()) first_sent_ = absl::Now();
  std::vector<LinkPush::Chunk> messages;
  for (const Chunk& chunk : chunks) {
    messages.push_back({chunk.header, chunk.plan.offset, chunk.plan.bytes});
  }
  const absl::Status sent = link_->Send(messages, pieces);
  if (!sent.ok()) SLUICE_RETURN_IF_ERROR(LinkEnded(sent));
  return sent.ok();
}

absl::StatusOr<bool> KvPusher::FlushDevice() {
  if (link_ == nullptr) return true;
  const absl::Status landed = link_->Finish();
  if (!landed.ok()) {
    SLUICE_RETURN_IF_ERROR(LinkEnded(landed));
    return false;
  }
  bytes_by_link_ = link_->bytes_landed();
  link_.reset();
  return true;
}

void KvPusher::OpenLink() {
  LinkPush::Options options;
  options.address = options_.address;
  options.transfer_id = options_.transfer_id;
  options.links = options_.links;
  options.stub = stub_;
  options.new_context = options_.link_context;
  absl::StatusOr<std::unique_ptr<LinkPush>> opened = LinkPush::Open(options);
  if (opened.ok()) {
    link_ = *std::move(opened);
    link_use_ = LinkUse::kDone;
    return;
  }
  link_use_ = LinkUse::kRefused;
  Log(LogLevel::kInfo, "a push goes over gRPC",
      {{"transfer_id", options_.transfer_id},
       {"decode_node", options_.address},
       {"why", opened.status().ToString()}});
}

absl::Status KvPusher::LinkEnded(const absl::Status& why) {
  bytes_by_link_ = link_->bytes_landed();
  link_.reset();
  link_use_ = LinkUse::kBroken;
  if (!MayMend(why)) {
    status_ = why;
    absl::MutexLock lock(&mutex_);
    broken_ = true;
    return why;
  }
  Log(LogLevel::kWarn, "a link broke: pushing the rest over gRPC",
      {{"transfer_id", options_.transfer_id},
       {"decode_node", options_.address},
       {"bytes_by_link", bytes_by_link_},
       {"why", why.ToString()}});
  return absl::OkStatus();
}

void KvPusher::FindMissing() {
  // If the node does not say what is missing, all is sent: it compares what it has, and counts it
  // once.
  absl::StatusOr<TransferProgress> progress =
      GetProgress(stub_, options_.call_context().get(), options_.transfer_id);
  if (!progress.ok() || progress->everything) return;
  filter_ = true;
  missing_ = std::move(progress->missing);
}

absl::Status KvPusher::Enqueue(v1::WriteRequest chunk) {
  if (!thread_.joinable()) thread_ = std::thread([this] { SendLoop(); });
  absl::MutexLock lock(&mutex_);
  // The streams' deadlines bound this wait, because a write that outlives its own fails.
  mutex_.Await(absl::Condition(this, &KvPusher::CanEnqueue));
  if (broken_) return absl::UnavailableError("the stream to the decode node is broken");
  queued_bytes_ += chunk.payload().size();
  queue_.push_back(std::move(chunk));
  return absl::OkStatus();
}

void KvPusher::SendLoop() {
  absl::Status status;
  if (to_rank_) {
    status = ReachesRank() ? SendStream() : absl::UnavailableError("no connection comes about");
    to_rank_ = false;
    if (!status.ok()) {
      // The node's own address takes everything, and says what is wrong if it is the transfer.
      Log(LogLevel::kWarn, "a rank's port takes no caches: sending to the node's own address",
          {{"transfer_id", options_.transfer_id},
           {"rank_address", options_.rank_address},
           {"error", status.ToString()}});
      status = PrepareResume(0);
      if (status.ok()) status = SendStream();
    }
  } else {
    status = SendStream();
  }
  for (int resume = 0; resume < kMaxResumes && MayMend(status); ++resume) {
    Log(LogLevel::kWarn, "a push broke: sending what is missing",
        {{"transfer_id", options_.transfer_id}, {"error", status.ToString()}});
    status = PrepareResume(resume);
    if (status.ok()) status = SendStream();
  }
  status_ = status;
  absl::MutexLock lock(&mutex_);
  broken_ = !status.ok();
}

bool KvPusher::ReachesRank() const {
  const auto deadline = absl::ToChronoTime(absl::Now() + kConnectTime);
  grpc::Channel& channel = *options_.rank_channel;
  for (grpc_connectivity_state state = channel.GetState(true); state != GRPC_CHANNEL_READY;
       state = channel.GetState(true)) {
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) return false;
    if (!channel.WaitForStateChange(state, deadline)) return false;
  }
  return true;
}

absl::Status KvPusher::SendStream() {
  const std::unique_ptr<grpc::ClientContext> context = options_.stream_context();
  {
    absl::MutexLock lock(&mutex_);
    if (abandoned_) return absl::CancelledError("given up");
    context_ = context.get();
  }
  v1::WriteResponse response;
  const auto writer = (to_rank_ ? options_.rank_stub : stub_)->Write(context.get(), &response);
  bool sent = true;
  while (sent) {
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
    // stands for a connection that breaks
    if (SLUICE_FAILPOINT(kPrefillPush)) context->TryCancel();
    sent = writer->Write(chunk);
    if (sent) bytes_sent_ += chunk.payload().size();
    absl::MutexLock lock(&mutex_);
    Keep(std::move(chunk));
  }
  writer->WritesDone();
  const absl::Status status = FromGrpcStatus(writer->Finish());
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  if (status.ok() && !sent) {
    return absl::UnavailableError("the stream ended before everything was sent");
  }
  return status;
}

void KvPusher::Keep(v1::WriteRequest chunk) {
  kept_bytes_ += chunk.payload().size();
  kept_.push_back(std::move(chunk));
  while (kept_bytes_ > options_.max_kept_bytes) {
    kept_bytes_ -= kept_.front().payload().size();
    kept_.pop_front();
  }
}

absl::Status KvPusher::PrepareResume(int resume) {
  {
    // The node may need a moment to notice that the old stream is gone (BLOCK_BUSY), or to be back.
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&abandoned_), kFirstPause * (1 << resume));
    if (abandoned_) return absl::CancelledError("given up");
  }
  const std::unique_ptr<grpc::ClientContext> context = options_.call_context();
  context->set_wait_for_ready(true);
  SLUICE_ASSIGN_OR_RETURN(const TransferProgress progress,
                          GetProgress(stub_, context.get(), options_.transfer_id));
  absl::MutexLock lock(&mutex_);
  std::deque<v1::WriteRequest> again;
  for (v1::WriteRequest& chunk : kept_) {
    if (!progress.everything && !Overlaps(chunk.header(), progress.missing)) continue;
    queued_bytes_ += chunk.payload().size();
    again.push_back(std::move(chunk));
  }
  kept_.clear();
  kept_bytes_ = 0;
  queue_.insert(queue_.begin(), std::make_move_iterator(again.begin()),
                std::make_move_iterator(again.end()));
  return absl::OkStatus();
}

absl::Status KvPusher::Finish() {
  SLUICE_CHECK(link_ == nullptr, "FlushDevice comes first");
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  if (thread_.joinable()) thread_.join();
  return status_;
}

absl::Status KvPusher::Abandon() {
  (void)FlushDevice();
  bool broken;
  {
    absl::MutexLock lock(&mutex_);
    broken = broken_;
    closed_ = true;
    abandoned_ = true;
    queue_.clear();
    queued_bytes_ = 0;
    if (context_ != nullptr) context_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
  return broken ? status_ : absl::OkStatus();
}

}  // namespace sluice
