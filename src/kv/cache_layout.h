// The caches that a model keeps, as a list of kinds. Pools, reservations, manifests and chunks are
// driven by this list; nothing in kv/ or above knows what a kind means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/dtype.h"
#include "src/kv/tokens_by_kind.h"

namespace sluice {

// A block is an array for each part, one after the other, [block_tokens][part_bytes[i]], of one
// head of one layer. A page is one block of every head: [heads] blocks.
struct CacheKind {
  // "kv": K after RoPE, then V. "latent", "index": kernels/latent_params.h.
  std::string name;
  DType element_type = DType::kBFloat16;
  int heads = 0;
  int block_tokens = 32;
  std::vector<int64_t> part_bytes;  // of one token of one head
  int64_t bytes_per_token = 0;      // of one head, all parts

  // `count` parts of the same size, `bytes` a token together.
  void SetEqualParts(int count, int64_t bytes) {
    part_bytes.assign(static_cast<size_t>(count), bytes / count);
    bytes_per_token = bytes;
  }
  int64_t block_bytes() const { return bytes_per_token * block_tokens; }
  int64_t page_bytes() const { return block_bytes() * heads; }
  int64_t BlocksFor(int64_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }
};

struct CacheLayout {
  int layers = 0;
  std::vector<CacheKind> kinds;

  // Bytes of the pages that hold `tokens`, all layers and kinds.
  int64_t BytesFor(const TokensByKind& tokens) const;
  // Pages of kind `kind` that hold `tokens` tokens, all layers.
  int64_t PagesFor(size_t kind, int64_t tokens) const {
    return kinds[kind].BlocksFor(tokens) * layers;
  }
  // Index of the kind of that name, or -1.
  int FindKind(const std::string& name) const;
  // For messages: "100", or "latent 100, index 20" where the kinds differ.
  std::string Describe(const TokensByKind& tokens) const;
};

// How a tier's arena is cut. A tier may have kinds that the model does not know, behind the
// model's: what a policy keeps for itself.
struct TierShape {
  CacheLayout layout;
  // What sequences take of each kind: the arena is divided in this proportion of tokens. Plain: of
  // every kind the same.
  TokensByKind proportion = 1;
  // The arena is not divided: each kind has what the others leave. For tiers where sequences take
  // the kinds in no fixed proportion.
  bool shared = false;
};

// The shapes of both tiers.
struct TierShapes {
  TierShape hbm;
  TierShape dram;
};

// Tokens of a sequence that a policy wants room for in each tier, growth included; of the kinds of
// the tier's layout.
struct Footprint {
  TokensByKind dram_tokens;
  TokensByKind hbm_tokens;
};

}  // namespace sluice
