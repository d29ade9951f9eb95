#include "src/device/kernel_set.h"

#include "src/base/status_macros.h"

namespace sluice {

int64_t KernelSet::PreparedBytes(absl::Span<const MatrixPart> parts, int32_t k) const {
  int32_t n = 0;
  for (const MatrixPart& part : parts) n += part.rows;
  return WeightBytes(n, k);
}

#define SLUICE_NOT_HERE(op, ask)                                             \
  void KernelSet::op(Stream&, const kernels::op##Params&) {                  \
    SLUICE_CHECK(false, name(), " has no operator " #op ": ask " #ask "()"); \
  }
SLUICE_NOT_HERE(Digest, HasSparse)
SLUICE_NOT_HERE(DigestScores, HasSparse)
SLUICE_NOT_HERE(ExactScores, HasSparse)
SLUICE_NOT_HERE(PartialKeys, HasSparse)
SLUICE_NOT_HERE(PartialScores, HasSparse)
SLUICE_NOT_HERE(TopK, HasSparse)
SLUICE_NOT_HERE(Split, HasSparse)
SLUICE_NOT_HERE(RecallDue, HasSparse)
SLUICE_NOT_HERE(Recall, HasSparse)
SLUICE_NOT_HERE(WriteThrough, HasSparse)
SLUICE_NOT_HERE(SparseAttention, HasSparse)
SLUICE_NOT_HERE(MovingAverage, HasSparse)
SLUICE_NOT_HERE(CopyRows, HasSparse)
SLUICE_NOT_HERE(LatentAppend, HasLatent)
SLUICE_NOT_HERE(IndexAppend, HasLatent)
SLUICE_NOT_HERE(IndexQuery, HasLatent)
SLUICE_NOT_HERE(IndexLogits, HasLatent)
SLUICE_NOT_HERE(MlaQuery, HasLatent)
SLUICE_NOT_HERE(HeadLinear, HasLatent)
SLUICE_NOT_HERE(SparseMla, HasLatent)
SLUICE_NOT_HERE(UpdateResidency, HasLatent)
SLUICE_NOT_HERE(Route, HasLatent)
SLUICE_NOT_HERE(ExpertLinear, HasLatent)
SLUICE_NOT_HERE(Combine, HasLatent)
#undef SLUICE_NOT_HERE

}  // namespace sluice
