// The caches that a model keeps, as a list of kinds. Pools, reservations, manifests and chunks are
// driven by this list; nothing in kv/ or above knows what a kind means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/dtype.h"
#include "src/kv/tokens_by_kind.h"

namespace sluice {

// One kind of cache. A block holds block_tokens tokens of one head of one layer: for each part an
// array [block_tokens][part_bytes[i]], one array after the other. A page is one block of every
// head: [heads] blocks.
struct CacheKind {
  // "kv" is K after RoPE, then V. "latent" and "index" are laid out in kernels/latent_params.h.
  std::string name;
  DType element_type = DType::kBFloat16;
  int heads = 0;
  int block_tokens = 32;
  std::vector<int64_t> part_bytes;  // bytes of one token of one head, by part
  int64_t bytes_per_token = 0;      // all parts of one head together

  // Makes `count` parts of the same size, which take `bytes` a token together.
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

  // Returns the bytes of the pages that hold `tokens`, in all layers and kinds.
  int64_t BytesFor(const TokensByKind& tokens) const;
  // Returns the number of pages of kind `kind` that hold `tokens` tokens, in all layers.
  int64_t PagesFor(size_t kind, int64_t tokens) const {
    return kinds[kind].BlocksFor(tokens) * layers;
  }
  // Returns the index of the kind of that name, or -1.
  int FindKind(const std::string& name) const;
  // Returns text for messages: "100", or "latent 100, index 20" where the kinds differ.
  std::string Describe(const TokensByKind& tokens) const;
};

// How a tier's arena is cut. A tier may have kinds behind the model's own that the model does not
// know, for what a policy keeps there.
struct TierShape {
  CacheLayout layout;
  // The arena is divided in this proportion of tokens, which is what sequences take of each kind. A
  // plain number: the same of every kind.
  TokensByKind proportion = 1;
  // The arena is not divided, and each kind has what the others leave. Use it for tiers where
  // sequences take the kinds in no fixed proportion.
  bool shared = false;
};

// The shapes of both tiers.
struct TierShapes {
  TierShape hbm;
  TierShape dram;
};

// The tokens of a sequence that a policy wants room for in each tier, including growth, by the
// kinds of that tier's layout.
struct Footprint {
  TokensByKind dram_tokens;
  TokensByKind hbm_tokens;
};

}  // namespace sluice
