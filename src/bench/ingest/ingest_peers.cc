#include "src/bench/ingest/ingest_peers.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

class Peer final : public v1::KvIngest::WithRawCallbackMethod_Write<v1::KvIngest::Service> {
 public:
  explicit Peer(absl::Span<uint8_t> target) : target_(target) {}

  grpc::ServerReadReactor<grpc::ByteBuffer>* Write(grpc::CallbackServerContext*,
                                                   grpc::ByteBuffer* response) override {
    const grpc::Slice nothing;  // An empty WriteResponse.
    *response = grpc::ByteBuffer(&nothing, 1);
    return new Reactor(this);  // Deletes itself.
  }

 private:
  class Reactor : public grpc::ServerReadReactor<grpc::ByteBuffer> {
   public:
    explicit Reactor(Peer* peer) : peer_(peer) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) {
        Finish(grpc::Status::OK);
        return;
      }
      peer_->Take(&message_);
      message_.Clear();
      StartRead(&message_);
    }
    void OnDone() override { delete this; }

   private:
    Peer* const peer_;
    grpc::ByteBuffer message_;
  };

  void Take(grpc::ByteBuffer* message) {
    if (target_.empty()) return;
    const size_t bytes = message->Length();
    SLUICE_CHECK(bytes < target_.size());
    uint8_t* to = target_.data() + next_.fetch_add(bytes) % (target_.size() - bytes);
    grpc::ProtoBufferReader reader(message);
    const void* data = nullptr;
    int size = 0;
    while (reader.Next(&data, &size)) {
      std::memcpy(to, data, static_cast<size_t>(size));
      to += size;
    }
  }

  const absl::Span<uint8_t> target_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace

GrpcService NewDiscardPeer() { return NewCopyPeer({}); }

GrpcService NewCopyPeer(absl::Span<uint8_t> target) {
  return {v1::KvIngest::service_full_name(), std::make_shared<Peer>(target)};
}

}  // namespace sluice::bench
