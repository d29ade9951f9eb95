#include "tests/support/ranks.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"
#include "tests/support/device.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_machine.h"
#endif

namespace sluice::testing {
namespace {

constexpr absl::Duration kMostTime = absl::Seconds(100);

struct Process {
  pid_t pid = 0;
  int from = -1;  // what was wrong, as text
};

std::string Guarded(const RankBody& body, const RankGroupOptions& options) {
  try {
    return body(options);
  } catch (const std::exception& e) {
    return absl::StrCat("threw: ", e.what());
  } catch (...) {  // a test's assertion, which was printed
    return "an assertion failed";
  }
}

// Gives this process, which has not used CUDA yet, the GPU of a rank.
void TakeGpu(const RankGroupOptions& options, const std::vector<std::string>& gpus) {
  if (gpus.empty()) return;
  const size_t own = static_cast<size_t>(options.rank) % gpus.size();
  setenv("CUDA_VISIBLE_DEVICES", gpus[own].c_str(), 1);
  if (static_cast<size_t>(options.size) <= gpus.size()) return;
  setenv("NCCL_HOSTID", absl::StrCat("rank-", options.rank).c_str(), 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}

Process Start(const RankGroupOptions& options, const RankBody& body,
              const std::vector<std::string>& gpus) {
  int ends[2];
  SLUICE_CHECK(pipe(ends) == 0);
  Process process;
  process.pid = fork();
  SLUICE_CHECK(process.pid >= 0);
  process.from = ends[0];
  if (process.pid != 0) {
    close(ends[1]);
    return process;
  }
  TakeGpu(options, gpus);
  const std::string wrong = "+" + Guarded(body, options);
  const ssize_t written = write(ends[1], wrong.data(), wrong.size());
  _exit(written == static_cast<ssize_t>(wrong.size()) ? 0 : 1);
}

std::string End(const Process& process, absl::Time give_up) {
  std::string said;
  char buffer[4096];
  for (;;) {
    pollfd poll_fd{process.from, POLLIN, 0};
    const int64_t left = absl::ToInt64Milliseconds(give_up - absl::Now());
    if (left <= 0 || poll(&poll_fd, 1, static_cast<int>(left)) == 0) {
      kill(process.pid, SIGKILL);
      said = "+did not end in time";
      break;
    }
    const ssize_t n = read(process.from, buffer, sizeof(buffer));
    if (n <= 0) break;
    said.append(buffer, static_cast<size_t>(n));
  }
  close(process.from);
  waitpid(process.pid, nullptr, 0);
  return said.empty() ? "died" : said.substr(1);
}

// Returns the names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES takes them.
std::vector<std::string> VisibleGpus() {
  int count = 0;
#ifdef SLUICE_HAVE_CUDA
  // They are counted in a process of its own, since one that has used CUDA cannot fork.
  const std::string counted = RunRankProcesses(RankOptions(1), [](const RankGroupOptions&) {
    return absl::StrCat(ProbeCudaMachine().gpus);
  })[0];
  if (!absl::SimpleAtoi(counted, &count)) return {};
#endif
  const char* const listed = std::getenv("CUDA_VISIBLE_DEVICES");
  std::vector<std::string> gpus;
  if (listed != nullptr) gpus = absl::StrSplit(listed, ',');
  for (int gpu = 0; listed == nullptr && gpu < count; ++gpu) gpus.push_back(absl::StrCat(gpu));
  gpus.resize(std::min(gpus.size(), static_cast<size_t>(count)));
  return gpus;
}

}  // namespace

RankGroupOptions RankOptions(int size) {
  static int number = 0;
  RankGroupOptions options;
  options.size = size;
  options.name = absl::StrCat("sluice-test-", getpid(), "-", ++number);
  options.join_timeout = absl::Seconds(30);
  return options;
}

std::vector<std::string> RunRankThreads(const RankGroupOptions& options, const RankBody& body) {
  std::vector<std::string> wrong(static_cast<size_t>(options.size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.size; ++rank) {
    threads.emplace_back([&, rank] {
      RankGroupOptions own = options;
      own.rank = rank;
      wrong[static_cast<size_t>(rank)] = Guarded(body, own);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

std::vector<std::string> RunRankProcesses(const RankGroupOptions& options, const RankBody& body,
                                          bool on_gpus) {
  const std::vector<std::string> gpus = on_gpus ? VisibleGpus() : std::vector<std::string>();
  std::vector<Process> processes;
  for (int rank = 0; rank < options.size; ++rank) {
    RankGroupOptions own = options;
    own.rank = rank;
    processes.push_back(Start(own, body, gpus));
  }
  std::vector<std::string> wrong;
  const absl::Time give_up = absl::Now() + kMostTime;
  for (const Process& process : processes) wrong.push_back(End(process, give_up));
  return wrong;
}

std::string WhyNoSharedGpu() {
  return RunRankProcesses(RankOptions(1), [](const RankGroupOptions&) {
    return std::string(TestDevice("cuda").status().message());
  })[0];
}

std::string Joined(const std::vector<std::string>& errors) {
  std::string all;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank].empty()) absl::StrAppend(&all, "rank ", rank, ": ", errors[rank], "; ");
  }
  return all;
}

}  // namespace sluice::testing
