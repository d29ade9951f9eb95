// Keeps connections to other nodes: channels by address, with this node's credentials.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

// Keeps the channels that were used last. A channel that is dropped lives on while a call has it.
// Thread-safe.
class Channels {
 public:
  // `credentials` is null without TLS. An answer of more than `max_receive_message_bytes` ends its
  // call with RESOURCE_EXHAUSTED.
  explicit Channels(std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr,
                    uint64_t max_receive_message_bytes = uint64_t{4} << 20);
  // Returns a channel to `address`. Each `index` has its own connection, for streams that would
  // fill one.
  std::shared_ptr<grpc::Channel> Get(const std::string& address, int index = 0);
  // Returns a channel with a new connection to `address`, which replaces all that are kept. Call it
  // after one failed.
  std::shared_ptr<grpc::Channel> GetNew(const std::string& address);

 private:
  static constexpr size_t kMaxChannels = 64;
  std::shared_ptr<grpc::Channel> New(const std::string& address) const;

  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const uint64_t max_receive_message_bytes_;
  absl::Mutex mutex_;
  struct Kept {
    std::string address;
    int index = 0;
    std::shared_ptr<grpc::Channel> channel;
  };
  std::list<Kept> channels_ ABSL_GUARDED_BY(mutex_);  // the channel used last comes first
};

}  // namespace sluice
