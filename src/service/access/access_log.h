// The access log: a JSON line for every call that has ended, to any service but health checks and
// reflection. Calls that access.h refuses have a line too, without a peer. A call hands its record
// to a bounded queue, and a thread of the log writes, so that no call waits for a disk. A record
// that finds the queue full is dropped and counted.
//
// The file is appended to. It is opened anew when its name leads to another file or to none, so a
// rotation renames it and needs no signal. The thread looks at the name once a second, and a line
// is on its way within kFlushEvery. Thread-safe.
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

namespace sluice {

class AccessLog {
 public:
  // `path` is a file, or "-" for stdout. The error names the file and says why it cannot be opened.
  static absl::StatusOr<std::unique_ptr<AccessLog>> Open(const std::string& path);
  // Writes the queued lines.
  ~AccessLog();

  // Returns whether a method has lines. Health checks have none, because every prober calls them
  // every second.
  static bool Keeps(std::string_view method) { return !method.starts_with("/grpc."); }
  void Write(CallFields call);
  // Returns the number of lines that found the queue full or could not be written.
  uint64_t dropped() const { return dropped_.load(); }

  static constexpr size_t kMaxQueued = 4096;  // records of about 1 KiB each
  static constexpr absl::Duration kFlushEvery = absl::Milliseconds(100);
  static constexpr absl::Duration kLookEvery = absl::Seconds(1);

 private:
  AccessLog(std::string path, int fd);
  void Loop();
  void WriteLines(const std::vector<CallFields>& calls);
  // Opens the file again if its name leads elsewhere.
  void ReopenIfMoved();

  const std::string path_;
  int fd_;  // used by the writing thread only
  absl::Time looked_;
  bool failing_ = false;  // the last write failed, and the log has said so
  bool cut_ = false;      // the last write did not end with a whole line
  std::atomic<uint64_t> dropped_ = 0;
  absl::Mutex mutex_;
  std::vector<CallFields> queue_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

// Returns one line without its newline. Every line has the same members, which are empty or 0 if
// there is nothing to say.
std::string AccessLine(const CallFields& call, uint64_t dropped);

}  // namespace sluice
