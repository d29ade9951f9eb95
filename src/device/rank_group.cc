#include "src/device/rank_group.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// A rank has up to 5.4 times as much memory for it.
constexpr size_t kMostPeerBytes = size_t{64} << 20;

}  // namespace

absl::Status CheckRankGroupOptions(const RankGroupOptions& options) {
  if (options.size < 1 || options.size > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a group of ", options.size, " ranks; it takes 1 to ", kMaxRanks));
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of a group of ", options.size));
  }
  const bool plain = std::all_of(options.name.begin(), options.name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_';
  });
  if (options.name.empty() || options.name.size() > 100 || !plain) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the ranks' name '", options.name, "': expected up to 100 letters, digits, '-' and '_'"));
  }
  if (options.deadline <= absl::ZeroDuration() || options.join_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("the deadlines of a group of ranks must be above 0");
  }
  if (options.round_bytes < 4096 || options.round_bytes % 4096 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "round_bytes ", options.round_bytes, " of a group of ranks: expected a multiple of 4096"));
  }
  if (options.peer_bytes > kMostPeerBytes) {
    return absl::InvalidArgumentError(absl::StrCat("peer_bytes ", options.peer_bytes,
                                                   " of a group of ranks: expected at most ",
                                                   kMostPeerBytes));
  }
  return absl::OkStatus();
}

const char* CollectiveName(Collective kind) {
  static constexpr const char* kNames[kCollectives] = {
      "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "receive"};
  return kNames[static_cast<size_t>(kind)];
}

absl::Status RankLost(int rank, const std::string& why) {
  return WithReason(absl::UnavailableError(absl::StrCat("rank ", rank, " ", why)),
                    reasons::kRankLost);
}

void RankGroup::Count(const Operation& operation, Stream& stream, int64_t bytes) {
  CollectiveCount& count = counts_[static_cast<size_t>(operation.kind)];
  ++count.calls;
  count.bytes += bytes;
  Enqueue(stream, operation);
}

void RankGroup::AllReduce(Stream& stream, const void* in, void* out, int64_t count, DType type) {
  SLUICE_CHECK(type == DType::kFloat32 || type == DType::kBFloat16, "sums are of floats");
  if (count == 0) return;
  Operation operation;
  operation.kind = Collective::kAllReduce;
  operation.in = in;
  operation.out = out;
  operation.count = count;
  operation.type = type;
  Count(operation, stream, count * SizeOf(type));
}

void RankGroup::AllGather(Stream& stream, const void* in, void* out, size_t bytes) {
  if (bytes == 0) return;
  Operation operation;
  operation.kind = Collective::kAllGather;
  operation.in = in;
  operation.out = out;
  operation.count = static_cast<int64_t>(bytes);
  Count(operation, stream, operation.count);
}

void RankGroup::ReduceScatter(Stream& stream, const void* in, void* out, int64_t count,
                              DType type) {
  SLUICE_CHECK(type == DType::kFloat32 || type == DType::kBFloat16, "sums are of floats");
  if (count == 0) return;
  Operation operation;
  operation.kind = Collective::kReduceScatter;
  operation.in = in;
  operation.out = out;
  operation.count = count;
  operation.type = type;
  Count(operation, stream, size_ * count * SizeOf(type));
}

void RankGroup::AllToAll(Stream& stream, const AllToAllParams& params) {
  SLUICE_CHECK(params.capacity > 0 && params.unit_bytes > 0);
  SLUICE_CHECK(reinterpret_cast<uintptr_t>(params.send) % 16 == 0 &&
                   reinterpret_cast<uintptr_t>(params.receive) % 16 == 0,
               "what is exchanged begins at multiples of 16 bytes");
  Operation operation;
  operation.kind = Collective::kAllToAll;
  operation.exchange = params;
  Count(operation, stream, int64_t{size_} * params.capacity * params.unit_bytes);
}

void RankGroup::Broadcast(Stream& stream, void* data, size_t bytes, int root) {
  SLUICE_CHECK(root >= 0 && root < size_);
  if (bytes == 0) return;
  Operation operation;
  operation.kind = Collective::kBroadcast;
  operation.in = data;
  operation.out = data;
  operation.count = static_cast<int64_t>(bytes);
  operation.peer = root;
  Count(operation, stream, operation.count);
}

void RankGroup::Send(Stream& stream, const void* data, size_t bytes, int to) {
  SLUICE_CHECK(to >= 0 && to < size_ && to != rank_);
  if (bytes == 0) return;
  Operation operation;
  operation.kind = Collective::kSend;
  operation.in = data;
  operation.count = static_cast<int64_t>(bytes);
  operation.peer = to;
  Count(operation, stream, operation.count);
}

void RankGroup::Receive(Stream& stream, void* data, size_t bytes, int from) {
  SLUICE_CHECK(from >= 0 && from < size_ && from != rank_);
  if (bytes == 0) return;
  Operation operation;
  operation.kind = Collective::kReceive;
  operation.out = data;
  operation.count = static_cast<int64_t>(bytes);
  operation.peer = from;
  Count(operation, stream, operation.count);
}

}  // namespace sluice
