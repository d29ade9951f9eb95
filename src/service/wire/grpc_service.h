// A gRPC service as the mains handle it, free of generated headers.
#pragma once

#include <memory>
#include <string>

namespace grpc {
class Service;
}

namespace sluice {

struct GrpcService {
  std::string name;  // "sluice.v1.Decode": what health checks ask for
  std::shared_ptr<grpc::Service> service;
};

}  // namespace sluice
