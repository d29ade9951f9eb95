// Admission of a sequence whose whole cache, its home, lies in DRAM beside a working set in HBM.
#pragma once

#include <memory>

#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

// Takes all pages of a new sequence: `hbm_tokens` in `hbm`, which `*working_set` then owns, and
// `home_tokens` in `home`, which is extended where it is too small and made in `dram` where it is
// null. Returns false if either pool has no headroom now; then nothing has changed.
// REQUIRES: *working_set is null.
bool AdmitWithHome(PagePool* hbm, const TokensByKind& hbm_tokens, PagePool* dram,
                   const TokensByKind& home_tokens, std::unique_ptr<SequenceCache>& home,
                   std::unique_ptr<SequenceCache>* working_set);

}  // namespace sluice
