// A separate process that pushes caches into a node, or holds them for the node to read, as a
// prefill node on another machine would. So its cost does not count as the node's.
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

// Copies as much of `text` as fits, and a terminating zero, into `to`.
template <size_t kBytes>
void SetText(const std::string& text, char (*to)[kBytes]) {
  const size_t length = std::min(text.size(), kBytes - 1);
  std::copy_n(text.data(), length, *to);
  (*to)[length] = 0;
}

// A job. It is plain bytes, because it crosses a socket between two processes of one program.
struct SendJob {
  char address[64] = {};
  // Folder of MakeBenchCertificate; empty: without TLS.
  char tls[64] = {};
  // True: transfers are reserved, committed and aborted around the messages. False: the same
  // messages go to a peer that does not examine them.
  bool transfers = false;
  // Sends nothing: one prompt is held once, for a reader at SendResult::address.
  bool hold = false;
  char fingerprint[65] = {};
  // One cache kind with two equal parts.
  char kind[16] = {};
  int32_t layers = 0, heads = 0, block_tokens = 0;
  int64_t bytes_per_token = 0;  // Bytes per token of one head.
  int32_t context = 0;          // Tokens in a transfer.
  int64_t chunk_bytes = 0;      // Maximum payload of a message; whole blocks of all heads.
  int32_t streams = 1;          // Concurrent streams, each on its own connection.
  // Zeros: one transfer at full speed. Otherwise transfers at this rate for this time.
  double bytes_per_second = 0;
  double seconds = 0;
};

struct SendResult {
  double seconds = 0;      // From Reserve to the answer of Commit, or of the last Write.
  double cpu_seconds = 0;  // CPU time of the sending process meanwhile.
  uint64_t payload_bytes = 0;
  uint64_t messages = 0;
  char error[256] = {};
  // Set by a job that holds.
  char address[64] = {};
  char source_id[33] = {};
};

// Returns the layout that the job's fields describe.
CacheLayout LayoutOf(const SendJob& job);

class IngestSender {
 public:
  // Forks the process. REQUIRES: this process has no other thread and has not used gRPC yet.
  static absl::StatusOr<std::unique_ptr<IngestSender>> Start();
  ~IngestSender();  // Ends the process.
  IngestSender(const IngestSender&) = delete;
  IngestSender& operator=(const IngestSender&) = delete;

  absl::StatusOr<SendResult> Send(const SendJob& job);
  // Returns the CPU seconds of the sending process so far, over all threads, user and system time.
  double CpuSeconds() const;

 private:
  IngestSender(int socket, pid_t process) : socket_(socket), process_(process) {}

  const int socket_;
  const pid_t process_;
};

// Returns the CPU seconds of this process so far, over all threads, user and system time.
double ProcessCpuSeconds();

}  // namespace sluice::bench
