#include "src/kv/page_copies.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

void CopyPages(const PagePool& from, const int32_t* source, const PagePool& to,
               const int32_t* target, size_t kind, int64_t blocks,
               std::vector<Stream::CopyOp>* copies) {
  const int64_t page_bytes = from.layout().kinds[kind].page_bytes();
  for (int64_t begin = 0, end; begin < blocks; begin = end) {
    end = begin + 1;
    while (end < blocks && source[end] == source[end - 1] + 1 &&
           target[end] == target[end - 1] + 1) {
      ++end;
    }
    copies->push_back({to.PageAddress(kind, target[begin]), from.PageAddress(kind, source[begin]),
                       static_cast<size_t>((end - begin) * page_bytes)});
  }
}

void CopyPages(const SequenceCache& from, const SequenceCache& to, int layer, size_t kind,
               int64_t tokens, std::vector<Stream::CopyOp>* copies, int64_t begin) {
  const std::vector<int32_t>& source = from.Pages(layer, kind);
  const std::vector<int32_t>& target = to.Pages(layer, kind);
  const int64_t blocks = from.pool()->layout().kinds[kind].BlocksFor(tokens);
  SLUICE_CHECK(blocks <= static_cast<int64_t>(std::min(source.size(), target.size())));
  const int64_t first = begin / from.pool()->layout().kinds[kind].block_tokens;
  if (first >= blocks) return;
  CopyPages(*from.pool(), source.data() + first, *to.pool(), target.data() + first, kind,
            blocks - first, copies);
}

}  // namespace sluice
