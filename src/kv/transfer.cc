#include "src/kv/transfer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/reasons.h"

namespace sluice {

Transfer::Transfer(std::string transfer_id, const Manifest& manifest,
                   std::unique_ptr<SequenceCache> pages)
    : id(std::move(transfer_id)),
      tenant(manifest.tenant),
      rendezvous_key(manifest.rendezvous_key),
      prompt(manifest.prompt_token_ids.begin(), manifest.prompt_token_ids.end()),
      prompt_length(prompt.size()),
      context_length(manifest.context_length),
      max_new_tokens(manifest.max_new_tokens),
      home(std::move(pages)),
      layout_(&home->pool()->layout()) {
  size_t count = 0;
  for (const CacheKind& kind : layout_->kinds) {
    kind_begin.push_back(count);
    count += static_cast<size_t>(layout_->layers) * static_cast<size_t>(kind.heads) *
             static_cast<size_t>(kind.BlocksFor(context_length));
  }
  blocks.resize(count, Block::kMissing);
}

Transfer::Transfer(std::string sequence_id, KeptSequence sequence, const CacheLayout& layout)
    : id(std::move(sequence_id)),
      kept(true),
      tenant(std::move(sequence.tenant)),
      prompt(std::move(sequence.tokens)),
      prompt_length(prompt.size()),
      context_length(sequence.context_length),
      max_new_tokens(0),
      layout_(&layout) {}

std::vector<MissingRange> Transfer::Missing(size_t most) const {
  std::vector<MissingRange> ranges;
  if (landed == blocks.size()) return ranges;
  for (size_t kind = 0; kind < layout_->kinds.size(); ++kind) {
    const CacheKind& k = layout_->kinds[kind];
    const int64_t count = k.BlocksFor(context_length);
    for (uint32_t layer = 0; layer < static_cast<uint32_t>(layout_->layers); ++layer) {
      for (uint32_t head = 0; head < static_cast<uint32_t>(k.heads); ++head) {
        bool open = false;
        for (int64_t block = 0; block < count; ++block) {
          if (blocks[BlockIndex(layer, kind, head, block)] == Block::kLanded) {
            open = false;
            continue;
          }
          const auto begin = static_cast<uint32_t>(block * k.block_tokens);
          const uint32_t end =
              std::min(begin + static_cast<uint32_t>(k.block_tokens), context_length);
          if (open) {
            ranges.back().token_end = end;
            continue;
          }
          if (ranges.size() == most) return ranges;
          ranges.push_back({layer, k.name, head, head + 1, begin, end});
          open = true;
        }
        // A neighbour that misses the same tokens: one range over both heads.
        const size_t n = ranges.size();
        if (n >= 2 && ranges[n - 2].layer == layer && ranges[n - 2].kind == k.name &&
            ranges[n - 1].head_begin == head && ranges[n - 2].head_end == head &&
            ranges[n - 2].token_begin == ranges[n - 1].token_begin &&
            ranges[n - 2].token_end == ranges[n - 1].token_end) {
          ranges[n - 2].head_end = head + 1;
          ranges.pop_back();
        }
      }
    }
  }
  return ranges;
}

absl::Status Poisoned(const std::string& id) {
  return WithReason(
      absl::FailedPreconditionError(
          absl::StrCat("transfer ", id,
                       ": a landed block was sent again with other bytes; abort and reserve anew")),
      reasons::kPoisoned);
}

}  // namespace sluice
