// Makes gRPC credentials from a node's certificates. The files are read again when they change: new
// connections get the new certificates, and running streams are not touched.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "src/service/access/tls_files.h"

namespace sluice {

class Access;
class AccessLog;

// Returns insecure credentials if the node has no TLS. With TLS, `access` is asked about every
// call, and a refused call is written into `log`, which is null if no log is kept. Both outlive the
// server.
std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsFiles& files,
                                                              const Access* access, AccessLog* log);
// Returns credentials for calls to other nodes, which see this node's certificate.
std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsFiles& files);

}  // namespace sluice
