#include "src/service/grpc/channels.h"

#include <grpcpp/create_channel.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "src/service/grpc/ingest_channel.h"

namespace sluice {

Channels::Channels(std::shared_ptr<grpc::ChannelCredentials> credentials,
                   uint64_t max_receive_message_bytes)
    : credentials_(credentials != nullptr ? std::move(credentials)
                                          : grpc::InsecureChannelCredentials()),
      max_receive_message_bytes_(max_receive_message_bytes) {}

std::shared_ptr<grpc::Channel> Channels::Get(const std::string& address, int index) {
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(channels_.begin(), channels_.end(), [&](const Kept& kept) {
    return kept.address == address && kept.index == index;
  });
  if (found != channels_.end()) {
    channels_.splice(channels_.begin(), channels_, found);
    return channels_.front().channel;
  }
  channels_.push_front({address, index, New(address)});
  if (channels_.size() > kMaxChannels) channels_.pop_back();
  return channels_.front().channel;
}

std::shared_ptr<grpc::Channel> Channels::GetNew(const std::string& address) {
  {
    absl::MutexLock lock(&mutex_);
    channels_.remove_if([&](const Kept& kept) { return kept.address == address; });
  }
  return Get(address);
}

std::shared_ptr<grpc::Channel> Channels::New(const std::string& address) const {
  grpc::ChannelArguments arguments = IngestChannelArguments();
  // Channels with the same address and arguments would share connections, and a new channel must
  // have a new one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<uint64_t>(max_receive_message_bytes_, INT_MAX)));
  return grpc::CreateCustomChannel(address, credentials_, arguments);
}

}  // namespace sluice
