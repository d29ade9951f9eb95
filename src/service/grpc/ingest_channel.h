// Sets up connections between nodes.
#pragma once

#include <grpcpp/support/channel_arguments.h>

namespace sluice {

grpc::ChannelArguments IngestChannelArguments();

}  // namespace sluice
