// A gRPC service in the form in which the programs pass it on, free of generated headers.
#pragma once

#include <memory>
#include <string>

namespace grpc {
class Service;
}

namespace sluice {

struct GrpcService {
  std::string name;  // "sluice.v1.Decode", which health checks name
  std::shared_ptr<grpc::Service> service;
};

}  // namespace sluice
