#include "src/kv/cache_layout.h"

#include "absl/strings/str_cat.h"

namespace sluice {

int64_t CacheLayout::BytesFor(const TokensByKind& tokens) const {
  int64_t bytes = 0;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    bytes += PagesFor(kind, tokens[kind]) * kinds[kind].page_bytes();
  }
  return bytes;
}

std::string CacheLayout::Describe(const TokensByKind& tokens) const {
  std::string out;
  bool same = true;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    same = same && tokens[kind] == tokens[0];
    absl::StrAppend(&out, kind == 0 ? "" : ", ", kinds[kind].name, " ", tokens[kind]);
  }
  return same ? absl::StrCat(tokens[0]) : out;
}

int CacheLayout::FindKind(const std::string& name) const {
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    if (kinds[kind].name == name) return static_cast<int>(kind);
  }
  return -1;
}

}  // namespace sluice
