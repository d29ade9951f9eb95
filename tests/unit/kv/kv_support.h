// Small pools and transfer tables for the tests of src/kv.
#pragma once

#include <catch2/catch.hpp>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "src/kv/page_pool.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

// Two kinds of different sizes, because nothing in kv/ may assume a single kind.
inline CacheLayout TwoKinds() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = 3;
  kv.block_tokens = 4;
  kv.SetEqualParts(2, 16);
  CacheKind index;
  index.name = "index";
  index.element_type = DType::kFloat32;
  index.heads = 1;
  index.block_tokens = 8;
  index.part_bytes = {8, 4};
  index.bytes_per_token = 12;
  return {2, {kv, index}};
}

inline std::unique_ptr<PagePool> MakePool(const std::string& name, const CacheLayout& layout,
                                          size_t bytes, double overcommit = 1) {
  auto pool = PagePool::Create(
      name, layout, Buffer(std::calloc(bytes, 1), bytes, [](void* p, size_t) { std::free(p); }),
      overcommit);
  REQUIRE(pool.ok());
  return *std::move(pool);
}

// Returns a sequence's cache for `tokens`, whose leading blocks are shared as far as they are
// known; null if there is no room.
inline std::unique_ptr<SequenceCache> BeginBehindPrefix(PagePool& pool, PrefixCache& prefixes,
                                                        const std::string& tenant,
                                                        const std::vector<int32_t>& tokens) {
  SharedPrefix prefix = prefixes.Find(tenant, tokens);
  Reservation rest = pool.TryReserve(std::ssize(tokens) - prefix.tokens());
  if (rest.empty()) return nullptr;
  auto made = std::make_unique<SequenceCache>(&pool, std::move(rest), std::move(prefix));
  made->EnsureTokens(std::ssize(tokens));
  return made;
}

}  // namespace sluice
