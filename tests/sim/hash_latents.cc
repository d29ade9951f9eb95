#include "tests/sim/hash_latents.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/latent_layout.h"
#include "tests/sim/hash.h"

namespace sluice::sim {
namespace {

constexpr size_t kEntryBytes = kEntryWords * 8;
constexpr size_t kKeyBytes = kKeyWords * 8;

// Returns the address of a key. Keys are shorter here than kernels::kIndexDim elements; the rest is
// as in any cache.
uint8_t* KeyAddress(const kernels::PagedIndexKeys& cache, int64_t slot, int64_t position) {
  const int32_t page = cache.block_table[slot * cache.table_stride + position / cache.block_tokens];
  return static_cast<uint8_t*>(cache.base) + page * cache.page_bytes +
         position % cache.block_tokens * static_cast<int64_t>(kKeyBytes);
}

void AppendEntry(const kernels::LatentAppendParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0) continue;
    const float* const from = p.kv + r * p.kv_stride;
    if (p.written != nullptr) {
      std::memcpy(static_cast<uint8_t*>(p.written) + r * static_cast<int64_t>(kEntryBytes), from,
                  kEntryBytes);
    }
    if (p.cache.base == nullptr) continue;
    const int64_t place = p.place_of.base == nullptr
                              ? p.positions[r]
                              : *kernels::TableRow(p.place_of, p.slots[r], p.positions[r]);
    if (place < 0) continue;
    std::memcpy(
        static_cast<uint8_t*>(p.cache.base) + kernels::EntryOffset(p.cache, p.slots[r], place),
        from, kEntryBytes);
  }
}

void AppendKey(const kernels::IndexAppendParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0) continue;
    const float* const from = p.k + r * p.k_stride;
    if (p.written != nullptr) {
      std::memcpy(static_cast<uint8_t*>(p.written) + r * static_cast<int64_t>(kKeyBytes), from,
                  kKeyBytes);
    }
    if (p.cache.base == nullptr) continue;
    std::memcpy(KeyAddress(p.cache, p.slots[r], p.positions[r]), from, kKeyBytes);
  }
}

void ScoreKeys(const kernels::IndexLogitsParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0) continue;
    uint64_t query;
    std::memcpy(&query, static_cast<const float*>(p.q) + r * p.heads * kernels::kIndexDim,
                sizeof(query));
    for (int64_t position = 0; position <= p.positions[r]; ++position) {
      uint64_t key[kKeyWords];
      std::memcpy(key, KeyAddress(p.cache, p.slots[r], position), kKeyBytes);
      p.scores[r * p.score_stride + position] = IndexScore(query, WordsHash(key, kKeyWords));
    }
  }
}

// A head's result is the sum over the entries of the list, so parts add up.
void HashEntries(const kernels::SparseMlaParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    int64_t count = p.slots[r] < 0 ? 0 : p.counts[r];
    count = count < 0 ? 0 : count > p.capacity ? p.capacity : count;
    for (int head = 0; head < p.heads; ++head) {
      uint64_t sum = 0;
      bool empty = count == 0;
      const int64_t at = r * p.heads + head;
      if (p.other_o != nullptr && !std::isinf(p.other_lse[at])) {
        std::memcpy(&sum, p.other_o + at * p.cache.rank, sizeof(sum));
        empty = false;
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t entry = p.entries == nullptr ? i : p.entries[r * p.capacity + i];
        uint64_t words[kEntryWords];
        std::memcpy(words,
                    static_cast<const uint8_t*>(p.cache.base) +
                        kernels::EntryOffset(p.cache, p.slots[r], entry),
                    kEntryBytes);
        sum += EntryHash(words, head);
      }
      std::memcpy(static_cast<float*>(p.out) + at * p.cache.rank, &sum, sizeof(sum));
      if (p.lse != nullptr) p.lse[at] = empty ? -std::numeric_limits<float>::infinity() : 0;
    }
  }
}

void NothingToMerge(const kernels::SparseMlaParams&, kernels::Worker) {}

}  // namespace

void UseLatentHashes(kernels::KernelTable* table) {
  table->latent_append = &AppendEntry;
  table->index_append = &AppendKey;
  table->index_logits = &ScoreKeys;
  table->sparse_mla = &HashEntries;
  table->sparse_mla_merge = &NothingToMerge;
}

}  // namespace sluice::sim
