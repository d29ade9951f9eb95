// The arithmetic of Fluxion's default set and of its selector (Fluxion, sections 3.2 and 5.3; the
// paper is arXiv 2605.07719). A row attends to three segments of its sequence: the *sink* and the
// *local* tokens, which always lie in HBM, and the *cpu* tokens between them, of which it attends
// to blocks. Blocks have 16, 32, 64 or 128 tokens; these sizes are *levels* 0 to 3.
#pragma once

#include <cstdint>

namespace sluice::kernels {

inline constexpr int32_t kFluxionSinkTokens = 64;
inline constexpr int32_t kFluxionLocalTokens = 256;
inline constexpr int32_t kFluxionLevels = 4;
inline constexpr int32_t kFluxionLargestBlock = 128;

// Segments of a row: sink [0, sink), cpu [sink, local) and local [local, end). Blocks begin at
// multiples of their size, counted from the sequence's first token. So that none straddles two
// segments, `local` is a multiple of the largest block (or `sink`), and a long row has 256 to 383
// local tokens. The first block of 128 tokens lacks the sink's.
struct FluxionSegments {
  int32_t sink = 0, local = 0, end = 0;
};

// Functions have internal linkage for the reason that scalar.h gives.
namespace {

// Returns the tokens of a block at the level.
constexpr int32_t LevelTokens(int32_t level) { return 16 << level; }

// Returns the segments of the row at `position`.
constexpr FluxionSegments SegmentsOf(int32_t position) {
  const int32_t tokens = position + 1;
  const int32_t sink = tokens < kFluxionSinkTokens ? tokens : kFluxionSinkTokens;
  const int32_t local =
      (tokens - kFluxionLocalTokens) / kFluxionLargestBlock * kFluxionLargestBlock;
  return {sink, local > sink ? local : sink, tokens};
}

constexpr int32_t CpuTokens(const FluxionSegments& s) { return s.local - s.sink; }

// Return the blocks [first, end) that the cpu segment has at the level.
constexpr int32_t FirstBlock(const FluxionSegments& s, int32_t level) {
  return s.sink / LevelTokens(level);
}
constexpr int32_t EndBlock(const FluxionSegments& s, int32_t level) {
  return (CpuTokens(s) == 0 ? s.sink : s.local) / LevelTokens(level);
}
constexpr int32_t CpuBlocks(const FluxionSegments& s, int32_t level) {
  return EndBlock(s, level) - FirstBlock(s, level);
}

// Returns the blocks that a share of the cpu segment is: rounded up, at most all. A share that is
// not a number is all of them, so that a failed prediction loses nothing.
constexpr int32_t BlocksOfShare(const FluxionSegments& s, int32_t level, float share) {
  const int32_t blocks = CpuBlocks(s, level);
  if (!(share < 1)) return blocks;
  if (!(share > 0)) return 0;
  const float exact =
      share * static_cast<float>(CpuTokens(s)) / static_cast<float>(LevelTokens(level));
  const auto whole = static_cast<int32_t>(exact);
  const int32_t wanted = static_cast<float>(whole) < exact ? whole + 1 : whole;
  return wanted < blocks ? wanted : blocks;
}

// Returns how many of `count` units are the first share of them: rounded up.
constexpr int32_t FirstUnits(int32_t count, float share) {
  const float exact = static_cast<float>(count) * share;
  const auto whole = static_cast<int32_t>(exact);
  const int32_t wanted = static_cast<float>(whole) < exact ? whole + 1 : whole;
  return wanted < count ? wanted : count;
}

}  // namespace
}  // namespace sluice::kernels
