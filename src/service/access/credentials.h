// gRPC credentials from a node's certificates. The files are read again when they change: new
// connections get the new ones, streams that run are not touched.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "src/service/access/tls_files.h"

namespace sluice {

class Access;
class AccessLog;

// Without TLS: insecure. `access` (with TLS alone) is asked for every call; what it refuses is
// written into `log` (null: none is kept). Both outlive the server.
std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsFiles& files,
                                                              const Access* access, AccessLog* log);
// For calls to other nodes, which see this node's certificate.
std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsFiles& files);

}  // namespace sluice
