// Runs gRPC services on one address, with grpc.health.v1 and reflection beside them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/service/access/tls_files.h"
#include "src/service/grpc/connection_gate.h"
#include "src/service/wire/grpc_service.h"

namespace grpc {
class Server;
namespace experimental {
class ExternalConnectionAcceptor;
}
}  // namespace grpc

namespace sluice {

class Access;
class Metrics;

// Sends gRPC's and protobuf's own messages to our log, at debug level. A caller learns what matters
// in them from its status, and a peer that sends nonsense must not fill the log. Call once, before
// the first use of gRPC.
void RouteLibraryLogs();

class AccessLog;
class CallTracer;

class GrpcServer {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes any free one
    TlsFiles tls;
    const Access* access = nullptr;  // with TLS; outlives the server
    uint64_t max_receive_message_bytes = 4 << 20;
    int max_concurrent_streams = 4096;  // for each connection
    ConnectionGate::Options connections;
    // The maximum for all connections together, in gRPC's own buffers. gRPC gathers a message of up
    // to 4 GiB whole before it refuses its size, and at this limit it ends calls of every
    // connection, whichever filled the buffers. So the limit is only the net against running out of
    // memory. It is several times what one peer's mistake takes, and far above
    // max_receive_message_bytes times the peers that send at once.
    uint64_t max_buffer_bytes = uint64_t{8} << 30;
    AccessLog* access_log = nullptr;  // outlives the server; null if no log is kept
    // Outlives the server; null if calls are not traced.
    const CallTracer* tracer = nullptr;
  };
  // Starts a server that health checks do not call serving yet. The error is one sentence that says
  // what address cannot be listened on and why.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const Options& options,
                                                           std::vector<GrpcService> services);
  // Calls Shutdown() without grace.
  ~GrpcServer();

  // Returns the address with the port that was chosen.
  const std::string& address() const { return address_; }
  // Sets what health checks are told, for every service and for "". Thread-safe.
  void SetServing(bool serving);
  // Updates the metrics that count connections. Thread-safe.
  void UpdateMetrics(const Metrics& metrics);
  // Takes no new connections and calls. Running calls get `grace` to end and are then cancelled.
  // Returns when all have ended. Idempotent; any thread.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer(std::vector<GrpcService> services, std::unique_ptr<grpc::Server> server,
             std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor,
             std::unique_ptr<ConnectionGate> gate, std::string address);

  std::vector<GrpcService> services_;  // outlive server_
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<ConnectionGate> gate_;  // hands connections to acceptor_
  const std::string address_;
};

}  // namespace sluice
