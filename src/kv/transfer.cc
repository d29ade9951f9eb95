#include "src/kv/transfer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"

namespace sluice {
namespace {

std::string NewId() { return absl::StrFormat("%016x%016x", RandomU64(), RandomU64()); }

}  // namespace

Transfer::Transfer(const Manifest& manifest, std::unique_ptr<SequenceCache> pages,
                   absl::Duration lease_length, const HeadPlaces* places)
    : id(NewId()),
      tenant(manifest.tenant),
      rendezvous_key(manifest.rendezvous_key),
      prompt(manifest.prompt_token_ids.begin(), manifest.prompt_token_ids.end()),
      prompt_length(prompt.size()),
      context_length(manifest.context_length),
      max_new_tokens(manifest.max_new_tokens),
      home(std::move(pages)),
      reused_tokens(static_cast<uint32_t>(home->shared_tokens())),
      lease(lease_length),
      places_(places),
      layout_(places != nullptr ? &places->layout : &home->pool()->layout()) {
  size_t count = 0;
  for (const CacheKind& kind : layout_->kinds) {
    kind_begin.push_back(count);
    count += static_cast<size_t>(layout_->layers) * static_cast<size_t>(kind.heads) *
             static_cast<size_t>(kind.BlocksFor(context_length));
  }
  blocks.resize(count, Block::kMissing);
  if (reused_tokens == 0) return;
  for (size_t kind = 0; kind < layout_->kinds.size(); ++kind) {
    const CacheKind& k = layout_->kinds[kind];
    const auto shared = static_cast<std::ptrdiff_t>(k.BlocksFor(reused_tokens));
    for (uint32_t layer = 0; layer < static_cast<uint32_t>(layout_->layers); ++layer) {
      for (uint32_t head = 0; head < static_cast<uint32_t>(k.heads); ++head) {
        std::fill_n(blocks.begin() + static_cast<std::ptrdiff_t>(BlockIndex(layer, kind, head, 0)),
                    shared, Block::kLanded);
        landed += static_cast<uint64_t>(shared);
      }
    }
  }
}

Transfer::Transfer(std::string owner, std::vector<int32_t> tokens, uint32_t context,
                   const CacheLayout& layout, absl::Duration lease_length)
    : id(NewId()),
      kept(true),
      tenant(std::move(owner)),
      prompt(std::move(tokens)),
      prompt_length(prompt.size()),
      context_length(context),
      max_new_tokens(0),
      lease(lease_length),
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
        // The neighbouring head misses the same tokens: one range covers both heads.
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

absl::Status NoSuchTransfer(const std::string& id) {
  return WithReason(absl::NotFoundError(absl::StrCat(
                        "transfer_id '", id.substr(0, 64),
                        "': no such transfer: it was never reserved here, or has ended")),
                    reasons::kTransferNotFound);
}

absl::Status NoSuchSequence(const std::string& id) {
  return WithReason(absl::NotFoundError(absl::StrCat(
                        "sequence_id '", id.substr(0, 64),
                        "': no such sequence is kept for this tenant: it never was, its lease has "
                        "ended, or a Generate has it; send the whole prompt again")),
                    reasons::kSequenceNotFound);
}

}  // namespace sluice
