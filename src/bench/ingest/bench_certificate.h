// Makes a certificate for measuring mTLS between two processes of one machine: both sides present
// it, and it is its own authority.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "src/service/access/tls_files.h"

namespace sluice::bench {

// Makes cert.pem, key.pem and access.json (the certificate may ingest) in a new folder, which the
// caller removes. The certificate is ECDSA with P-256, for 127.0.0.1, and valid for a day.
absl::StatusOr<std::string> MakeBenchCertificate();

// Return the files of that folder.
TlsFiles BenchTlsFiles(const std::string& folder);
std::string BenchAccessFile(const std::string& folder);

}  // namespace sluice::bench
