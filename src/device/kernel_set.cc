#include "src/device/kernel_set.h"

namespace sluice {

int64_t KernelSet::PreparedBytes(absl::Span<const MatrixPart> parts, int32_t k) const {
  int32_t n = 0;
  for (const MatrixPart& part : parts) n += part.rows;
  return WeightBytes(n, k);
}

}  // namespace sluice
