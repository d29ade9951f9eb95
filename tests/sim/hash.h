// The arithmetic of the simulated model, shared by the kernels that read pages and by the oracle
// that never sees one. A token's state mixes its id, its position and, layer by layer, every byte
// of every key and value up to it that it attends to.
//
// A KV head's result is the sum of a hash of each token's key and value. So parts add up to the
// same whoever attends to which of them, in whatever order, and a token that is left out, wrong or
// counted twice shows.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace sluice::sim {

inline constexpr int kLayers = 2;
inline constexpr int kKvHeads = 2;
inline constexpr int kHeads = 2;
inline constexpr int kHeadDim = 4;  // float32: 16 bytes of K and 16 of V per head
inline constexpr int kVocab = 64;
inline constexpr int32_t kEosToken = 1;
// A token whose own row gives logits that are not finite.
inline constexpr int32_t kBrokenToken = 63;

inline constexpr int kParts = 2;                                // K and V
inline constexpr int kWords = kHeadDim * 4 / 8;                 // 64-bit words of a part
inline constexpr int kTokenWords = kKvHeads * kParts * kWords;  // words of a token in one layer

// Returns the bytes of a page of one layer.
constexpr int64_t PageBytes(int block_tokens) { return block_tokens * int64_t{kTokenWords} * 8; }

// Sizes in the model with latent caches: the same words of a token are an entry and an index key.
// An entry has kRank + kRope float32.
inline constexpr int kRank = 4;
inline constexpr int kRope = 8;
inline constexpr int kEntryWords = (kRank + kRope) * 4 / 8;
inline constexpr int kKeyWords = kTokenWords - kEntryWords;

constexpr uint64_t Mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

inline constexpr uint64_t kEmpty = 0x243F6A8885A308D3ull;  // state of an empty context

// Returns the state of a token before the first layer.
constexpr uint64_t Embed(int32_t token, int32_t position) {
  return Mix(Mix(kEmpty, static_cast<uint64_t>(static_cast<int64_t>(token))),
             static_cast<uint64_t>(position));
}

// A word with only these bits is two float32, below 2 in magnitude.
inline constexpr uint64_t kNumberBits = 0xBFFFFFFFBFFFFFFFull;

// Returns word `i` of the keys and values that a token of that state has in a layer: head by head,
// K then V. A word is two float32, below 2 in magnitude, so that selectors can score them.
constexpr uint64_t KvWord(uint64_t state, int layer, int i) {
  return Mix(state, static_cast<uint64_t>(layer * kTokenWords + i + 1)) & kNumberBits;
}

// Returns word `i` of the queries that a token of that state has in a layer, all heads, made of the
// same bits.
constexpr uint64_t QueryWord(uint64_t state, int layer, int i) {
  return Mix(state, ~static_cast<uint64_t>(layer * kHeads * kWords + i)) & kNumberBits;
}

// Returns the hash of a token's key and value in one head.
constexpr uint64_t TokenHash(const uint64_t* k, const uint64_t* v) {
  uint64_t hash = kEmpty;
  for (int i = 0; i < kWords; ++i) hash = Mix(hash, k[i]);
  for (int i = 0; i < kWords; ++i) hash = Mix(hash, v[i]);
  return hash;
}

constexpr uint64_t WordsHash(const uint64_t* words, int count) {
  uint64_t hash = kEmpty;
  for (int i = 0; i < count; ++i) hash = Mix(hash, words[i]);
  return hash;
}

// Returns the hash of a token's entry as one head attends to it: every head reads a different part.
constexpr uint64_t EntryHash(const uint64_t* words, int head) {
  constexpr int kPart = kEntryWords / kHeads;
  return WordsHash(words + head * kPart, kPart);
}

// Returns the score of a key with that hash for a row's query word of the indexer. Exact in
// float32.
constexpr float IndexScore(uint64_t query, uint64_t key_hash) {
  return static_cast<float>(Mix(query, key_hash) >> 40);
}

// Indices of the query words that the indexer and attention use.
inline constexpr int kIndexQueryWord = 0;
inline constexpr int kLatentQueryWord = 1;

// Returns the logit of token `v` after a token of that state, whose id is `token`.
inline float Logit(uint64_t state, int32_t token, int v) {
  if (token == kBrokenToken) return std::numeric_limits<float>::quiet_NaN();
  const float logit =
      static_cast<float>(Mix(state, static_cast<uint64_t>(1000 + v)) >> 40) * 0x1p-21f - 4.0f;
  return v == kBrokenToken ? logit - 1.0f : logit;  // rare, not absent
}

// Returns what the simulated next-token layer drafts behind a token at a position; -1: its logits
// are not finite.
constexpr int32_t DraftBehind(int32_t token, int64_t position) {
  const uint64_t hash = Mix(Embed(token, static_cast<int32_t>(position)), kVocab);
  return hash % 16 == 0 ? -1 : static_cast<int32_t>((hash >> 8) % kVocab);
}

}  // namespace sluice::sim
