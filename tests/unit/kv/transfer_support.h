// A transfer table over small pools, and transfers whose bytes show where they belong.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "src/base/crc32c.h"
#include "src/base/manual_clock.h"
#include "src/base/rng.h"
#include "src/kv/transfer_table.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {

inline constexpr uint32_t kContext =
    21;  // with blocks of 4 and of 8 tokens the last block is short in both kinds

struct Table {
  using FootprintOf = Footprint (*)(int64_t context, int64_t total);
  static Footprint Whole(int64_t context, int64_t total) { return {context, total}; }

  explicit Table(size_t dram_bytes = 256 << 10, int64_t hint_tokens = 0,
                 FootprintOf footprint = &Whole, int64_t hint_queries = 0)
      : layout(TwoKinds()),
        dram(MakePool("dram", layout, dram_bytes)),
        hbm(MakePool("hbm", layout, 256 << 10)) {
    TransferTable::Options options;
    options.model_fingerprint = "f00d";
    options.vocab_size = 100;
    options.max_context = 1000;
    options.max_lease = absl::Seconds(10);
    options.max_chunk_bytes = 4096;
    options.hint_tokens = hint_tokens;
    options.hint_queries = hint_queries;
    options.footprint = footprint;
    table = std::make_unique<TransferTable>(options, dram.get(), hbm.get(), &clock);
  }

  Manifest Good() const {
    Manifest manifest;
    manifest.model_fingerprint = "f00d";
    manifest.cache_kinds = layout.kinds;
    manifest.context_length = kContext;
    manifest.prompt_token_ids.assign(kContext, 5);
    manifest.max_new_tokens = 10;
    return manifest;
  }

  std::string Reserve() {
    const auto reserved = table->Reserve(Good());
    INFO(std::string(reserved.status().ToString()));
    REQUIRE(reserved.ok());
    return reserved->transfer_id;
  }

  uint64_t PayloadBytes(const ChunkHeader& h) const {
    const CacheKind& kind = layout.kinds[static_cast<size_t>(layout.FindKind(h.kind))];
    return uint64_t{h.token_end - h.token_begin} * (h.head_end - h.head_begin) *
           static_cast<uint64_t>(kind.bytes_per_token);
  }

  // Returns byte `i` of a chunk's payload, which follows from where it belongs, so that a misplaced
  // byte shows.
  std::vector<uint8_t> Payload(const ChunkHeader& h) const {
    SplitMix64 random(h.layer * 1000003u + h.head_begin * 10007u + h.token_begin * 101u +
                      (h.kind == "kv" ? 1u : 2u));
    std::vector<uint8_t> bytes(PayloadBytes(h));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
  }

  absl::StatusOr<uint64_t> Land(ChunkHeader h, const std::vector<uint8_t>& payload) {
    h.crc32c = Crc32c(payload);
    auto landing = table->BeginChunk(h, payload.size());
    if (!landing.ok()) return landing.status();
    (*landing)->Append(payload);
    return (*landing)->Finish();
  }

  // Returns one chunk for each block of each head, which is every block of the transfer.
  std::vector<ChunkHeader> AllChunks(const std::string& id) const {
    std::vector<ChunkHeader> chunks;
    for (const CacheKind& kind : layout.kinds) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t head = 0; head < static_cast<uint32_t>(kind.heads); ++head) {
          for (uint32_t begin = 0; begin < kContext;
               begin += static_cast<uint32_t>(kind.block_tokens)) {
            const uint32_t end =
                std::min(begin + static_cast<uint32_t>(kind.block_tokens), kContext);
            chunks.push_back({id, layer, kind.name, head, head + 1, begin, end, 0});
          }
        }
      }
    }
    return chunks;
  }

  std::string ReserveAndFill() {
    const std::string id = Reserve();
    for (const ChunkHeader& chunk : AllChunks(id)) REQUIRE(Land(chunk, Payload(chunk)).ok());
    return id;
  }

  // Returns whether every byte of the transfer's caches is where it belongs.
  bool Intact(const SequenceCache& home, const std::string& id) const {
    for (const ChunkHeader& chunk : AllChunks(id)) {
      HomeRange range;
      range.layer = static_cast<int>(chunk.layer);
      range.kind = static_cast<size_t>(layout.FindKind(chunk.kind));
      range.head_begin = static_cast<int>(chunk.head_begin);
      range.head_end = static_cast<int>(chunk.head_end);
      range.token_begin = chunk.token_begin;
      range.token_end = chunk.token_end;
      const std::vector<uint8_t> want = Payload(chunk);
      auto at = want.begin();
      bool same = true;
      home.ForEachPiece(range, [&](const HomePiece& piece) {
        same = same && std::equal(piece.data, piece.data + piece.bytes, at);
        at += static_cast<int64_t>(piece.bytes);
      });
      if (!same) return false;
    }
    return true;
  }

  bool Empty() const {
    for (size_t kind = 0; kind < 2; ++kind) {
      if (dram->UsageOf(kind).reserved_bytes != 0 || dram->UsageOf(kind).used_bytes != 0) {
        return false;
      }
    }
    return table->open_transfers() == 0;
  }

  uint64_t Reap() {
    uint64_t expired = 0;
    table->Reap(&expired);
    return expired;
  }

  const CacheLayout layout;
  ManualClock clock;
  std::unique_ptr<PagePool> dram, hbm;
  std::unique_ptr<TransferTable> table;
};

inline HandoffRef ById(const std::string& id) {
  HandoffRef ref;
  ref.transfer_id = id;
  return ref;
}

inline HandoffRef ByKey(const std::string& key, const std::string& tenant = "") {
  HandoffRef ref;
  ref.rendezvous_key = key;
  ref.tenant = tenant;
  return ref;
}

}  // namespace sluice
