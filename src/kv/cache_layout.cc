#include "src/kv/cache_layout.h"

namespace sluice {

int64_t CacheLayout::BytesFor(int64_t tokens) const {
  int64_t bytes = 0;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    bytes += PagesFor(kind, tokens) * kinds[kind].page_bytes();
  }
  return bytes;
}

int CacheLayout::FindKind(const std::string& name) const {
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    if (kinds[kind].name == name) return static_cast<int>(kind);
  }
  return -1;
}

}  // namespace sluice
