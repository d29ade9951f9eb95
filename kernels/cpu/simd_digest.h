// Digests of blocks and key codes of their tokens, for any path (`S`: see simd_math.h).
#pragma once

#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

// The loops below are over the bits of a word, which compilers turn into vectors.
inline constexpr int64_t kWordBits = 32;
inline constexpr int64_t kMaxCodeDim = (kMaxHeadDim + kWordBits - 1) / kWordBits * kWordBits;

inline uint32_t* CodesAt(const PagedRows& codes, int64_t slot, int64_t token, int64_t head) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(codes.base) +
                                     RowOffset(codes, slot, token, head));
}

template <class S>
inline typename S::F LoadElements(const float* p) {
  return S::Load(p);
}
template <class S>
inline typename S::F LoadElements(const uint16_t* p) {
  return S::LoadBf16(p);
}
template <class S>
inline typename S::F LoadElements(const uint8_t* p) {
  return S::LoadE4M3(p);
}

// Writes the smallest and the largest of each element of `tokens` rows of [dim] to [2][dim] floats.
template <class S, typename T>
void LeastAndLargest(const T* keys, int64_t tokens, int64_t dim, float* out) {
  using F = typename S::F;
  constexpr int kVectors = 4;
  int64_t d = 0;
  for (; d + kVectors * S::kWidth <= dim; d += kVectors * S::kWidth) {
    F least[kVectors], largest[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      least[v] = largest[v] = LoadElements<S>(keys + d + v * S::kWidth);
    }
    for (int64_t t = 1; t < tokens; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F key = LoadElements<S>(keys + t * dim + d + v * S::kWidth);
        least[v] = S::Min(least[v], key);
        largest[v] = S::Max(largest[v], key);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      S::Store(out + d + v * S::kWidth, least[v]);
      S::Store(out + dim + d + v * S::kWidth, largest[v]);
    }
  }
  for (; d < dim; d += S::kWidth) {
    F least = LoadElements<S>(keys + d), largest = least;
    for (int64_t t = 1; t < tokens; ++t) {
      const F key = LoadElements<S>(keys + t * dim + d);
      least = S::Min(least, key);
      largest = S::Max(largest, key);
    }
    S::Store(out + d, least);
    S::Store(out + dim + d, largest);
  }
}

// Writes the key codes of a complete block, whose digest is [2][head_dim] floats.
template <class S>
void WriteCodes(const DigestParams& p, int64_t slot, int64_t block, int64_t head,
                const float* digest) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim, words = KeyCodeWords(c.head_dim);
  alignas(64) float middle[kMaxCodeDim] = {}, quarter[kMaxCodeDim] = {}, key[kMaxCodeDim] = {};
  for (int64_t d = 0; d < dim; ++d) {
    middle[d] = (digest[d] + digest[dim + d]) * 0.5f;
    quarter[d] = (digest[dim + d] - digest[d]) * 0.25f;
  }
  const int64_t begin = block * c.block_tokens;
  for (int64_t t = begin; t < begin + c.block_tokens; ++t) {
    const int64_t at = KeyIndex(c, slot, t, head);
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      S::Store(key + d, c.type == DType::kFloat32
                            ? LoadElements<S>(static_cast<const float*>(c.base) + at + d)
                            : LoadElements<S>(static_cast<const uint16_t*>(c.base) + at + d));
    }
    uint32_t* const row = CodesAt(p.codes, slot, t, head);
    for (int64_t w = 0; w < words; ++w) {
      uint32_t uppers = 0, outers = 0;
      for (int64_t i = 0; i < kWordBits; ++i) {
        const int64_t d = w * kWordBits + i;
        const bool upper = key[d] > middle[d];
        const bool outer =
            upper ? key[d] > middle[d] + quarter[d] : key[d] <= middle[d] - quarter[d];
        uppers |= uint32_t{upper} << i;
        outers |= uint32_t{outer && d < dim} << i;
      }
      row[w] = uppers;
      row[words + w] = outers;
    }
  }
}

template <class S>
void DigestBlock(const DigestParams& p, int64_t row, int64_t block, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t begin = block * c.block_tokens;
  const int64_t tokens = Min(c.block_tokens, p.positions[row] + 1 - begin);
  const int64_t keys = KeyIndex(c, p.slots[row], begin, head);
  alignas(64) float digest[2 * kMaxHeadDim];
  if (c.type == DType::kFloat32) {
    LeastAndLargest<S>(static_cast<const float*>(c.base) + keys, tokens, c.head_dim, digest);
  } else {
    LeastAndLargest<S>(static_cast<const uint16_t*>(c.base) + keys, tokens, c.head_dim, digest);
  }
  char* out = static_cast<char*>(p.digests.base) + RowOffset(p.digests, p.slots[row], block, head);
  WriteRounded(out, p.digests.type, 0, digest, 2 * int64_t{c.head_dim});
  if (p.codes.base != nullptr && tokens == c.block_tokens) {
    WriteCodes<S>(p, p.slots[row], block, head, digest);
  }
}

// The (row, block, head) triples are taken in order, cut into equal shares: a sequence that is
// warmed has one row of many blocks.
template <class S>
void Digest(const DigestParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim || p.digests.type != c.type) {
    KernelCheckFailed("digest: head_dim a multiple of 16 up to 256, digests of the cache's type");
  }
  const auto first_block = [&](int64_t r) {
    return (p.first_positions != nullptr ? p.first_positions[r] : p.positions[r]) / c.block_tokens;
  };
  const auto items = [&](int64_t r) {
    const int64_t last = p.positions[r];
    if (p.slots[r] < 0) return int64_t{0};
    return (last / c.block_tokens + 1 - first_block(r)) * c.kv_heads;
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) total += items(r);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t r = 0; r < p.rows && before < mine.end; ++r) {
    const int64_t count = items(r);
    for (int64_t i = Max(mine.begin - before, 0); i < Min(mine.end - before, count); ++i) {
      DigestBlock<S>(p, r, first_block(r) + i / c.kv_heads, i % c.kv_heads);
    }
    before += count;
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
