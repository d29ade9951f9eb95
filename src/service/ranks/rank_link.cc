#include "src/service/ranks/rank_link.h"

#include <grpcpp/grpcpp.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "sluice/v1/ranks.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/access/credentials.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ranks/far_memory.h"
#include "src/service/ranks/rank_roster.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/host_port.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// The largest message: a plan of any length, or caches. Both ends are of one node.
constexpr uint64_t kMaxMessageBytes = uint64_t{256} << 20;
// A link that ends waits this long for the others to take its last words.
constexpr absl::Duration kLeave = absl::Seconds(2);
// A rank that rank 0 cannot take in yet, since it ends itself or is not there, asks again.
constexpr absl::Duration kAskAgain = absl::Milliseconds(200);

// Both ends share this.
class Link : public RankLink {
 public:
  explicit Link(const Options& options)
      : options_(options),
        roster_({options.rank, options.size, options.leader,
                 options.host.empty() ? HostName() : options.host, options.version,
                 options.deadline, options.still_limit}) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  void EndWith(const RankGroup* group) override { roster_.EndWith(group); }
  absl::Status Send(absl::Span<const uint8_t> message) override { return roster_.Send(message); }
  absl::StatusOr<absl::Span<const uint8_t>> Receive() override {
    SLUICE_RETURN_IF_ERROR(roster_.Receive(&message_));
    return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(message_.data()), message_.size());
  }
  uint32_t sent() const override { return roster_.sent(); }
  void Done() override { roster_.Done(); }
  absl::Status AwaitDone(uint32_t messages) override { return roster_.AwaitDone(messages); }
  void Show(uint32_t number) override { roster_.Show(number); }
  uint32_t Shown(int rank) const override { return roster_.Shown(rank); }
  absl::Status Meet(absl::Duration timeout) override { return roster_.Meet(timeout); }
  void Report(absl::Span<const uint8_t> bytes) override { roster_.Report(bytes); }
  std::optional<std::vector<uint8_t>> ReportOf(int rank) const override {
    return roster_.ReportOf(rank);
  }

  absl::Status Share(absl::Span<uint8_t> bytes, absl::Duration timeout) override {
    return roster_.Share(bytes, timeout);
  }
  void Part(absl::Duration timeout) override { roster_.Part(timeout); }
  bool OneHost() const override { return roster_.OneHost(); }
  int Alive() const override { return roster_.Alive(); }
  // The roster looks by itself.
  absl::Status Look(absl::Duration /*still_limit*/) override { return roster_.failure(); }
  absl::Status Fail(const absl::Status& why) override { return roster_.Fail(why); }
  absl::Status failure() const override { return roster_.failure(); }

 protected:
  // Sends what there is to say to a rank until there is nothing more.
  template <typename Stream>
  void SayAll(int other, Stream* stream) {
    v1::RankMessage message;
    while (roster_.Next(other, &message) && stream->Write(message)) {
    }
  }

  const Options options_;
  RankRoster roster_;

 private:
  std::string message_;  // received last
};

// ---- Rank 0 ----

class Leader final : public Link {
 public:
  explicit Leader(const Options& options)
      : Link(options),
        far_(options.size,
             [this](int rank) {
               return roster_.FailAfterLastWords(
                   RankLost(rank, absl::StrCat("of '", options_.leader, "' takes no more caches")));
             }),
        claims_(options.size, [this](int rank) {
          return roster_.FailAfterLastWords(RankLost(
              rank, absl::StrCat("of '", options_.leader, "' ended while a chunk came to it")));
        }) {
    roster_.OnFailure([this] { far_.End(); });
  }
  ~Leader() override {
    roster_.Leave(kLeave);
    far_.End();
    if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
    server_.reset();
    roster_.OnFailure(nullptr);
  }

  absl::Status Start() {
    GrpcServer::Options server;
    SLUICE_ASSIGN_OR_RETURN(HostPort at, ParseHostPort(options_.leader));
    if (!IsLoopback(at.host)) at.host = "::";
    server.listen = at.ToString();
    server.tls = options_.tls;
    server.access = options_.access;
    server.access_log = options_.access_log;
    server.max_receive_message_bytes = kMaxMessageBytes;
    absl::StatusOr<std::unique_ptr<GrpcServer>> started = GrpcServer::Start(
        server, {{v1::RankService::service_full_name(), std::make_shared<Service>(this)}});
    if (!started.ok()) return WithMessagePrefix(started.status(), "leader");
    server_ = *std::move(started);
    return roster_.AwaitAll(options_.join_timeout);
  }

  FarHeads* far() override { return &far_; }
  ChunkClaims* claims() override { return &claims_; }
  std::string IngestAddress(int rank) override { return far_.IngestAddress(rank); }
  absl::StatusOr<std::unique_ptr<Landing>> LandIn(const PagePool& /*pool*/,
                                                  const std::string& /*ingest_address*/) override {
    SLUICE_CHECK(false, "rank 0 writes to its own pool");
    return nullptr;
  }
  std::unique_ptr<ClaimCall> NewClaimCall() override {
    SLUICE_CHECK(false, "rank 0 has the transfers itself");
    return nullptr;
  }

 private:
  // Its calls keep a thread each, which is what waits on them. The other services of a node have
  // threads of gRPC's, so these go on when all of those wait for a rank.
  class Service final : public v1::RankService::Service {
   public:
    explicit Service(Leader* leader) : leader_(leader) {}

   private:
    grpc::Status Join(grpc::ServerContext* /*context*/,
                      grpc::ServerReaderWriter<v1::RankMessage, v1::RankMessage>* stream) override {
      return ToGrpcStatus(Guarded("Join", [&] { return leader_->Serve(stream); }));
    }
    grpc::Status Land(grpc::ServerContext* context, FarMemory::Stream* stream) override {
      return ToGrpcStatus(Guarded("Land", [&] { return leader_->far_.Serve(context, stream); }));
    }
    grpc::Status Claim(grpc::ServerContext* context, ChunkClaims::Stream* stream) override {
      return ToGrpcStatus(
          Guarded("Claim", [&] { return leader_->claims_.Serve(context, stream); }));
    }
    Leader* const leader_;
  };

  absl::Status Serve(grpc::ServerReaderWriter<v1::RankMessage, v1::RankMessage>* stream) {
    v1::RankMessage message;
    if (!stream->Read(&message)) return absl::CancelledError("no rank joins by this call");
    SLUICE_RETURN_IF_ERROR(roster_.Admit(message.hello()));
    const int other = static_cast<int>(message.hello().rank());
    std::thread says([&] { SayAll(other, stream); });
    while (stream->Read(&message)) roster_.Take(other, message);
    roster_.Ended(other, absl::OkStatus());
    says.join();
    roster_.Forget(other);
    return absl::OkStatus();
  }

  FarMemory far_;
  ChunkClaims claims_;
  std::unique_ptr<GrpcServer> server_;
};

// ---- The other ranks ----

class Follower final : public Link {
 public:
  explicit Follower(const Options& options)
      : Link(options),
        // A rank must not outlive its node for want of an answer, and messages may be large.
        channels_(NewChannelCredentials(options.tls), kMaxMessageBytes) {
    roster_.OnFailure([this] { EndClaims(); });
  }
  ~Follower() override {
    roster_.OnFailure(nullptr);
    if (stream_ == nullptr) return;
    roster_.Leave(kLeave);
    context_->TryCancel();
    hears_.join();
    says_.join();
  }

  absl::Status Start() {
    const absl::Time give_up = absl::Now() + options_.join_timeout;
    absl::Status status;
    do {
      status = Ask(give_up);
      if (!absl::IsUnavailable(status) && !absl::IsCancelled(status)) break;
      absl::SleepFor(std::clamp(give_up - absl::Now(), absl::ZeroDuration(), kAskAgain));
    } while (absl::Now() < give_up && !told_why_);
    SLUICE_RETURN_IF_ERROR(status);
    says_ = std::thread([this] {
      SayAll(0, stream_.get());
      stream_->WritesDone();
    });
    hears_ = std::thread([this] {
      v1::RankMessage message;
      while (stream_->Read(&message)) roster_.Take(0, message);
      roster_.Ended(0, FromGrpcStatus(stream_->Finish()));
      EndClaims();
    });
    return absl::OkStatus();
  }

  FarHeads* far() override {
    SLUICE_CHECK(false, "rank 0 alone writes to others");
    return nullptr;
  }
  ChunkClaims* claims() override {
    SLUICE_CHECK(false, "rank 0 alone has the transfers");
    return nullptr;
  }
  std::string IngestAddress(int /*rank*/) override {
    SLUICE_CHECK(false, "rank 0 alone tells senders");
    return "";
  }
  absl::StatusOr<std::unique_ptr<Landing>> LandIn(const PagePool& pool,
                                                  const std::string& ingest_address) override;
  std::unique_ptr<ClaimCall> NewClaimCall() override {
    absl::MutexLock lock(&claims_mutex_);
    auto call = std::make_unique<ClaimCall>(
        rank(), channels_.Get(options_.leader, 2), [this] { return roster_.Landed(); },
        [this] { return roster_.failure(); },
        [this](ClaimCall* gone) {
          absl::MutexLock forgetting(&claims_mutex_);
          claim_calls_.erase(gone);
        });
    if (claims_ended_) call->Cancel();
    claim_calls_.insert(call.get());
    return call;
  }

 private:
  // Nobody answers claims any more, and whoever waits for an answer is to know.
  void EndClaims() {
    absl::MutexLock lock(&claims_mutex_);
    claims_ended_ = true;
    for (ClaimCall* const call : claim_calls_) call->Cancel();
  }

  using Stream = grpc::ClientReaderWriter<v1::RankMessage, v1::RankMessage>;
  // Asks rank 0 once to be taken in, and waits for its welcome.
  absl::Status Ask(absl::Time give_up) {
    const std::shared_ptr<grpc::Channel> channel = channels_.Get(options_.leader);
    const auto late = [&] {
      return RankLost(0, absl::StrCat("of '", options_.leader, "' did not start within ",
                                      absl::FormatDuration(options_.join_timeout),
                                      ": rank_transport and TLS are to be the same on every rank"));
    };
    if (!channel->WaitForConnected(absl::ToChronoTime(give_up))) return late();
    auto context = std::make_unique<grpc::ClientContext>();
    const auto stub = v1::RankService::NewStub(channel);
    std::unique_ptr<Stream> stream = stub->Join(context.get());
    absl::Notification over;
    std::thread limit([&] {
      if (!over.WaitForNotificationWithDeadline(give_up)) context->TryCancel();
    });
    v1::RankMessage message;
    *message.mutable_hello() = roster_.Hello();
    absl::Status failure;
    bool welcome = false;
    stream->Write(message);  // an error shows in Finish
    while (!welcome && failure.ok() && stream->Read(&message)) {
      if (message.has_failure()) {
        failure = WithReason(absl::Status(static_cast<absl::StatusCode>(message.failure().code()),
                                          message.failure().message()),
                             reasons::kRankLost);
      }
      welcome = message.has_welcome();
    }
    over.Notify();
    limit.join();
    if (welcome) {
      roster_.Welcomed(message.welcome());
      roster_.Take(0, message);
      context_ = std::move(context);
      stream_ = std::move(stream);
      return absl::OkStatus();
    }
    told_why_ = !failure.ok();
    if (told_why_) context->TryCancel();
    const absl::Status end = FromGrpcStatus(stream->Finish());
    if (told_why_) return failure;
    return absl::Now() >= give_up ? late() : end.ok() ? absl::UnavailableError("rank 0 ends") : end;
  }

  Channels channels_;
  bool told_why_ = false;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Stream> stream_;
  absl::Mutex claims_mutex_;
  std::set<ClaimCall*> claim_calls_ ABSL_GUARDED_BY(claims_mutex_);
  bool claims_ended_ ABSL_GUARDED_BY(claims_mutex_) = false;
  std::thread says_, hears_;
};

// Lands what comes, on a thread of its own.
class LandingThread final : public RankLink::Landing {
 public:
  LandingThread(const std::shared_ptr<grpc::Channel>& channel, const PagePool& pool,
                RankRoster* roster)
      : pool_(pool),
        roster_(*roster),
        stream_(v1::RankService::NewStub(channel)->Land(&context_)) {}
  ~LandingThread() override {
    context_.TryCancel();
    if (!thread_.joinable()) return;
    thread_.join();
    stream_->Finish();
  }

  absl::Status Open(int rank, const std::string& ingest_address) {
    v1::LandAnswer hello;
    hello.set_rank(static_cast<uint32_t>(rank));
    hello.set_ingest_address(ingest_address);
    v1::LandRequest open;
    if (!stream_->Write(hello) || !stream_->Read(&open)) {
      const absl::Status status = FromGrpcStatus(stream_->Finish());
      return RankLost(0, absl::StrCat("opens no way for caches: ", status.message()));
    }
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

 private:
  void Run() {
    v1::LandRequest request;
    while (stream_->Read(&request)) {
      const absl::StatusOr<v1::LandAnswer> answer = Land(request, pool_);
      if (!answer.ok()) {
        roster_.Fail(answer.status()).IgnoreError();
        return;
      }
      // The engine's thread reads the bytes after it has read a plan from the roster. Its lock is
      // between the two.
      if (!roster_.Landed() || !stream_->Write(*answer)) return;
    }
  }

  const PagePool& pool_;
  RankRoster& roster_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::LandAnswer, v1::LandRequest>> stream_;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<RankLink::Landing>> Follower::LandIn(
    const PagePool& pool, const std::string& ingest_address) {
  auto landing = std::make_unique<LandingThread>(channels_.Get(options_.leader, 1), pool, &roster_);
  SLUICE_RETURN_IF_ERROR(landing->Open(rank(), ingest_address));
  return landing;
}

template <typename Side>
absl::StatusOr<std::unique_ptr<RankLink>> Started(const RankLink::Options& options) {
  auto side = std::make_unique<Side>(options);
  SLUICE_RETURN_IF_ERROR(side->Start());
  return side;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankLink>> RankLink::Join(const Options& options) {
  return options.rank == 0 ? Started<Leader>(options) : Started<Follower>(options);
}

std::string RankLink::HostName() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat shared {};
  return stat("/dev/shm", &shared) == 0 ? absl::StrCat(boot, ":", shared.st_dev) : boot;
}

}  // namespace sluice
