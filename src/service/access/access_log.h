// The access log: a JSON line for every call that has ended, of every service but health checks and
// reflection; of those that access.h refuses too, without a peer. Calls hand their record to a
// bounded queue; a thread of its own writes, so that no call waits for a disk: what finds the queue
// full is dropped and counted.
//
// A file is appended to, and opened anew when its name leads to another file or to none: a rotation
// renames it and needs no signal. It is looked at once a second, and a line is on its way within
// kFlushEvery. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/service/wire/call_record.h"

namespace grpc::experimental {
class ServerInterceptorFactoryInterface;
}

namespace sluice {

class Access;

class AccessLog {
 public:
  // `path`: a file, or "-" for stdout. The error names the file and why it cannot be opened.
  static absl::StatusOr<std::unique_ptr<AccessLog>> Open(const std::string& path);
  // Writes what is queued.
  ~AccessLog();

  // Every prober calls health checks every second.
  static bool Keeps(std::string_view method) { return !method.starts_with("/grpc."); }
  void Write(CallFields call);
  // Lines that found the queue full, or could not be written.
  uint64_t dropped() const { return dropped_.load(); }

  static constexpr size_t kMaxQueued = 4096;  // x about 1 KiB
  static constexpr absl::Duration kFlushEvery = absl::Milliseconds(100);
  static constexpr absl::Duration kLookEvery = absl::Seconds(1);

 private:
  AccessLog(std::string path, int fd);
  void Loop();
  void WriteLines(const std::vector<CallFields>& calls);
  // Opens the file again if its name leads elsewhere.
  void Look();

  const std::string path_;
  int fd_;  // of the writing thread
  absl::Time looked_;
  bool failing_ = false;  // the last write failed, and the log has said so
  bool cut_ = false;      // what was written last was no whole line
  std::atomic<uint64_t> dropped_ = 0;
  absl::Mutex mutex_;
  std::vector<CallFields> queue_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

// One line, without its newline: the same members in each, empty or 0 where there is nothing.
std::string AccessLine(const CallFields& call, uint64_t dropped);

// `log` outlives the server; `access` (null: nobody is asked who he is) too. To be registered last:
// what other interceptors make of a status is what is written.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewAccessRecorder(
    AccessLog* log, const Access* access);

}  // namespace sluice
