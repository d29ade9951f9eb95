#include "src/bench/ranks/rank_processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "src/base/status_macros.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_machine.h"
#endif

namespace sluice::bench {
namespace {

constexpr char kVisible[] = "CUDA_VISIBLE_DEVICES";
// The first letter of a line says what it is.
constexpr char kLine = 'L';
constexpr char kError = 'E';

struct Process {
  pid_t pid = 0;
  int from = -1;
  bool ended = false;
  std::string rest;   // the begin of a line whose end has not come
  std::string error;  // empty: there is none
};

void WriteAll(int to, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = write(to, text.data() + at, text.size() - at);
    if (n <= 0) _exit(1);  // the parent has ended
    at += static_cast<size_t>(n);
  }
}

void SetEnvironment(int rank, RankGpus gpus) {
  if (gpus == RankGpus::kShared) {
    // NCCL refuses two ranks of one host on one GPU, so each seems to have a host of its own.
    setenv("NCCL_HOSTID", absl::StrCat("rank-", rank).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  if (gpus != RankGpus::kOwn) return;
  const char* const visible = std::getenv(kVisible);
  std::vector<std::string> names;
  if (visible != nullptr) names = absl::StrSplit(visible, ',', absl::SkipEmpty());
  const auto index = static_cast<size_t>(rank);
  setenv(kVisible, index < names.size() ? names[index].c_str() : absl::StrCat(rank).c_str(), 1);
}

[[noreturn]] void RunRank(int rank, RankGpus gpus, const RankWork& work, int to, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  SetEnvironment(rank, gpus);
  const absl::Status status = work(rank, [to](const std::string& line) {
    WriteAll(to, absl::StrCat(std::string(1, kLine), line, "\n"));
  });
  if (!status.ok()) {
    const std::string what = absl::StrReplaceAll(status.message(), {{"\n", " "}});
    WriteAll(to, absl::StrCat(std::string(1, kError), what, "\n"));
  }
  // Whatever still runs on a device whose group has failed is not waited for.
  _exit(status.ok() ? 0 : 1);
}

absl::StatusOr<Process> Start(int rank, RankGpus gpus, const RankWork& work) {
  int ends[2];
  if (pipe(ends) != 0) return absl::ErrnoToStatus(errno, "a pipe from a rank");
  const pid_t parent = getpid();
  Process process;
  process.from = ends[0];
  process.pid = fork();
  if (process.pid < 0) return absl::ErrnoToStatus(errno, "a process for a rank");
  if (process.pid == 0) RunRank(rank, gpus, work, ends[1], parent);
  close(ends[1]);
  return process;
}

// Reads what has come from a rank.
void Read(Process& process, const std::function<void(const std::string&)>& on_line) {
  char buffer[4096];
  const ssize_t n = read(process.from, buffer, sizeof(buffer));
  if (n < 0 && errno == EINTR) return;
  if (n <= 0) {
    process.ended = true;
    return;
  }
  process.rest.append(buffer, static_cast<size_t>(n));
  for (size_t end = process.rest.find('\n'); end != std::string::npos;
       end = process.rest.find('\n')) {
    const std::string line = process.rest.substr(0, end);
    process.rest.erase(0, end + 1);
    if (line[0] == kError) {
      process.error = line.substr(1);
    } else {
      on_line(line.substr(1));
    }
  }
}

}  // namespace

struct RankSwitch::Shared {
  std::atomic<bool> on{false};
};

absl::StatusOr<std::unique_ptr<RankSwitch>> RankSwitch::Create() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError("there is no memory that ranks could share");
  }
  return std::unique_ptr<RankSwitch>(new RankSwitch(new (memory) Shared));
}

RankSwitch::~RankSwitch() { munmap(shared_, sizeof(Shared)); }
void RankSwitch::Set(bool on) { shared_->on.store(on); }
bool RankSwitch::on() const { return shared_->on.load(); }

int CountGpus() {
#ifdef SLUICE_HAVE_CUDA
  const pid_t child = fork();
  if (child == 0) _exit(ProbeCudaMachine().gpus);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 0;
  return WEXITSTATUS(status);
#else
  return 0;
#endif
}

absl::Status RunRanks(int size, RankGpus gpus, const RankWork& work,
                      const std::function<void(const std::string&)>& on_line) {
  std::vector<Process> processes;
  absl::Status started;
  for (int rank = 0; rank < size && started.ok(); ++rank) {
    absl::StatusOr<Process> process = Start(rank, gpus, work);
    started = process.status();
    if (process.ok()) processes.push_back(*std::move(process));
  }
  if (!started.ok()) {
    for (const Process& process : processes) kill(process.pid, SIGKILL);
  }
  for (;;) {
    std::vector<pollfd> waits;
    std::vector<Process*> waiting;
    for (Process& process : processes) {
      if (process.ended) continue;
      waits.push_back({process.from, POLLIN, 0});
      waiting.push_back(&process);
    }
    if (waits.empty()) break;
    poll(waits.data(), waits.size(), -1);
    for (size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents != 0) Read(*waiting[i], on_line);
    }
  }
  std::vector<std::string> errors;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    Process& process = processes[rank];
    close(process.from);
    int status = 0;
    waitpid(process.pid, &status, 0);
    if (process.error.empty() && status != 0) {
      process.error = WIFSIGNALED(status) ? absl::StrCat("was killed by signal ", WTERMSIG(status))
                                          : absl::StrCat("ended with status ", WEXITSTATUS(status));
    }
    if (!process.error.empty()) {
      errors.push_back(size == 1 ? process.error
                                 : absl::StrCat("rank ", rank, ": ", process.error));
    }
  }
  SLUICE_RETURN_IF_ERROR(started);
  if (errors.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrJoin(errors, "; "));
}

}  // namespace sluice::bench
