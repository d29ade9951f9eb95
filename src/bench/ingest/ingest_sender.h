// A process of its own that pushes caches into a node, or holds them for it to read, as a prefill
// node on another machine would: what it costs is not the node's.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/kv/cache_layout.h"

namespace sluice::bench {

// Puts what fits of `text`, and a zero, into `to`.
template <size_t kBytes>
void SetText(const std::string& text, char (*to)[kBytes]) {
  const size_t length = std::min(text.size(), kBytes - 1);
  std::copy_n(text.data(), length, *to);
  (*to)[length] = 0;
}

// Plain bytes: it crosses a socket between two processes of one program.
struct SendJob {
  char address[64] = {};
  // Folder of MakeBenchCertificate; empty: without TLS.
  char tls[64] = {};
  // Whether transfers are reserved, committed and aborted around the messages; false: the same
  // messages to a peer that does not look into them.
  bool transfers = false;
  // Sends nothing: a prompt is held, once, for whoever reads it at SendResult::address.
  bool hold = false;
  char fingerprint[65] = {};
  // One cache kind, of two equal parts.
  char kind[16] = {};
  int32_t layers = 0, heads = 0, block_tokens = 0;
  int64_t bytes_per_token = 0;  // of one head
  int32_t context = 0;          // tokens of a transfer
  int64_t chunk_bytes = 0;      // payload of a message at most; whole blocks of all heads
  int32_t streams = 1;          // at once, each on a connection of its own
  // One transfer as fast as it goes; or transfers at so many bytes per second for so long.
  double bytes_per_second = 0;
  double seconds = 0;
};

struct SendResult {
  double seconds = 0;      // from Reserve to the answer of Commit, or of the last Write
  double cpu_seconds = 0;  // of the sending process meanwhile
  uint64_t payload_bytes = 0;
  uint64_t messages = 0;
  char error[256] = {};
  // Of a job that holds.
  char address[64] = {};
  char source_id[33] = {};
};

// The layout that the job's fields say.
CacheLayout LayoutOf(const SendJob& job);

class IngestSender {
 public:
  // Forks. REQUIRES: this process has no other thread and has not used gRPC yet.
  static absl::StatusOr<std::unique_ptr<IngestSender>> Start();
  ~IngestSender();  // ends the process
  IngestSender(const IngestSender&) = delete;
  IngestSender& operator=(const IngestSender&) = delete;

  absl::StatusOr<SendResult> Send(const SendJob& job);
  // Of the process so far, all threads, in user and in system.
  double CpuSeconds() const;

 private:
  IngestSender(int socket, pid_t process) : socket_(socket), process_(process) {}

  const int socket_;
  const pid_t process_;
};

// CPU seconds of this process so far, all threads, in user and in system.
double ProcessCpuSeconds();

}  // namespace sluice::bench
