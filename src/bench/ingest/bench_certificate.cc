#include "src/bench/ingest/bench_certificate.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdlib.h>

#include <cstdio>
#include <fstream>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace sluice::bench {
namespace {

constexpr long kDaySeconds = 24L * 3600;

struct Free {
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(X509_EXTENSION* extension) const { X509_EXTENSION_free(extension); }
  void operator()(std::FILE* file) const { std::fclose(file); }
};

bool Write(const std::string& path, const auto& write) {
  const std::unique_ptr<std::FILE, Free> file(std::fopen(path.c_str(), "wx"));
  return file != nullptr && write(file.get()) == 1;
}

bool AddExtension(X509* certificate, int kind, const char* value) {
  const std::unique_ptr<X509_EXTENSION, Free> extension(
      X509V3_EXT_conf_nid(nullptr, nullptr, kind, value));
  return extension != nullptr && X509_add_ext(certificate, extension.get(), -1) == 1;
}

}  // namespace

absl::StatusOr<std::string> MakeBenchCertificate() {
  std::string folder = "/tmp/sluice-bench.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot create the folder ", folder));
  }
  const std::unique_ptr<EVP_PKEY, Free> key(EVP_EC_gen("P-256"));
  const std::unique_ptr<X509, Free> certificate(X509_new());
  bool good = key != nullptr && certificate != nullptr;
  if (good) {
    X509* c = certificate.get();
    X509_NAME* name = X509_get_subject_name(c);
    good = X509_set_version(c, X509_VERSION_3) == 1 &&
           ASN1_INTEGER_set(X509_get_serialNumber(c), 1) == 1 &&
           X509_gmtime_adj(X509_getm_notBefore(c), 0) != nullptr &&
           X509_gmtime_adj(X509_getm_notAfter(c), kDaySeconds) != nullptr &&
           X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                                      reinterpret_cast<const unsigned char*>("bench"), -1, -1,
                                      0) == 1 &&
           X509_set_issuer_name(c, name) == 1 && X509_set_pubkey(c, key.get()) == 1 &&
           AddExtension(c, NID_subject_alt_name, "IP:127.0.0.1") &&
           AddExtension(c, NID_basic_constraints, "critical,CA:TRUE") &&
           X509_sign(c, key.get(), EVP_sha256()) != 0;
  }
  const TlsFiles files = BenchTlsFiles(folder);
  good = good && Write(files.cert,
                       [&](std::FILE* file) { return PEM_write_X509(file, certificate.get()); });
  good = good && Write(files.key, [&](std::FILE* file) {
           return PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
         });
  std::ofstream(BenchAccessFile(folder))
      << R"({"certificates": [{"identity": "cn:bench", "roles": ["prefill", "decode"]}]})";
  if (!good) return absl::InternalError("OpenSSL made no certificate");
  return folder;
}

TlsFiles BenchTlsFiles(const std::string& folder) {
  TlsFiles out;
  out.cert = absl::StrCat(folder, "/cert.pem");
  out.key = absl::StrCat(folder, "/key.pem");
  out.ca = out.cert;
  return out;
}

std::string BenchAccessFile(const std::string& folder) {
  return absl::StrCat(folder, "/access.json");
}

}  // namespace sluice::bench
