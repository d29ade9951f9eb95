#include "src/service/access/tls_files.h"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
};

absl::Status Wrong(const char* setting, const std::string& path, const std::string& what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(setting, ": ", path, " ", what));
}

absl::StatusOr<std::unique_ptr<BIO, Free>> Open(const char* setting, const std::string& path) {
  errno = 0;
  std::unique_ptr<BIO, Free> bio(BIO_new_file(path.c_str(), "rb"));
  if (bio == nullptr) {
    return Wrong(setting, path, absl::StrCat("cannot be read: ", std::strerror(errno)));
  }
  return bio;
}

absl::StatusOr<std::unique_ptr<X509, Free>> ReadCertificate(const char* setting,
                                                            const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const auto bio, Open(setting, path));
  std::unique_ptr<X509, Free> out(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (out == nullptr) return Wrong(setting, path, "has no certificate in PEM");
  return out;
}

void AddName(const char* kind, const ASN1_STRING* text, std::vector<std::string>* out) {
  const std::string name(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                         static_cast<size_t>(ASN1_STRING_length(text)));
  if (name.find('\0') == std::string::npos) out->push_back(kind + name);
}

// Makes a key with a passphrase fail instead of asking for one at a terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  SLUICE_ASSIGN_OR_RETURN(const auto certificate, ReadCertificate("tls_cert", files.cert));
  SLUICE_ASSIGN_OR_RETURN(const auto bio, Open("tls_key", files.key));
  const std::unique_ptr<EVP_PKEY, Free> key(
      PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return Wrong("tls_key", files.key, "has no private key in PEM without a passphrase");
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return Wrong("tls_key", files.key,
                 absl::StrCat("is not the key of the certificate in ", files.cert));
  }
  if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
    return Wrong("tls_cert", files.cert, "has a certificate that has expired");
  }
  if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
    return Wrong("tls_cert", files.cert, "has a certificate that is not valid yet");
  }
  if (!files.ca.empty()) SLUICE_RETURN_IF_ERROR(ReadCertificate("tls_ca", files.ca).status());
  return absl::OkStatus();
}

std::vector<std::string> IdentitiesOf(X509* certificate) {
  std::vector<std::string> out;
  X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at >= 0) AddName("cn:", X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)), &out);
  const std::unique_ptr<GENERAL_NAMES, Free> names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) AddName("dns:", name->d.dNSName, &out);
    if (name->type == GEN_URI) AddName("uri:", name->d.uniformResourceIdentifier, &out);
    if (name->type == GEN_EMAIL) AddName("email:", name->d.rfc822Name, &out);
  }
  return out;
}

std::string FileVersion(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return "";
  return absl::StrCat(info.st_dev, ".", info.st_ino, ".", info.st_size, ".", info.st_mtim.tv_sec,
                      ".", info.st_mtim.tv_nsec);
}

bool IsLoopback(const std::string& host) {
  in_addr v4 = {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  return host == "::1" || absl::EqualsIgnoreCase(host, "localhost");
}

}  // namespace sluice
