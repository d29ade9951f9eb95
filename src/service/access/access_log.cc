#include "src/service/access/access_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/logging.h"

namespace sluice {
namespace {

constexpr char kStdout[] = "-";

// Returns a file descriptor, or -1 with the reason in errno.
int OpenForAppend(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
}

}  // namespace

std::string AccessLine(const CallFields& call, uint64_t dropped) {
  return FormatLogRecord(LogFormat::kJson, absl::ToChronoTime(call.begin + call.total),
                         LogLevel::kInfo, "call",
                         {{"method", call.method},
                          {"peer", call.peer},
                          {"identity", call.identity},
                          {"tenant", call.tenant},
                          {"request_id", call.request_id},
                          {"x_request_id", call.trace.request_id},
                          {"trace_id", std::string(call.trace.trace_id())},
                          {"transfer_id", call.transfer_id},
                          {"status", call.status},
                          {"reason", call.reason},
                          {"queue_seconds", absl::ToDoubleSeconds(call.queued)},
                          {"first_token_seconds", absl::ToDoubleSeconds(call.first_token)},
                          {"total_seconds", absl::ToDoubleSeconds(call.total)},
                          {"prompt_tokens", call.prompt_tokens},
                          {"cached_tokens", call.cached_tokens},
                          {"output_tokens", call.output_tokens},
                          {"bytes", call.bytes},
                          {"dropped", dropped}});
}

absl::StatusOr<std::unique_ptr<AccessLog>> AccessLog::Open(const std::string& path) {
  const int fd = path == kStdout ? STDOUT_FILENO : OpenForAppend(path);
  if (fd < 0) {
    return absl::UnavailableError(
        absl::StrCat("access_log: cannot append to ", path, ": ", std::strerror(errno)));
  }
  return std::unique_ptr<AccessLog>(new AccessLog(path, fd));
}

AccessLog::AccessLog(std::string path, int fd)
    : path_(std::move(path)), fd_(fd), looked_(absl::Now()), thread_([this] { Loop(); }) {}

AccessLog::~AccessLog() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
  if (path_ != kStdout && fd_ >= 0) close(fd_);
}

void AccessLog::Write(CallFields call) {
  absl::MutexLock lock(&mutex_);
  if (queue_.size() >= kMaxQueued) {
    dropped_.fetch_add(1);
    return;
  }
  queue_.push_back(std::move(call));
}

void AccessLog::Loop() {
  pthread_setname_np(pthread_self(), "access-log");
  bool ending = false;
  while (!ending) {
    std::vector<CallFields> calls;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&ending_), kFlushEvery);
      ending = ending_;
      calls.swap(queue_);
    }
    if (!calls.empty()) WriteLines(calls);
  }
}

void AccessLog::WriteLines(const std::vector<CallFields>& calls) {
  ReopenIfMoved();
  std::string text = cut_ ? "\n" : "";
  for (const CallFields& call : calls) absl::StrAppend(&text, AccessLine(call, dropped()), "\n");
  size_t written = 0;
  while (fd_ >= 0 && written < text.size()) {
    const ssize_t n = write(fd_, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    written += static_cast<size_t>(n);
  }
  const bool failed = written < text.size();
  // on a full disk some lines may be there, the last one cut
  if (failed) dropped_.fetch_add(calls.size());
  if (failed && !failing_) {
    Log(LogLevel::kError, "the access log cannot be written",
        {{"file", path_}, {"error", std::strerror(errno)}});
  }
  failing_ = failed;
  if (written > 0) cut_ = text[written - 1] != '\n';
}

void AccessLog::ReopenIfMoved() {
  const absl::Time now = absl::Now();
  if (path_ == kStdout || (now - looked_ < kLookEvery && fd_ >= 0)) return;
  looked_ = now;
  struct stat named = {}, open_file = {};
  if (fd_ >= 0 && stat(path_.c_str(), &named) == 0 && fstat(fd_, &open_file) == 0 &&
      named.st_dev == open_file.st_dev && named.st_ino == open_file.st_ino) {
    return;
  }
  const int fd = OpenForAppend(path_);
  if (fd < 0) return;  // the open file stays in use, and the next try is in a second
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

}  // namespace sluice
