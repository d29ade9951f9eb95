#include "src/service/grpc/grpc_server.h"

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
#include "src/metrics/metrics.h"
#include "src/service/access/call_recorder.h"
#include "src/service/access/credentials.h"
#include "src/service/grpc/connection_gate.h"
#include "src/service/grpc/malformed_messages.h"
#include "src/service/wire/host_port.h"

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
    // The call names the plugin, so that the linker keeps it.
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)plugins;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<ConnectionGate> gate,
                          ConnectionGate::Bind(address, options.connections));
  grpc::ServerBuilder builder;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          NewServerCredentials(options.tls, options.access, options.access_log));
  for (const GrpcService& service : services) builder.RegisterService(service.service.get());
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<uint64_t>(options.max_receive_message_bytes, INT_MAX)));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  // Keepalive finds peers that vanished without a word. Clients may ping as often as every 10 s.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  grpc::ResourceQuota quota("sluice");
  quota.Resize(options.max_buffer_bytes);
  builder.SetResourceQuota(quota);
  // The server takes only uncompressed messages. gRPC unpacks before it looks at the size, so that
  // 1 MiB on the wire could become 1 GiB here. A compressed message is UNIMPLEMENTED, as the
  // protocol has it.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // The timeout ends a peer that connects and does not speak HTTP/2, or stops in the middle of a
  // TLS handshake.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
  // The limit is for one call; more metadata ends it with RESOURCE_EXHAUSTED.
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(NewMalformedMessages());
  if (options.access_log != nullptr || options.tracer != nullptr) {
    interceptors.push_back(NewCallRecorder({options.access_log, options.tracer}, options.access));
  }
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::InternalError("gRPC cannot start a server");
  address.port = gate->port();
  std::unique_ptr<GrpcServer> out(new GrpcServer(std::move(services), std::move(server),
                                                 std::move(acceptor), std::move(gate),
                                                 address.ToString()));
  out->SetServing(false);
  SLUICE_RETURN_IF_ERROR(out->gate_->Start([acceptor = out->acceptor_.get()](int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = fd;
    acceptor->HandleNewConnection(&connection);
  }));
  return out;
}

GrpcServer::GrpcServer(std::vector<GrpcService> services, std::unique_ptr<grpc::Server> server,
                       std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
                       std::unique_ptr<ConnectionGate> gate, std::string address)
    : services_(std::move(services)),
      server_(std::move(server)),
      acceptor_(std::move(acceptor)),
      gate_(std::move(gate)),
      address_(std::move(address)) {}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  SLUICE_CHECK(health != nullptr);
  health->SetServingStatus("", serving);
  for (const GrpcService& service : services_) health->SetServingStatus(service.name, serving);
}

void GrpcServer::UpdateMetrics(const Metrics& metrics) {
  const ConnectionGate::Counts counts = gate_->CountsNow();
  ConnectionTotals totals;
  totals.open = static_cast<double>(counts.open);
  totals.refused = {static_cast<double>(counts.refused_for_peer),
                    static_cast<double>(counts.refused), static_cast<double>(counts.failed)};
  metrics.SetConnections(totals);
}

void GrpcServer::Shutdown(absl::Duration grace) {
  gate_->Stop();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
}

}  // namespace sluice
