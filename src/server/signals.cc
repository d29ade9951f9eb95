#include "src/server/signals.h"

#include <pthread.h>

#include <csignal>
#include <cstdlib>

#include "src/base/logging.h"

namespace sluice {
namespace {

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

Signals::Signals() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  thread_ = std::thread([this] { Loop(); });
}

Signals::~Signals() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  pthread_kill(thread_.native_handle(), SIGTERM);
  thread_.join();
}

void Signals::Serving() {
  absl::MutexLock lock(&mutex_);
  serving_ = true;
}

void Signals::WaitForStop(const std::function<bool()>& failed) {
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(this, &Signals::Stopping), kLook) && !failed()) {
  }
}

int Signals::Count() const {
  absl::MutexLock lock(&mutex_);
  return count_;
}

void Signals::Loop() {
  const sigset_t set = StopSignals();
  for (;;) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    ++count_;
    if (!serving_ || count_ > 2) {
      Log(LogLevel::kWarn, "ended by a signal", {{"signal", signal}});
      std::_Exit(128 + signal);
    }
    Log(LogLevel::kInfo, count_ == 1 ? "stopping: finishing running work" : "stopping at once",
        {{"signal", signal}});
  }
}

}  // namespace sluice
