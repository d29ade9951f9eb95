// SHA-256, by OpenSSL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace sluice {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(const void* data, size_t bytes);
  // 64 hexadecimal digits, of everything since the object was made. Once.
  std::string Hex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace sluice
