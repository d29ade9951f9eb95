#include "tests/support/ranks.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"
#include "tests/support/device.h"

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

Process Start(const RankGroupOptions& options, const RankBody& body, bool share_gpu) {
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
  if (share_gpu) {
    setenv("NCCL_HOSTID", absl::StrCat("rank-", options.rank).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
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
                                          bool share_gpu) {
  std::vector<Process> processes;
  for (int rank = 0; rank < options.size; ++rank) {
    RankGroupOptions own = options;
    own.rank = rank;
    processes.push_back(Start(own, body, share_gpu));
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
