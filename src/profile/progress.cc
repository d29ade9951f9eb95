#include "src/profile/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace sluice {
namespace {

constexpr int64_t kWidth = 30;
constexpr char kEraseLine[] = "\r\033[K";

}  // namespace

Progress::Progress(std::string what) : what_(std::move(what)), terminal_(isatty(STDERR_FILENO)) {
  Show(0, 1);
}

Progress::~Progress() {
  if (terminal_) std::fputs(kEraseLine, stderr);
}

void Progress::Show(int64_t done, int64_t all) {
  if (!terminal_) return;
  const auto full = static_cast<size_t>(done * kWidth / all);
  const std::string bar = std::string(full, '#') + std::string(kWidth - full, '.');
  std::fprintf(stderr, "%s%s [%s] %ld %%", kEraseLine, what_.c_str(), bar.c_str(),
               static_cast<long>(100 * done / all));
  std::fflush(stderr);
}

}  // namespace sluice
