// This file declares the contract of the operator with which a device takes units out of a ring in
// pinned memory, while CPU workers fill that (src/attention/offload/gather_mover.cc).
//
// Each worker has a ring of its own, of `depth` places for *bundles* of units. Bundle b of a round,
// counted from 0, lies in place b % depth. A place has one word, which the two sides write in
// turns: the worker puts RingWord(b, units) there, with release, once the bundle is written, and
// the device puts 0 there once it has read the bundle. So all words are 0 between two rounds.
#pragma once

#include <cstdint>

namespace sluice::kernels {

inline constexpr int32_t kMostBundleUnits = 32;
inline constexpr int32_t kMostRingWorkers = 64;

// One to a cache line, since threads on both sides of the link wait for different ones.
struct alignas(64) RingWord {
  uint32_t value;
};

// Returns the word of bundle number `bundle` with `units` units, from 1 to kMostBundleUnits. It is
// never 0. Numbers wrap around, far beyond the depth of a ring.
constexpr uint32_t RingWordOf(int64_t bundle, int32_t units) {
  return static_cast<uint32_t>(bundle) * (2 * kMostBundleUnits) + static_cast<uint32_t>(units);
}
// Returns the units of bundle number `bundle` if `word` says that it is there, or else 0.
constexpr int32_t RingUnits(uint32_t word, int64_t bundle) {
  const uint32_t units = word - RingWordOf(bundle, 0);
  return units <= kMostBundleUnits ? static_cast<int32_t>(units) : 0;
}

// Copies every unit of every bundle to unit target_units[entry] of the target, where `entry` is the
// bundle's word for the unit. A negative entry or target is skipped. It takes a worker's bundles in
// order, waits for none of another worker, and ends when the round is over and nothing is left in
// the rings: a worker that has ended its round early, or never began it, holds up nobody.
//
// Every address and pitch is a multiple of 4. Bytes move in pieces of 16 where all are multiples of
// 16. Parts are those of TransferParams, and lie one behind the other in a ring.
struct TakeRingParams {
  const void* units;       // [workers][depth] bundles of `place_bytes`, in pinned memory
  const int32_t* entries;  // [workers][depth][kMostBundleUnits], in pinned memory
  RingWord* words;         // [workers][depth], in pinned memory
  // 0: the round is over, and workers write nothing more. Null: it was over before the operator.
  const uint32_t* open;
  void* target;
  int64_t target_pitch;         // bytes between units
  const int32_t* target_units;  // what entries number
  int64_t place_bytes;          // bytes between bundles
  int64_t part_pitch;           // bytes between the parts of a unit of the target
  int32_t workers;              // at most kMostRingWorkers
  int32_t depth;
  int32_t unit_bytes;  // of one part
  int32_t parts;
  // As in TransferParams. It takes more where there would be fewer groups of threads than workers.
  int32_t max_workers;
};

}  // namespace sluice::kernels
