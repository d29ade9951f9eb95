#include "kernels/scalar.h"

#include <cstdio>
#include <cstdlib>

namespace sluice::kernels {

void KernelCheckFailed(const char* what) {
  std::fprintf(stderr, "kernel contract broken: %s\n", what);
  std::abort();
}

}  // namespace sluice::kernels
