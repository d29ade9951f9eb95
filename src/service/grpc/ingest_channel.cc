#include "src/service/grpc/ingest_channel.h"

namespace sluice {

grpc::ChannelArguments IngestChannelArguments() {
  grpc::ChannelArguments arguments;
  // Other nodes are neighbours: there is no proxy, and a restarted node is found again soon.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Messages must come uncompressed, as at GrpcServer: gRPC unpacks before it looks at the size.
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  return arguments;
}

}  // namespace sluice
