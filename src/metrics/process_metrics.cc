#include "src/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>

#include "src/metrics/metrics.h"

namespace sluice {
namespace {

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size_pages = 0, resident_pages = 0;
  statm >> size_pages >> resident_pages;
  return static_cast<double>(resident_pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return 0;
  // The descriptor that reads the list does not count.
  return static_cast<double>(std::distance(begin(entries), end(entries))) - 1;
}

// Returns the start of the process in seconds since 1970: the boot time plus the 22nd field of
// /proc/self/stat, which is in clock ticks.
double StartSeconds() {
  double boot = 0;
  std::ifstream stat("/proc/stat");
  for (std::string word; stat >> word;) {
    if (word == "btime") {
      stat >> boot;
      break;
    }
  }
  std::ifstream self("/proc/self/stat");
  std::string line;
  std::getline(self, line);
  // The second field is the program's name in brackets and may hold anything.
  std::istringstream rest(line.substr(line.rfind(')') + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) rest >> field;
  return boot + std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

void ProcessMetrics::Update(const Metrics& metrics) {
  metrics.process_resident_bytes.Set(ResidentBytes());
  metrics.process_open_fds.Set(OpenFds());
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  metrics.process_max_fds.Set(static_cast<double>(limit.rlim_cur));
  static const double start_seconds = StartSeconds();
  metrics.process_start_seconds.Set(start_seconds);
  absl::MutexLock lock(&mutex_);
  const double cpu_seconds = CpuSeconds();
  if (cpu_seconds <= counted_cpu_seconds_) return;
  metrics.process_cpu_seconds.Add(cpu_seconds - counted_cpu_seconds_);
  counted_cpu_seconds_ = cpu_seconds;
}

}  // namespace sluice
