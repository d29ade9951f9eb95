// Copies between the pages of two pools of one layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

// Appends to `copies` what copies `blocks` pages of a kind from the pages `source` of `from` to the
// pages `target` of `to`. Pages that are neighbours on both sides become one copy.
void CopyPages(const PagePool& from, const int32_t* source, const PagePool& to,
               const int32_t* target, size_t kind, int64_t blocks,
               std::vector<Stream::CopyOp>* copies);

// Does the same for the pages that hold tokens [begin, tokens) of a sequence, in one layer and
// kind. REQUIRES: both caches have that many pages, and `begin` is a block's first token.
void CopyPages(const SequenceCache& from, const SequenceCache& to, int layer, size_t kind,
               int64_t tokens, std::vector<Stream::CopyOp>* copies, int64_t begin = 0);

}  // namespace sluice
