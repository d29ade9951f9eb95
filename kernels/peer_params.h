// Contracts of the collectives among GPUs that reach one another's memory: each rank writes what
// the others need straight into their memory, and no host thread takes part.
// src/device/rank_group.h says what the collectives compute.
//
// Every rank has an *area*, which all ranks map: PeerWords, then for each of two parities and each
// rank a slot, into which that rank writes. The operations of a group are numbered from 1 by a
// counter in each rank's own area, which every operation moves on, so that a recorded operation has
// another number in every run. Data travels in packs of 16 bytes: 12 of data, and the operation's
// number, which says that they are there. A pack is written and read by one access of 16 bytes, so
// its number never comes without its data.
//
// Two slots for each source, which operations use in turn, are enough. An operation ends on a rank
// when it has something from every other rank, and a rank sends its part of operation n when its
// operation n - 1 has ended. So when some rank has ended operation n - 1 and writes into a slot for
// operation n, every rank has begun n - 1, and has therefore ended n - 2 and read its slots, which
// are those that n writes.
//
// The number wraps after 2^32 operations. A pack that was last written exactly so many operations
// ago would be taken for a new one: that is days of decoding without any operation as large.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels {

inline constexpr int32_t kMaxPeerRanks = 8;
inline constexpr int32_t kMaxPeerParts = 16;  // blocks that take one rank's part of an all-to-all
inline constexpr int64_t kPackBytes = 16;
inline constexpr int64_t kPackDataBytes = 12;

// The words at the beginning of an area, all 0 at first.
struct PeerWords {
  // The rank's own.
  alignas(128) uint32_t operations;  // that have begun
  uint32_t failed;                   // not 0: later operations do nothing
  uint32_t readers;                  // blocks of the running operation that know its number
  // The others write these, in an all-to-all.
  alignas(128) uint32_t ready[kMaxPeerRanks];  // the operation for which a rank takes data
  // For each source and part: the operation whose data is there << 32, and the source's count.
  alignas(128) uint64_t arrived[kMaxPeerRanks][kMaxPeerParts];
};
inline constexpr int64_t kPeerSlots = 4096;  // where an area's slots begin
static_assert(sizeof(PeerWords) <= kPeerSlots);

// Returns the bytes of a slot for operands of up to `bytes`.
constexpr int64_t PeerSlotBytes(int64_t bytes) {
  return ((bytes + kPackDataBytes - 1) / kPackDataBytes * kPackBytes + 127) / 128 * 128;
}
constexpr int64_t PeerAreaBytes(int32_t size, int64_t slot_bytes) {
  return kPeerSlots + 2 * size * slot_bytes;
}

constexpr int64_t LeastStagedPacks(int32_t size) { return int64_t{size} * (size - 1); }

// A group of ranks as one of them sees it.
struct PeerGroup {
  void* areas[kMaxPeerRanks];  // [size] every rank's area; all begin at multiples of 128 bytes
  const uint32_t* stop;        // pinned; not 0: operations end without a result
  int64_t slot_bytes;
  int32_t rank;
  int32_t size;  // 2 to kMaxPeerRanks
};

// Computes out[i] = the sum of all ranks' in[i], in float32, rank 0 first, rounded once: the same
// bits on every rank, whatever `count` and `stages` are. PeerSlotBytes of the operand is at most
// slot_bytes. In two stages each rank adds a part and sends it to the others; an operand then has
// at least LeastStagedPacks, so that every rank has a part.
struct PeerAllReduceParams {
  PeerGroup group;
  const void* in;  // [count]
  void* out;       // [count]; may be `in`
  int64_t count;
  DType type;          // float32 or bf16
  int32_t max_blocks;  // thread blocks at most; 0: as many as are of use
  int32_t stages = 1;  // 1 or 2; the same on every rank
};

// Computes out[r] = rank r's `in`.
struct PeerAllGatherParams {
  PeerGroup group;
  const void* in;  // [bytes]; may be this rank's part of `out`
  void* out;       // [size][bytes]
  int64_t bytes;   // PeerSlotBytes of it is at most slot_bytes
  int32_t max_blocks;
};

// Moves the first send_counts[b] units of every block b of `send` to block `rank` of rank b's
// `receive`, rounded up to 16 bytes. It writes into a rank's `receive` once that rank has begun
// the operation. Pointers and the bytes of a block are multiples of 16.
struct PeerAllToAllParams {
  PeerGroup group;
  const void* send;               // [size][capacity] units
  const int32_t* send_counts;     // [size]
  void* receives[kMaxPeerRanks];  // [size] every rank's `receive`, [size][capacity] units
  int32_t* receive_counts;        // [size]
  int32_t capacity;
  int32_t unit_bytes;
};

}  // namespace sluice::kernels
