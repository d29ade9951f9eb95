// Names the files from which a node takes its certificates, and checks them before they are used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

struct x509_st;
using X509 = x509_st;

namespace sluice {

struct TlsFiles {
  std::string cert;  // PEM: this node's certificate, then those that issued it; empty: no TLS
  std::string key;   // PEM: the certificate's private key, without a passphrase
  // PEM: the authorities that issue the certificates of callers and of the nodes that this one
  // calls. Empty: callers are not asked for a certificate, and the system's own list must know the
  // nodes that are called.
  std::string ca;
  bool require_client_certificate = true;  // false: callers may come with a token instead
  // How often the node looks whether the files have changed.
  absl::Duration reload = absl::Seconds(10);
  bool enabled() const { return !cert.empty(); }
};

// Returns OK if a server can start with the files: the PEM can be read, the key belongs to the
// certificate, and the certificate is valid now. The error names the file and never has its text.
absl::Status CheckTlsFiles(const TlsFiles& files);

// Returns the names that a certificate gives its owner: "cn:", "dns:", "uri:" or "email:" and the
// name, from its subject and its subject alternative names. Names with a zero byte are left out.
std::vector<std::string> IdentitiesOf(X509* certificate);

// Returns a text that tells versions of the file apart. Empty if the file is not there.
std::string FileVersion(const std::string& path);

// Returns whether only this machine reaches the host: 127.0.0.0/8, ::1, localhost.
bool IsLoopback(const std::string& host);

}  // namespace sluice
