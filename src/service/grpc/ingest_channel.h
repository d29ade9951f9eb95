// How connections between nodes are set up.
#pragma once

#include <grpcpp/support/channel_arguments.h>

namespace sluice {

grpc::ChannelArguments IngestChannelArguments();

}  // namespace sluice
