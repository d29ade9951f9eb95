#include "src/service/wire/chunking.h"

#include <algorithm>
#include <climits>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

v1::ChunkHeader HeaderOf(int layer, const std::string& kind, const ChunkPlan& chunk) {
  v1::ChunkHeader header;
  header.set_layer(static_cast<uint64_t>(layer));
  header.set_kind(kind);
  header.set_head_begin(chunk.head_begin);
  header.set_head_end(chunk.head_end);
  header.set_token_begin(chunk.token_begin);
  header.set_token_end(chunk.token_end);
  return header;
}

absl::StatusOr<std::vector<ChunkPlan>> PlanChunks(const CacheKind& kind, int token_begin,
                                                  int token_end, uint64_t max_chunk_bytes) {
  SLUICE_CHECK(token_begin >= 0 && token_begin < token_end && token_begin % kind.block_tokens == 0,
               "tokens [", token_begin, ", ", token_end, ") with blocks of ", kind.block_tokens);
  const auto block_bytes = static_cast<uint64_t>(kind.block_bytes());
  const auto page_bytes = static_cast<uint64_t>(kind.page_bytes());
  if (block_bytes > max_chunk_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("one block of cache kind ", kind.name, " takes ", block_bytes,
                     " bytes, more than the decode node's max_chunk_bytes of ", max_chunk_bytes,
                     ": raise that setting"));
  }
  // A chunk has all heads of `pages` blocks or, where not even one page fits, `heads` heads of one
  // block.
  const auto pages = static_cast<int>(std::min<uint64_t>(max_chunk_bytes / page_bytes, INT_MAX));
  const int heads = pages > 0 ? kind.heads : static_cast<int>(max_chunk_bytes / block_bytes);
  const int64_t step = static_cast<int64_t>(std::max(pages, 1)) * kind.block_tokens;
  std::vector<ChunkPlan> out;
  uint64_t offset = 0;
  for (int64_t begin = token_begin; begin < token_end; begin += step) {
    const int64_t end = std::min<int64_t>(begin + step, token_end);
    for (int head = 0; head < kind.heads; head += heads) {
      const int head_end = std::min(head + heads, kind.heads);
      ChunkPlan chunk;
      chunk.head_begin = static_cast<uint32_t>(head);
      chunk.head_end = static_cast<uint32_t>(head_end);
      chunk.token_begin = static_cast<uint32_t>(begin);
      chunk.token_end = static_cast<uint32_t>(end);
      chunk.offset = offset;
      chunk.bytes = static_cast<uint64_t>((end - begin) * kind.bytes_per_token * (head_end - head));
      offset += chunk.bytes;
      out.push_back(chunk);
    }
  }
  return out;
}

absl::StatusOr<std::vector<ChunkPlan>> PlanChunksFrom(const CacheKind& kind, int token_begin,
                                                      int token_end, int64_t from,
                                                      uint64_t max_chunk_bytes) {
  if (from >= token_end) return std::vector<ChunkPlan>();
  const int begin =
      std::max(token_begin, static_cast<int>(from / kind.block_tokens * kind.block_tokens));
  SLUICE_ASSIGN_OR_RETURN(std::vector<ChunkPlan> chunks,
                          PlanChunks(kind, begin, token_end, max_chunk_bytes));
  const auto skipped =
      static_cast<uint64_t>((begin - token_begin) * kind.bytes_per_token * kind.heads);
  for (ChunkPlan& chunk : chunks) chunk.offset += skipped;
  return chunks;
}

absl::StatusOr<std::vector<ChunkPlan>> PlanChunksOfHeads(const CacheKind& kind, int token_begin,
                                                         int token_end, int64_t from,
                                                         uint64_t max_chunk_bytes,
                                                         HeadRange heads) {
  CacheKind part = kind;
  part.heads = static_cast<int>(heads.end - heads.begin);
  SLUICE_ASSIGN_OR_RETURN(std::vector<ChunkPlan> chunks,
                          PlanChunksFrom(part, token_begin, token_end, from, max_chunk_bytes));
  for (ChunkPlan& chunk : chunks) {
    chunk.head_begin += heads.begin;
    chunk.head_end += heads.begin;
  }
  return chunks;
}

bool Overlaps(uint32_t layer, const std::string& kind, const ChunkPlan& chunk,
              const std::vector<MissingRange>& ranges) {
  return std::any_of(ranges.begin(), ranges.end(), [&](const MissingRange& range) {
    return range.layer == layer && range.kind == kind && chunk.head_begin < range.head_end &&
           range.head_begin < chunk.head_end && chunk.token_begin < range.token_end &&
           range.token_begin < chunk.token_end;
  });
}

std::vector<absl::Span<const uint8_t>> PiecesOfRange(
    absl::Span<const absl::Span<const uint8_t>> pieces, uint64_t offset, uint64_t bytes) {
  std::vector<absl::Span<const uint8_t>> out;
  for (const absl::Span<const uint8_t> piece : pieces) {
    if (bytes == 0) break;
    if (offset >= piece.size()) {
      offset -= piece.size();
      continue;
    }
    const uint64_t take = std::min<uint64_t>(bytes, piece.size() - offset);
    out.push_back(piece.subspan(offset, take));
    offset = 0;
    bytes -= take;
  }
  SLUICE_CHECK(bytes == 0, "the pieces end ", bytes, " bytes early");
  return out;
}

std::string CopyRange(absl::Span<const absl::Span<const uint8_t>> pieces, uint64_t offset,
                      uint64_t bytes) {
  std::string out;
  out.reserve(bytes);
  for (const absl::Span<const uint8_t> piece : PiecesOfRange(pieces, offset, bytes)) {
    out.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return out;
}

std::string CopyChunk(const CacheKind& kind, int token_begin, const ChunkPlan& chunk,
                      absl::Span<const absl::Span<const uint8_t>> pieces) {
  const auto token_bytes = static_cast<uint64_t>(kind.bytes_per_token);
  const auto heads = static_cast<uint64_t>(kind.heads);
  const uint64_t skipped = chunk.token_begin - static_cast<uint32_t>(token_begin);
  const uint64_t tokens = chunk.token_end - chunk.token_begin;
  if (chunk.head_begin == 0 && chunk.head_end == heads) {
    return CopyRange(pieces, skipped * heads * token_bytes, tokens * heads * token_bytes);
  }
  std::string out;
  out.reserve(chunk.bytes);
  const auto block_tokens = static_cast<uint64_t>(kind.block_tokens);
  for (uint64_t begin = 0; begin < tokens; begin += block_tokens) {
    const uint64_t block = std::min(block_tokens, tokens - begin);
    out += CopyRange(pieces, ((skipped + begin) * heads + chunk.head_begin * block) * token_bytes,
                     (chunk.head_end - chunk.head_begin) * block * token_bytes);
  }
  return out;
}

}  // namespace sluice
