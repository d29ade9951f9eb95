#include "src/device/kernel_set.h"

#include "src/base/status_macros.h"

namespace sluice {

#define SLUICE_NOT_HERE(op)                                                   \
  void KernelSet::op(Stream&, const kernels::op##Params&) {                   \
    SLUICE_CHECK(false, name(), " has no operator " #op ": ask HasSparse()"); \
  }
SLUICE_NOT_HERE(Digest)
SLUICE_NOT_HERE(DigestScores)
SLUICE_NOT_HERE(ExactScores)
SLUICE_NOT_HERE(PartialKeys)
SLUICE_NOT_HERE(PartialScores)
SLUICE_NOT_HERE(TopK)
SLUICE_NOT_HERE(Split)
SLUICE_NOT_HERE(RecallDue)
SLUICE_NOT_HERE(Recall)
SLUICE_NOT_HERE(WriteThrough)
SLUICE_NOT_HERE(SparseAttention)
SLUICE_NOT_HERE(MovingAverage)
SLUICE_NOT_HERE(CopyRows)
#undef SLUICE_NOT_HERE

}  // namespace sluice
