#include "src/service/wire/chunking.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <string>

#include "absl/strings/string_view.h"

namespace sluice {
namespace {

CacheKind Kind() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 3;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 256);
  return kind;
}

// Returns packed index keys (kernels/latent_params.h).
CacheKind IndexKind() {
  CacheKind kind;
  kind.name = "index";
  kind.element_type = DType::kFloat8E4M3;
  kind.heads = 1;
  kind.block_tokens = 32;
  kind.part_bytes = {128, 4};
  kind.bytes_per_token = 132;
  return kind;
}

TEST_CASE("chunks cover the range once, on blocks, within the limit") {
  const CacheKind kind = GENERATE(Kind(), IndexKind());
  const auto heads = static_cast<uint32_t>(kind.heads);
  const auto limit = GENERATE(as<uint64_t>(), 8192, 8193, 20000, 24576, 50000, 1 << 20);
  for (const int end : {33, 64, 100, 257, 512}) {
    INFO("limit " << limit << ", tokens [32, " << end << ")");
    const auto chunks = PlanChunks(kind, 32, end, limit);
    REQUIRE(chunks.ok());
    uint64_t offset = 0;
    uint64_t cells = 0;
    for (const ChunkPlan& chunk : *chunks) {
      CHECK(chunk.bytes <= limit);
      CHECK(chunk.bytes > 0);
      CHECK(chunk.offset == offset);
      CHECK(chunk.token_begin % 32 == 0);
      CHECK((chunk.token_end % 32 == 0 || chunk.token_end == static_cast<uint32_t>(end)));
      // A chunk may have part of the heads only within one block; otherwise the payload would not
      // lie together.
      if (chunk.head_end - chunk.head_begin < heads)
        CHECK(chunk.token_end - chunk.token_begin <= 32);
      offset += chunk.bytes;
      cells += uint64_t{chunk.token_end - chunk.token_begin} * (chunk.head_end - chunk.head_begin);
    }
    CHECK(cells == static_cast<uint64_t>(end - 32) * heads);
    CHECK(offset == cells * static_cast<uint64_t>(kind.bytes_per_token));
  }
}

TEST_CASE("a limit below one head's block is refused with the remedy") {
  const auto chunks = PlanChunks(Kind(), 0, 32, 8191);
  CHECK(absl::IsFailedPrecondition(chunks.status()));
  CHECK_THAT(std::string(chunks.status().message()), Catch::Contains("max_chunk_bytes"));
}

TEST_CASE("a range is copied across pieces") {
  const std::string a = "abc", b = "", c = "defgh";
  const auto span = [](const std::string& s) {
    return absl::Span<const uint8_t>(reinterpret_cast<const uint8_t*>(s.data()), s.size());
  };
  const std::vector<absl::Span<const uint8_t>> pieces = {span(a), span(b), span(c)};
  const std::string all = a + b + c;
  for (uint64_t offset = 0; offset <= all.size(); ++offset) {
    for (uint64_t bytes = 0; offset + bytes <= all.size(); ++bytes) {
      CHECK(CopyRange(pieces, offset, bytes) == all.substr(offset, bytes));
    }
  }
}

TEST_CASE("chunks of some heads have their bytes, in the payload's order") {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 3;
  kind.block_tokens = 4;
  kind.SetEqualParts(1, 2);
  // Tokens [4, 14) of all heads, whose bytes say head and token: two blocks, and two tokens more.
  std::string layer;
  for (int begin = 4; begin < 14; begin += 4) {
    for (int head = 0; head < 3; ++head) {
      for (int token = begin; token < std::min(begin + 4, 14); ++token) {
        layer.append(2, static_cast<char>(head * 32 + token));
      }
    }
  }
  const auto* const bytes = reinterpret_cast<const uint8_t*>(layer.data());
  const std::vector<absl::Span<const uint8_t>> pieces = {{bytes, 7}, {bytes + 7, layer.size() - 7}};
  for (const HeadRange heads : {HeadRange{0, 3}, {0, 1}, {1, 3}, {2, 3}}) {
    for (const uint64_t limit : {8, 16, 24, 1000}) {
      for (const int from : {0, 8}) {
        const auto chunks = PlanChunksOfHeads(kind, 4, 14, from, limit, heads);
        REQUIRE(chunks.ok());
        uint64_t cells = 0;
        for (const ChunkPlan& chunk : *chunks) {
          CHECK((chunk.head_begin >= heads.begin && chunk.head_end <= heads.end));
          std::string want;
          for (uint32_t begin = chunk.token_begin; begin < chunk.token_end; begin += 4) {
            for (uint32_t head = chunk.head_begin; head < chunk.head_end; ++head) {
              for (uint32_t token = begin; token < std::min(begin + 4, chunk.token_end); ++token) {
                want.append(2, static_cast<char>(head * 32 + token));
              }
            }
          }
          CHECK(CopyChunk(kind, 4, chunk, pieces) == want);
          CHECK((chunk.bytes == want.size() && chunk.bytes <= limit));
          cells += want.size() / 2;
        }
        CHECK(cells == static_cast<uint64_t>(14 - std::max(from, 4)) * (heads.end - heads.begin));
      }
    }
  }
}

TEST_CASE("a chunk overlaps a missing range only where heads and tokens both do") {
  ChunkPlan chunk;
  chunk.head_begin = 1;
  chunk.head_end = 3;
  chunk.token_begin = 32;
  chunk.token_end = 64;
  CHECK(Overlaps(0, "kv", chunk, {{0, "kv", 2, 4, 0, 33}}));
  CHECK_FALSE(Overlaps(0, "kv", chunk, {{0, "kv", 3, 4, 0, 64}}));
  CHECK_FALSE(Overlaps(1, "kv", chunk, {{0, "kv", 2, 4, 0, 33}}));
  CHECK_FALSE(Overlaps(0, "index", chunk, {{0, "kv", 2, 4, 0, 33}}));
  CHECK_FALSE(Overlaps(0, "kv", chunk, {{0, "kv", 0, 4, 64, 96}}));
  CHECK_FALSE(Overlaps(0, "kv", chunk, {{0, "kv", 0, 1, 32, 64}}));
}

}  // namespace
}  // namespace sluice
