#include "src/service/grpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/service/access_log.h"
#include "src/service/credentials.h"
#include "src/service/host_port.h"
#include "src/service/malformed_messages.h"

namespace sluice {

void RouteLibraryLogs() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    Log(LogLevel::kDebug, "grpc",
        {{"file", args->file}, {"line", args->line}, {"text", args->message}});
  });
  google::protobuf::SetLogHandler(
      [](google::protobuf::LogLevel, const char* file, int line, const std::string& message) {
        Log(LogLevel::kDebug, "protobuf", {{"file", file}, {"line", line}, {"text", message}});
      });
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options,
                                                              std::vector<GrpcService> services) {
  SLUICE_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(options.listen));
  static const bool plugins = [] {
    grpc::EnableDefaultHealthCheckService(true);
    // Names the plugin, so that the linker keeps it.
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)plugins;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address.ToString(),
                           NewServerCredentials(options.tls, options.access, options.access_log),
                           &port);
  for (const GrpcService& service : services) builder.RegisterService(service.service.get());
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<uint64_t>(options.max_receive_message_bytes, INT_MAX)));
  // Two processes on one port would share its calls at random.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  // Finds peers that vanished without a word; clients may ping as often as every 10 s.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  grpc::ResourceQuota quota("sluice");
  quota.Resize(options.max_buffer_bytes);
  builder.SetResourceQuota(quota);
  // Messages are taken uncompressed alone: gRPC unpacks before it looks at the size, so that 1 MiB
  // on the wire could become 1 GiB here. A compressed one is UNIMPLEMENTED, as the protocol has it.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // A peer that connects and does not speak HTTP/2, or stops in the middle of a TLS handshake.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
  // Of one call; more ends with RESOURCE_EXHAUSTED.
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(NewMalformedMessages());
  if (options.access_log != nullptr)
    interceptors.push_back(NewAccessRecorder(options.access_log, options.access));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.ToString(), ": ", WhyCannotListen(address)));
  }
  address.port = static_cast<uint16_t>(port);
  std::unique_ptr<GrpcServer> out(
      new GrpcServer(std::move(services), std::move(server), address.ToString()));
  out->SetServing(false);
  return out;
}

GrpcServer::GrpcServer(std::vector<GrpcService> services, std::unique_ptr<grpc::Server> server,
                       std::string address)
    : services_(std::move(services)), server_(std::move(server)), address_(std::move(address)) {}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  SLUICE_CHECK(health != nullptr);
  health->SetServingStatus("", serving);
  for (const GrpcService& service : services_) health->SetServingStatus(service.name, serving);
}

void GrpcServer::Shutdown(absl::Duration grace) {
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
}

}  // namespace sluice
