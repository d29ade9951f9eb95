#include "src/base/sha256.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "src/base/status_macros.h"

namespace sluice {

struct Sha256::Context {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> evp{EVP_MD_CTX_new(), EVP_MD_CTX_free};
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  SLUICE_CHECK(EVP_DigestInit_ex(context_->evp.get(), EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;

void Sha256::Update(const void* data, size_t bytes) {
  SLUICE_CHECK(EVP_DigestUpdate(context_->evp.get(), data, bytes) == 1);
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  SLUICE_CHECK(EVP_DigestFinal_ex(context_->evp.get(), digest, &size) == 1);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), size});
}

std::string Sha256Hex(std::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes.data(), bytes.size());
  return sha.Hex();
}

}  // namespace sluice
