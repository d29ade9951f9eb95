#include "src/bench/ingest/ingest_sender.h"

#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/crc32c.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/ingest/bench_certificate.h"
#include "src/bench/ingest/ingest_source.h"
#include "src/service/access/credentials.h"
#include "src/service/grpc/ingest_channel.h"
#include "src/service/wire/chunking.h"
#include "src/service/wire/status_mapping.h"

namespace sluice::bench {
namespace {

// Payloads are cut from this many bytes, more than fit in a CPU cache, so that the sender reads
// memory as a prefill node does.
constexpr size_t kSourceBytes = size_t{64} << 20;

bool ReadAll(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// The messages of one transfer. Payloads lie in `source` and are sent from there, without a copy or
// a checksum in the measured time: both would be the same for every peer.
class Messages {
 public:
  Messages(const SendJob& job, const std::vector<uint8_t>& source) : source_(source) {
    const CacheKind kind = LayoutOf(job).kinds[0];
    const auto chunks = PlanChunks(kind, 0, job.context, static_cast<uint64_t>(job.chunk_bytes));
    SLUICE_CHECK(chunks.ok(), std::string(chunks.status().ToString()));
    size_t at = 0;
    for (int layer = 0; layer < job.layers; ++layer) {
      for (const ChunkPlan& plan : *chunks) {
        SLUICE_CHECK(plan.bytes <= source.size());
        if (at + plan.bytes > source.size()) at = 0;
        Message message;
        message.header.set_layer(static_cast<uint32_t>(layer));
        message.header.set_kind(kind.name);
        message.header.set_head_begin(plan.head_begin);
        message.header.set_head_end(plan.head_end);
        message.header.set_token_begin(plan.token_begin);
        message.header.set_token_end(plan.token_end);
        message.payload = {source_.data() + at, plan.bytes};
        message.header.set_crc32c(Crc32c(message.payload));
        at += plan.bytes;
        messages_.push_back(std::move(message));
      }
    }
  }

  size_t count() const { return messages_.size(); }
  uint64_t payload_bytes(size_t i) const { return messages_[i].payload.size(); }
  // Returns a serialised WriteRequest.
  grpc::ByteBuffer Serialise(size_t i, const std::string& transfer_id) {
    Message& message = messages_[i];
    message.header.set_transfer_id(transfer_id);
    std::string front(1, '\x0A');  // Header: field 1, length-delimited.
    AppendVarint(message.header.ByteSizeLong(), &front);
    message.header.AppendToString(&front);
    front.push_back('\x12');  // Payload: field 2, length-delimited.
    AppendVarint(message.payload.size(), &front);
    const grpc::Slice slices[] = {
        grpc::Slice(front),
        grpc::Slice(message.payload.data(), message.payload.size(), grpc::Slice::STATIC_SLICE)};
    return grpc::ByteBuffer(slices, 2);
  }

 private:
  struct Message {
    v1::ChunkHeader header;
    absl::Span<const uint8_t> payload;
  };
  static void AppendVarint(uint64_t value, std::string* out) {
    for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
    out->push_back(static_cast<char>(value));
  }

  const std::vector<uint8_t>& source_;
  std::vector<Message> messages_;
};

class Sending {
 public:
  Sending(const SendJob& job, const std::vector<uint8_t>& source)
      : job_(job), messages_(job, source) {
    const std::string folder = job.tls;
    const std::shared_ptr<grpc::ChannelCredentials> credentials =
        NewChannelCredentials(folder.empty() ? TlsFiles() : BenchTlsFiles(folder));
    for (int i = 0; i < job.streams; ++i) {
      grpc::ChannelArguments arguments = IngestChannelArguments();
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A separate connection.
      channels_.push_back(grpc::CreateCustomChannel(job.address, credentials, arguments));
    }
    stub_ = v1::KvIngest::NewStub(channels_[0]);
  }

  absl::Status Run(SendResult* result) {
    for (const auto& channel : channels_) {
      if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10))) {
        return absl::UnavailableError(absl::StrCat("no connection to ", job_.address));
      }
    }
    start_ = absl::Now();
    const double cpu = ProcessCpuSeconds();
    do {
      SLUICE_RETURN_IF_ERROR(Transfer(result));
    } while (absl::Now() - start_ < absl::Seconds(job_.seconds));
    result->cpu_seconds = ProcessCpuSeconds() - cpu;
    return absl::OkStatus();
  }

 private:
  absl::Status Transfer(SendResult* result) {
    const absl::Time start = absl::Now();
    std::string id(32, '0');
    if (job_.transfers) {
      SLUICE_ASSIGN_OR_RETURN(id, Reserve());
    }
    std::vector<absl::Status> ended(channels_.size());
    std::vector<std::thread> threads;
    for (size_t s = 1; s < channels_.size(); ++s) {
      threads.emplace_back([&, s] { ended[s] = Write(s, id); });
    }
    ended[0] = Write(0, id);
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : ended) SLUICE_RETURN_IF_ERROR(status);
    const bool whole = !over_;
    if (job_.transfers && whole) {
      grpc::ClientContext context;
      v1::CommitRequest request;
      v1::CommitResponse response;
      request.set_transfer_id(id);
      SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub_->Commit(&context, request, &response)));
    }
    result->seconds += absl::ToDoubleSeconds(absl::Now() - start);
    result->payload_bytes += sent_bytes_.exchange(0);
    result->messages += sent_.exchange(0);
    if (!job_.transfers) return absl::OkStatus();
    grpc::ClientContext context;
    v1::AbortRequest request;
    v1::AbortResponse response;
    request.set_transfer_id(id);
    return FromGrpcStatus(stub_->Abort(&context, request, &response));
  }

  absl::StatusOr<std::string> Reserve() {
    grpc::ClientContext context;
    v1::ReserveRequest request;
    v1::ReserveResponse response;
    v1::Manifest* manifest = request.mutable_manifest();
    manifest->set_model_fingerprint(job_.fingerprint);
    manifest->set_context_length(static_cast<uint32_t>(job_.context));
    manifest->mutable_prompt_token_ids()->Resize(job_.context, 1);
    manifest->set_max_new_tokens(1);
    SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub_->Reserve(&context, request, &response)));
    return response.transfer_id();
  }

  // Sends every message whose number is `stream` modulo the number of streams.
  absl::Status Write(size_t stream, const std::string& id) {
    grpc::ClientContext context;
    grpc::ByteBuffer response;
    const grpc::internal::RpcMethod method("/sluice.v1.KvIngest/Write",
                                           grpc::internal::RpcMethod::CLIENT_STREAMING);
    const std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> writer(
        grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(channels_[stream].get(),
                                                                      method, &context, &response));
    for (size_t i = stream; i < messages_.count(); i += channels_.size()) {
      if (job_.bytes_per_second > 0) {
        const double due = static_cast<double>(paced_bytes_) / job_.bytes_per_second;
        absl::SleepFor(start_ + absl::Seconds(due) - absl::Now());
        if (absl::Now() - start_ >= absl::Seconds(job_.seconds)) {
          over_ = true;
          break;
        }
      }
      if (!writer->Write(messages_.Serialise(i, id))) break;
      paced_bytes_ += messages_.payload_bytes(i);
      sent_bytes_ += messages_.payload_bytes(i);
      ++sent_;
    }
    writer->WritesDone();
    return FromGrpcStatus(writer->Finish());
  }

  const SendJob job_;
  Messages messages_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::unique_ptr<v1::KvIngest::Stub> stub_;
  absl::Time start_;
  std::atomic<uint64_t> paced_bytes_{0}, sent_bytes_{0}, sent_{0};
  std::atomic<bool> over_{false};  // The time of a paced job is over.
};

// Runs in the child: serves one job after the other until the parent closes the socket.
[[noreturn]] void Serve(int socket) {
  std::vector<uint8_t> source(kSourceBytes);
  SplitMix64 random(1);
  for (size_t i = 0; i + 8 <= source.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(&source[i], &word, 8);
  }
  std::unique_ptr<IngestSource> held;
  const auto hold = [&](const SendJob& job, SendResult* result) -> absl::Status {
    if (held == nullptr) {
      SLUICE_ASSIGN_OR_RETURN(held, IngestSource::Start(job, source));
    }
    return held->Hold(job, result);
  };
  for (SendJob job; ReadAll(socket, &job, sizeof(job));) {
    SendResult result;
    const absl::Status status = job.hold ? hold(job, &result) : Sending(job, source).Run(&result);
    if (!status.ok()) {
      const std::string text(status.ToString());
      SetText(text, &result.error);
    }
    if (!WriteAll(socket, &result, sizeof(result))) break;
  }
  _exit(0);
}

}  // namespace

double ProcessCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

CacheLayout LayoutOf(const SendJob& job) {
  CacheKind kind;
  kind.name = job.kind;
  kind.heads = job.heads;
  kind.block_tokens = job.block_tokens;
  kind.SetEqualParts(2, job.bytes_per_token);
  return {job.layers, {kind}};
}

absl::StatusOr<std::unique_ptr<IngestSender>> IngestSender::Start() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  const pid_t process = fork();
  if (process < 0) return absl::ErrnoToStatus(errno, "fork");
  if (process == 0) {
    close(sockets[0]);
    Serve(sockets[1]);
  }
  close(sockets[1]);
  return std::unique_ptr<IngestSender>(new IngestSender(sockets[0], process));
}

IngestSender::~IngestSender() {
  close(socket_);
  waitpid(process_, nullptr, 0);
}

absl::StatusOr<SendResult> IngestSender::Send(const SendJob& job) {
  SendResult result;
  if (!WriteAll(socket_, &job, sizeof(job)) || !ReadAll(socket_, &result, sizeof(result))) {
    return absl::InternalError("the sending process has ended");
  }
  if (result.error[0] != '\0') {
    return absl::InternalError(absl::StrCat("sending failed: ", result.error));
  }
  return result;
}

double IngestSender::CpuSeconds() const {
  clockid_t clock;
  timespec time{};
  SLUICE_CHECK(clock_getcpuclockid(process_, &clock) == 0 && clock_gettime(clock, &time) == 0,
               "the sending process has ended");
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(time));
}

}  // namespace sluice::bench
