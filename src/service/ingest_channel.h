// How a prefill node's connections to decode nodes are set up.
#pragma once

#include <grpcpp/support/channel_arguments.h>

namespace sluice {

grpc::ChannelArguments IngestChannelArguments();

}  // namespace sluice
