// SHA-256, computed by OpenSSL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace sluice {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(const void* data, size_t bytes);
  // Returns what Sha256Hex returns, for all data since the object was made. Call it once.
  std::string Hex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

// Returns the hash as 64 hexadecimal digits, in lower case.
std::string Sha256Hex(std::string_view bytes);

}  // namespace sluice
