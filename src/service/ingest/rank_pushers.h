// Pushes a prompt's caches into a decode node whose ranks may have ports of their own
// (ReserveResponse.rank_ports): a KvPusher for each port that some heads go to, and one for the
// node's own address.
#pragma once

#include <google/protobuf/repeated_ptr_field.h>
#include <grpcpp/channel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/service/ingest/kv_pusher.h"

namespace sluice {

class RankPushers {
 public:
  using Ports = google::protobuf::RepeatedPtrField<v1::RankPort>;
  using ChannelTo = std::function<std::shared_ptr<grpc::Channel>(const std::string& address)>;
  // `stub` is of the node's own address, which takes the heads that no port takes. `options` are
  // those of every pusher. With no `channel_to`, everything goes to the node's own address.
  RankPushers(v1::KvIngest::Stub* stub, KvPusher::Options options, const Ports& ports,
              const ChannelTo& channel_to);

  // These do what those of KvPusher do, with all of them. Of several errors the first counts.
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces);
  // Where ranks have ports, nothing is sent on the device.
  bool OnDevice();
  absl::StatusOr<bool> LayerOnDevice(int layer, const CacheKind& kind, int token_begin,
                                     int token_end,
                                     absl::Span<const absl::Span<const uint8_t>> pieces);
  absl::StatusOr<bool> FlushDevice();
  absl::Status Finish();
  absl::Status Abandon();
  uint64_t bytes_sent() const;
  uint64_t bytes_by_link() const;
  std::optional<LinkUse> link_use() const;
  absl::Time first_sent() const;

 private:
  struct Route {
    HeadRange heads;
    std::string address;
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::KvIngest::Stub> stub;
    std::unique_ptr<KvPusher> pusher = nullptr;  // made for the first chunk
  };
  KvPusher* PusherOf(Route& route);
  template <typename End>
  absl::Status EndAll(End end);

  v1::KvIngest::Stub* const stub_;
  const KvPusher::Options options_;
  std::vector<Route> ports_;  // in the order of their heads
  Route own_;                 // without a stub
};

}  // namespace sluice
