#include "src/service/ingest/rank_pushers.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

RankPushers::RankPushers(v1::KvIngest::Stub* stub, KvPusher::Options options, const Ports& ports,
                         const ChannelTo& channel_to)
    : stub_(stub), options_(std::move(options)) {
  if (channel_to == nullptr) return;
  for (const v1::RankPort& port : ports) {
    std::shared_ptr<grpc::Channel> channel = channel_to(port.address());
    std::unique_ptr<v1::KvIngest::Stub> made = v1::KvIngest::NewStub(channel);
    ports_.push_back({{port.head_begin(), port.head_end()},
                      port.address(),
                      std::move(channel),
                      std::move(made)});
  }
  std::sort(ports_.begin(), ports_.end(),
            [](const Route& a, const Route& b) { return a.heads.begin < b.heads.begin; });
}

KvPusher* RankPushers::PusherOf(Route& route) {
  if (route.pusher == nullptr) {
    KvPusher::Options options = options_;
    if (!ports_.empty()) options.links = nullptr;  // nodes of several ranks have none
    options.rank_stub = route.stub.get();
    options.rank_channel = route.channel;
    options.rank_address = route.address;
    route.pusher = std::make_unique<KvPusher>(stub_, std::move(options));
  }
  return route.pusher.get();
}

absl::Status RankPushers::Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                                absl::Span<const absl::Span<const uint8_t>> pieces) {
  const auto heads = static_cast<uint32_t>(kind.heads);
  uint32_t next = 0;  // heads before it are sent
  const auto send = [&](Route& route, HeadRange range) {
    return PusherOf(route)->Layer(layer, kind, token_begin, token_end, pieces, range);
  };
  for (Route& port : ports_) {
    const HeadRange range = {std::max(port.heads.begin, next), std::min(port.heads.end, heads)};
    if (range.begin >= range.end) continue;
    if (range.begin > next) SLUICE_RETURN_IF_ERROR(send(own_, {next, range.begin}));
    SLUICE_RETURN_IF_ERROR(send(port, range));
    next = range.end;
  }
  return next < heads ? send(own_, {next, heads}) : absl::OkStatus();
}

bool RankPushers::OnDevice() { return ports_.empty() && PusherOf(own_)->OnDevice(); }

absl::StatusOr<bool> RankPushers::LayerOnDevice(
    int layer, const CacheKind& kind, int token_begin, int token_end,
    absl::Span<const absl::Span<const uint8_t>> pieces) {
  return PusherOf(own_)->LayerOnDevice(layer, kind, token_begin, token_end, pieces);
}

absl::StatusOr<bool> RankPushers::FlushDevice() { return PusherOf(own_)->FlushDevice(); }

template <typename End>
absl::Status RankPushers::EndAll(End end) {
  absl::Status first;
  if (own_.pusher != nullptr) first.Update(end(*own_.pusher));
  for (Route& port : ports_) {
    if (port.pusher != nullptr) first.Update(end(*port.pusher));
  }
  return first;
}

absl::Status RankPushers::Finish() {
  return EndAll([](KvPusher& pusher) { return pusher.Finish(); });
}

absl::Status RankPushers::Abandon() {
  return EndAll([](KvPusher& pusher) { return pusher.Abandon(); });
}

uint64_t RankPushers::bytes_sent() const {
  uint64_t bytes = own_.pusher == nullptr ? 0 : own_.pusher->bytes_sent();
  for (const Route& port : ports_) bytes += port.pusher == nullptr ? 0 : port.pusher->bytes_sent();
  return bytes;
}

uint64_t RankPushers::bytes_by_link() const {
  return own_.pusher == nullptr ? 0 : own_.pusher->bytes_by_link();
}

std::optional<LinkUse> RankPushers::link_use() const {
  return own_.pusher == nullptr ? std::nullopt : own_.pusher->link_use();
}

absl::Time RankPushers::first_sent() const {
  absl::Time first = own_.pusher == nullptr ? absl::InfiniteFuture() : own_.pusher->first_sent();
  for (const Route& port : ports_) {
    if (port.pusher != nullptr) first = std::min(first, port.pusher->first_sent());
  }
  return first;
}

}  // namespace sluice
