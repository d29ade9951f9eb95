// Copies between the pages of two pools of one layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

// Appends copies of a list of `blocks` pages of a kind, `source` of `from` to `target` of `to`.
// Neighbours on both sides are one copy.
void CopyPages(const PagePool& from, const int32_t* source, const PagePool& to,
               const int32_t* target, size_t kind, int64_t blocks,
               std::vector<Stream::CopyOp>* copies);

// The same for the first `tokens` tokens of a sequence, of a layer's pages of a kind. REQUIRES:
// both have so many pages.
void CopyPages(const SequenceCache& from, const SequenceCache& to, int layer, size_t kind,
               int64_t tokens, std::vector<Stream::CopyOp>* copies);

}  // namespace sluice
