#include "src/service/ingest/rank_ingest_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/service/access/caller.h"
#include "src/service/ingest/claimed_writes.h"
#include "src/service/ingest/write_stream.h"
#include "src/service/ranks/rank_link.h"

namespace sluice {
namespace {

class RankIngestService final
    : public v1::KvIngest::WithRawCallbackMethod_Write<v1::KvIngest::Service> {
 public:
  explicit RankIngestService(const RankIngestOptions& options) : options_(options) {}

  grpc::ServerReadReactor<grpc::ByteBuffer>* Write(grpc::CallbackServerContext* context,
                                                   grpc::ByteBuffer* response) override {
    return NewWriteStream(
        context, response,
        std::make_unique<ClaimedWrites>(options_.link, options_.pool,
                                        CallerOf(options_.access, *context).tenant));
  }
  grpc::Status Reserve(grpc::ServerContext* /*context*/, const v1::ReserveRequest* /*request*/,
                       v1::ReserveResponse* /*response*/) override {
    return AtRankZero("Reserve");
  }
  grpc::Status Commit(grpc::ServerContext* /*context*/, const v1::CommitRequest* /*request*/,
                      v1::CommitResponse* /*response*/) override {
    return AtRankZero("Commit");
  }
  grpc::Status Abort(grpc::ServerContext* /*context*/, const v1::AbortRequest* /*request*/,
                     v1::AbortResponse* /*response*/) override {
    return AtRankZero("Abort");
  }
  grpc::Status GetTransfer(grpc::ServerContext* /*context*/,
                           const v1::GetTransferRequest* /*request*/,
                           v1::GetTransferResponse* /*response*/) override {
    return AtRankZero("GetTransfer");
  }

 private:
  grpc::Status AtRankZero(const char* call) const {
    return {grpc::StatusCode::UNIMPLEMENTED,
            absl::StrCat("rank ", options_.link->rank(), " of a node serves Write alone: call ",
                         call, " of rank 0 at ", options_.rank_zero)};
  }
  const RankIngestOptions options_;
};

}  // namespace

GrpcService NewRankIngestService(const RankIngestOptions& options) {
  return {v1::KvIngest::service_full_name(), std::make_shared<RankIngestService>(options)};
}

}  // namespace sluice
