#include <cstdio>
#include <cstdlib>
#include <string>

#include "src/base/status_macros.h"

namespace sluice {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: invariant broken: %s %s\n", file, line, condition, message.c_str());
  std::abort();
}

}  // namespace sluice
