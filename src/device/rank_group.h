// RankGroup lets the ranks of a group (one process each, one device each) compute together: sums,
// gathers and exchanges over memory of their devices. The operations are enqueued on a stream, as
// operators are, and may be recorded into a program.
//
// The contract. All ranks of a group call the same operations in the same order, with the same
// sizes and types, and those operations are ordered on their device (one stream, or streams that
// wait for one another). Results are the same bits on every rank. (Send and Receive concern two
// ranks only, each of which calls its side.) An operation waits on the device for the other ranks.
//
// Failure. If a rank ends, or does not come to an operation before the deadline, the group has
// failed on every rank for good: the operations that wait end, later ones do nothing, and the
// device's Health() is UNAVAILABLE, reason RANK_LOST, with a message that names a rank. Nothing
// hangs.
//
// Device::JoinRanks makes one. The engine's thread enqueues; any thread may ask for status().
// Streams with operations of the group and programs that hold some end before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/dtype.h"
#include "src/device/device.h"

namespace sluice {

class RankMembers;

struct RankGroupOptions {
  int rank = 0;
  int size = 1;
  // The name under which the ranks of one host meet, unique among the groups of that host; letters,
  // digits, '-' and '_'.
  std::string name;
  // The ranks have met already, perhaps from several hosts, and know one another by this, which
  // outlives the group. Null: they meet in the memory of one host.
  RankMembers* members = nullptr;
  // The time within which all ranks must have joined.
  absl::Duration join_timeout = absl::Seconds(60);
  // The time for which an operation waits for a rank that is alive. A rank that has ended is
  // noticed in a tenth of a second. On a CUDA device no event of the device, of other work too, may
  // take longer, but for those of links to other nodes.
  absl::Duration deadline = absl::Seconds(30);
  // A rank whose process stands still for so long, stopped or without a cpu, is lost.
  absl::Duration still_limit = absl::Seconds(3);
  // On the CPU device a rank shows the others this many bytes at a time. Larger operations go in
  // rounds.
  size_t round_bytes = size_t{256} << 10;
  // CUDA devices of one host write into one another's memory, where they can, in an all-reduce or
  // all-gather of up to this many bytes for each other rank, and in an all-to-all of registered
  // buffers. What is larger goes by NCCL. 0: everything does. The same on every rank.
  size_t peer_bytes = size_t{4} << 20;
  // There, an all-reduce of at least so many bytes goes in two stages: a rank sends 2 / size of
  // what it sends in one, and waits twice. The same on every rank. If it is not set, it is
  // kTwoStageBytes, and two ranks, which would send as much as in one stage, have one.
  std::optional<size_t> two_stage_bytes;
};

// Four H200s sum more bytes than these faster in two stages, and fewer in one (sluice-ranks-bench).
inline constexpr size_t kTwoStageBytes = size_t{256} << 10;

// INVALID_ARGUMENT names the option that is out of range.
absl::Status CheckRankGroupOptions(const RankGroupOptions& options);
inline constexpr int kMaxRanks = 64;

// This is an exchange of units whose numbers only the device knows. Rank a's block b of `send` goes
// to rank b's block a of `receive`. Of a block the first counts[b] units count; the others of
// `receive` stay as they are, or are overwritten. `send` and `receive` begin at multiples of 16
// bytes.
struct AllToAllParams {
  const void* send = nullptr;            // [size][capacity] units
  const int32_t* send_counts = nullptr;  // [size], each in [0, capacity]
  void* receive = nullptr;               // [size][capacity] units
  int32_t* receive_counts = nullptr;     // [size]
  int32_t capacity = 0;                  // units of a block
  int32_t unit_bytes = 0;
};

enum class Collective {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kSend,
  kReceive
};
inline constexpr int kCollectives = 7;
// Returns "all-reduce", ...
const char* CollectiveName(Collective kind);

// This counts how often an operation was enqueued, and the bytes of its operands on this rank: of
// the buffer that is reduced, of the rank's own part that is gathered, of all that is scattered or
// exchanged. An operation of a CUDA program counts once, when the program is recorded.
struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;
};

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Enqueues out[i] = the sum of all ranks' in[i]. `type` is float32 or bf16; the CPU device sums
  // in float32, rank 0 first, and rounds once. `out` may be `in`.
  void AllReduce(Stream& stream, const void* in, void* out, int64_t count, DType type);
  // Enqueues out[r] = rank r's `in`. `out` is [size][bytes]; `in` may be this rank's part of it.
  void AllGather(Stream& stream, const void* in, void* out, size_t bytes);
  // Enqueues out = this rank's part of the sum of all ranks' `in`, which is [size][count]. `out` is
  // [count], and may be this rank's part of `in`.
  void ReduceScatter(Stream& stream, const void* in, void* out, int64_t count, DType type);
  void AllToAll(Stream& stream, const AllToAllParams& params);
  // Enqueues data = rank `root`'s data.
  void Broadcast(Stream& stream, void* data, size_t bytes, int root);
  // A Send ends when its data may be overwritten, which may be not before the other rank's Receive:
  // two ranks that send to each other must not both send first.
  void Send(Stream& stream, const void* data, size_t bytes, int to);
  void Receive(Stream& stream, void* data, size_t bytes, int from);

  // Says that operations will often have operands in [data, data + bytes), which outlives the group
  // and is the same size on every rank. All ranks call it, in the same order; it may wait for the
  // others. A device may then move them without copies; results do not depend on it. An operand in
  // it begins at the same place of it on every rank.
  virtual absl::Status Register(void* /*data*/, size_t /*bytes*/) { return absl::OkStatus(); }
  // Fails the group on every rank with `why`. Any thread.
  virtual void Abort(const std::string& why) = 0;
  // Returns OK, or why the group has failed. Any thread.
  virtual absl::Status status() const = 0;
  // Returns the number of ranks that have neither ended nor failed the group. Any thread.
  virtual int alive() const { return size_; }

  CollectiveCount count(Collective kind) const { return counts_[static_cast<size_t>(kind)]; }

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

 protected:
  RankGroup(int rank, int size) : rank_(rank), size_(size) {}

  // One operation. The fields that a kind does not have are 0.
  struct Operation {
    Collective kind = Collective::kAllReduce;
    const void* in = nullptr;
    void* out = nullptr;
    int64_t count = 0;  // elements or, without a type, bytes: of `in`, or of a part that is
                        // gathered or that a rank keeps of a scattered sum
    DType type = DType::kFloat32;
    int peer = 0;  // root, or the other rank
    AllToAllParams exchange;
  };
  virtual void Enqueue(Stream& stream, const Operation& operation) = 0;

 private:
  void Count(const Operation& operation, Stream& stream, int64_t bytes);

  const int rank_;
  const int size_;
  std::array<CollectiveCount, kCollectives> counts_{};
};

// Returns the status of a group whose rank `rank` is lost: UNAVAILABLE, reason RANK_LOST.
absl::Status RankLost(int rank, const std::string& why);

}  // namespace sluice
