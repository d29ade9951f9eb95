// An operation goes in rounds. In a round a rank copies a piece of its data into its own area of
// the shared memory, says so, and reads the areas of those that it needs once they have said so.
// An area has two halves, which take turns: a rank begins round n when all have shown theirs of
// round n - 1, and so have read all of round n - 2.
#include "src/device/cpu/cpu_rank_group.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/host_stream.h"
#include "src/device/host_ranks.h"

namespace sluice {
namespace {

// A half of a pair's area has this many bytes, for Send and Receive.
constexpr size_t kPairBytes = size_t{64} << 10;
// The watching thread looks this often.
constexpr absl::Duration kLook = absl::Milliseconds(50);

// A rank shows this beside its data, so that ranks that do not call the same operation notice.
struct Shown {
  int32_t kind;
  int32_t type;
  int64_t count;
};

struct alignas(64) Area {
  RankWord round;                // the newest round that the rank has shown
  Shown shown[2];                // by the round's half
  int32_t counts[2][kMaxRanks];  // of an exchange
};

struct alignas(64) Pair {
  RankWord sent, taken;  // pieces so far
};

class CpuRankGroup : public RankGroup {
 public:
  CpuRankGroup(const RankGroupOptions& options, std::unique_ptr<HostRanks> host,
               DeviceHealth* health)
      : RankGroup(options.rank, options.size),
        options_(options),
        host_(std::move(host)),
        health_(health),
        sources_(static_cast<size_t>(options.size)),
        counts_(static_cast<size_t>(options.size) * static_cast<size_t>(options.size)),
        watch_([this] { Watch(); }) {}
  ~CpuRankGroup() override {
    stop_.Notify();
    watch_.join();
  }

  static size_t SharedBytes(const RankGroupOptions& options) {
    const auto n = static_cast<size_t>(options.size);
    return n * (sizeof(Area) + 2 * options.round_bytes) + n * n * (sizeof(Pair) + 2 * kPairBytes);
  }

  void Abort(const std::string& why) override {
    health_->FailWith(host_->Fail(RankLost(rank(), "gave up: " + why)));
  }
  absl::Status status() const override { return host_->failure(); }
  int alive() const override { return host_->Alive(); }

 private:
  struct Work {
    CpuRankGroup* group;
    Operation operation;
  };

  void Enqueue(Stream& stream, const Operation& operation) override {
    static_cast<HostStream&>(stream).Enqueue<Work>(
        [](const Work& work, CpuTeam*) { work.group->Run(work.operation); }, Work{this, operation},
        {CollectiveName(operation.kind), TraceSlice::Kind::kKernel, 0});
  }

  // Notices a rank that ends or stands still while nobody waits for it.
  void Watch() {
    RankMembers* const members = options_.members;
    while (!stop_.WaitForNotificationWithTimeout(kLook) && status().ok()) {
      host_->Look(options_.still_limit).IgnoreError();
      if (members != nullptr && !members->failure().ok()) {
        host_->Fail(members->failure()).IgnoreError();
      }
    }
    if (!status().ok()) health_->FailWith(status());
  }

  void Run(const Operation& operation) {
    if (health_->failed()) return;
    absl::Status status = host_->failure();
    if (status.ok()) status = Do(operation);
    if (!status.ok()) health_->FailWith(status);
  }
  absl::Status Do(const Operation& operation) {
    switch (operation.kind) {
      case Collective::kAllReduce:
        return AllReduceNow(operation);
      case Collective::kAllGather:
        return AllGatherNow(operation);
      case Collective::kReduceScatter:
        return ReduceScatterNow(operation);
      case Collective::kAllToAll:
        return AllToAllNow(operation);
      case Collective::kBroadcast:
        return BroadcastNow(operation);
      case Collective::kSend:
        return SendNow(operation);
      case Collective::kReceive:
        return ReceiveNow(operation);
    }
    return absl::OkStatus();
  }

  // ---- The shared memory: all areas, their data, all pairs, their data ----
  Area& AreaOf(int rank) const { return reinterpret_cast<Area*>(host_->data())[rank]; }
  uint8_t* DataOf(int rank, uint32_t round) const {
    return host_->data() + sizeof(Area) * static_cast<size_t>(size()) +
           (2 * static_cast<size_t>(rank) + round % 2) * options_.round_bytes;
  }
  uint8_t* Pairs() const { return DataOf(size(), 0); }
  size_t PairIndex(int from, int to) const {
    return static_cast<size_t>(from) * static_cast<size_t>(size()) + static_cast<size_t>(to);
  }
  Pair& PairOf(int from, int to) const {
    return reinterpret_cast<Pair*>(Pairs())[PairIndex(from, to)];
  }
  uint8_t* PairData(int from, int to, uint32_t piece) const {
    return Pairs() + sizeof(Pair) * static_cast<size_t>(size()) * static_cast<size_t>(size()) +
           (2 * PairIndex(from, to) + piece % 2) * kPairBytes;
  }

  // ---- Rounds ----
  absl::Status AwaitRank(int other, uint32_t round, const Operation& operation) {
    return host_->Await(AreaOf(other).round, round, other, options_.deadline,
                        CollectiveName(operation.kind));
  }
  // Begins a round: this rank's area may be written.
  absl::Status Begin(const Operation& operation) {
    ++round_;
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) SLUICE_RETURN_IF_ERROR(AwaitRank(other, round_ - 1, operation));
    }
    AreaOf(rank()).shown[round_ % 2] = {static_cast<int32_t>(operation.kind),
                                        static_cast<int32_t>(operation.type), operation.count};
    return absl::OkStatus();
  }
  void Show() {
    HostRanks::Post(AreaOf(rank()).round, round_);
    SLUICE_FAILPOINT_PAUSE(kRankCollective);
  }
  // Waits until `other` has shown its part of the round, and checks that it is of this operation.
  absl::Status See(int other, const Operation& operation) {
    SLUICE_RETURN_IF_ERROR(AwaitRank(other, round_, operation));
    const Shown& shown = AreaOf(other).shown[round_ % 2];
    if (shown.kind == static_cast<int32_t>(operation.kind) && shown.count == operation.count &&
        shown.type == static_cast<int32_t>(operation.type)) {
      return absl::OkStatus();
    }
    return host_->Fail(absl::InternalError(absl::StrCat(
        "ranks of '", options_.name, "' differ: rank ", rank(), " came to ",
        CollectiveName(operation.kind), " of ", operation.count, ", and rank ", other, " to ",
        CollectiveName(static_cast<Collective>(shown.kind)), " of ", shown.count)));
  }
  absl::Status SeeAll(const Operation& operation) {
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) SLUICE_RETURN_IF_ERROR(See(other, operation));
    }
    return absl::OkStatus();
  }

  // Sets out[i] to the sum of sources_[r][i], rank 0 first. `out` may be one of the sources.
  void Sum(void* out, int64_t count, DType type) const {
    constexpr int64_t kAtOnce = 256;
    float sums[kAtOnce];
    for (int64_t at = 0; at < count; at += kAtOnce) {
      const int64_t n = std::min(kAtOnce, count - at);
      for (size_t r = 0; r < sources_.size(); ++r) {
        if (type == DType::kFloat32) {
          const float* from = reinterpret_cast<const float*>(sources_[r]) + at;
          if (r == 0) std::copy_n(from, n, sums);
          for (int64_t i = 0; r > 0 && i < n; ++i) sums[i] += from[i];
        } else {
          const uint16_t* from = reinterpret_cast<const uint16_t*>(sources_[r]) + at;
          for (int64_t i = 0; i < n; ++i) {
            sums[i] = (r == 0 ? 0.0f : sums[i]) + BFloat16ToFloat(from[i]);
          }
        }
      }
      if (type == DType::kFloat32) {
        std::copy_n(sums, n, static_cast<float*>(out) + at);
      } else {
        std::transform(sums, sums + n, static_cast<uint16_t*>(out) + at, FloatToBFloat16);
      }
    }
  }

  absl::Status AllReduceNow(const Operation& operation) {
    const auto unit = static_cast<size_t>(SizeOf(operation.type));
    const size_t bytes = static_cast<size_t>(operation.count) * unit;
    for (size_t at = 0; at < bytes; at += options_.round_bytes) {
      const size_t n = std::min(options_.round_bytes, bytes - at);
      const auto* in = static_cast<const uint8_t*>(operation.in) + at;
      SLUICE_RETURN_IF_ERROR(Begin(operation));
      std::memcpy(DataOf(rank(), round_), in, n);
      Show();
      SLUICE_RETURN_IF_ERROR(SeeAll(operation));
      for (int r = 0; r < size(); ++r) {
        sources_[static_cast<size_t>(r)] = r == rank() ? in : DataOf(r, round_);
      }
      Sum(static_cast<uint8_t*>(operation.out) + at, static_cast<int64_t>(n / unit),
          operation.type);
    }
    return absl::OkStatus();
  }

  absl::Status AllGatherNow(const Operation& operation) {
    const auto bytes = static_cast<size_t>(operation.count);
    auto* out = static_cast<uint8_t*>(operation.out);
    const auto* in = static_cast<const uint8_t*>(operation.in);
    for (size_t at = 0; at < bytes; at += options_.round_bytes) {
      const size_t n = std::min(options_.round_bytes, bytes - at);
      SLUICE_RETURN_IF_ERROR(Begin(operation));
      std::memcpy(DataOf(rank(), round_), in + at, n);
      Show();
      for (int r = 0; r < size(); ++r) {
        uint8_t* const to = out + static_cast<size_t>(r) * bytes + at;
        if (r != rank()) {
          SLUICE_RETURN_IF_ERROR(See(r, operation));
          std::memcpy(to, DataOf(r, round_), n);
        } else if (to != in + at) {
          std::memcpy(to, in + at, n);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReduceScatterNow(const Operation& operation) {
    const auto unit = static_cast<size_t>(SizeOf(operation.type));
    const size_t part = static_cast<size_t>(operation.count) * unit;
    const size_t piece = options_.round_bytes / static_cast<size_t>(size()) / 64 * 64;
    const auto* in = static_cast<const uint8_t*>(operation.in);
    for (size_t at = 0; at < part; at += piece) {
      const size_t n = std::min(piece, part - at);
      SLUICE_RETURN_IF_ERROR(Begin(operation));
      for (int r = 0; r < size(); ++r) {
        const auto q = static_cast<size_t>(r);
        std::memcpy(DataOf(rank(), round_) + q * piece, in + q * part + at, n);
      }
      Show();
      SLUICE_RETURN_IF_ERROR(SeeAll(operation));
      for (int r = 0; r < size(); ++r) {
        sources_[static_cast<size_t>(r)] = DataOf(r, round_) + static_cast<size_t>(rank()) * piece;
      }
      Sum(static_cast<uint8_t*>(operation.out) + at, static_cast<int64_t>(n / unit),
          operation.type);
    }
    return absl::OkStatus();
  }

  absl::Status BroadcastNow(const Operation& operation) {
    const auto bytes = static_cast<size_t>(operation.count);
    auto* data = static_cast<uint8_t*>(operation.out);
    for (size_t at = 0; at < bytes; at += options_.round_bytes) {
      const size_t n = std::min(options_.round_bytes, bytes - at);
      SLUICE_RETURN_IF_ERROR(Begin(operation));
      if (operation.peer == rank()) std::memcpy(DataOf(rank(), round_), data + at, n);
      Show();
      if (operation.peer == rank()) continue;
      SLUICE_RETURN_IF_ERROR(See(operation.peer, operation));
      std::memcpy(data + at, DataOf(operation.peer, round_), n);
    }
    return absl::OkStatus();
  }

  // A rank's stream of units is those for rank 0, then those for rank 1, and so on. The first round
  // tells everybody all counts, from which the number of further rounds follows; in each of those a
  // rank shows the next piece of its stream, and the others take what is for them.
  absl::Status AllToAllNow(const Operation& operation) {
    const AllToAllParams& p = operation.exchange;
    SLUICE_RETURN_IF_ERROR(Begin(operation));
    Area& own = AreaOf(rank());
    for (int r = 0; r < size(); ++r) {
      own.counts[round_ % 2][r] = std::clamp(p.send_counts[r], 0, p.capacity);
    }
    Show();
    SLUICE_RETURN_IF_ERROR(SeeAll(operation));
    int64_t longest = 0;
    for (int r = 0; r < size(); ++r) {
      const int32_t* from = AreaOf(r).counts[round_ % 2];
      std::copy_n(from, size(), counts_.begin() + r * size());
      p.receive_counts[r] = from[rank()];
      int64_t all = 0;
      for (int to = 0; to < size(); ++to) all += from[to];
      longest = std::max(longest, all * p.unit_bytes);
    }
    const auto piece = static_cast<int64_t>(options_.round_bytes);
    for (int64_t at = 0; at < longest; at += piece) {
      SLUICE_RETURN_IF_ERROR(Begin(operation));
      MovePiece(p, rank(), at, /*show=*/true);
      Show();
      for (int r = 0; r < size(); ++r) {
        if (r != rank()) SLUICE_RETURN_IF_ERROR(See(r, operation));
        MovePiece(p, r, at, /*show=*/false);
      }
    }
    return absl::OkStatus();
  }
  // Copies bytes [at, at + round_bytes) of rank `from`'s stream into its area (show: it is this
  // rank's), or those of them that are for this rank out of it.
  void MovePiece(const AllToAllParams& p, int from, int64_t at, bool show) const {
    const int64_t end = at + static_cast<int64_t>(options_.round_bytes);
    const int64_t block = int64_t{p.capacity} * p.unit_bytes;
    int64_t first = 0;  // where the units for `to` begin in the stream
    for (int to = 0; to < size(); ++to) {
      const int64_t bytes =
          int64_t{counts_[static_cast<size_t>(from) * static_cast<size_t>(size()) +
                          static_cast<size_t>(to)]} *
          p.unit_bytes;
      const int64_t low = std::max(at, first), high = std::min(end, first + bytes);
      if (low < high && (show || to == rank())) {
        uint8_t* const area = DataOf(from, round_) + (low - at);
        const int64_t offset = low - first;
        const auto n = static_cast<size_t>(high - low);
        if (show) {
          std::memcpy(area, static_cast<const uint8_t*>(p.send) + to * block + offset, n);
        } else {
          std::memcpy(static_cast<uint8_t*>(p.receive) + from * block + offset, area, n);
        }
      }
      first += bytes;
    }
  }

  // ---- Pairs: the sender may be one piece ahead of the two that the receiver has yet to take ----
  absl::Status SendNow(const Operation& operation) {
    Pair& pair = PairOf(rank(), operation.peer);
    uint32_t piece = pair.sent.value.load(std::memory_order_relaxed);
    const auto bytes = static_cast<size_t>(operation.count);
    for (size_t at = 0; at < bytes; at += kPairBytes) {
      SLUICE_RETURN_IF_ERROR(
          host_->Await(pair.taken, ++piece - 2, operation.peer, options_.deadline, "receive"));
      std::memcpy(PairData(rank(), operation.peer, piece),
                  static_cast<const uint8_t*>(operation.in) + at, std::min(kPairBytes, bytes - at));
      HostRanks::Post(pair.sent, piece);
    }
    return absl::OkStatus();
  }
  absl::Status ReceiveNow(const Operation& operation) {
    Pair& pair = PairOf(operation.peer, rank());
    uint32_t piece = pair.taken.value.load(std::memory_order_relaxed);
    const auto bytes = static_cast<size_t>(operation.count);
    for (size_t at = 0; at < bytes; at += kPairBytes) {
      SLUICE_RETURN_IF_ERROR(
          host_->Await(pair.sent, ++piece, operation.peer, options_.deadline, "send"));
      std::memcpy(static_cast<uint8_t*>(operation.out) + at,
                  PairData(operation.peer, rank(), piece), std::min(kPairBytes, bytes - at));
      HostRanks::Post(pair.taken, piece);
    }
    return absl::OkStatus();
  }

  const RankGroupOptions options_;
  const std::unique_ptr<HostRanks> host_;
  DeviceHealth* const health_;
  // The rest belongs to the stream's thread.
  uint32_t round_ = 0;
  std::vector<const uint8_t*> sources_;  // [size]
  std::vector<int32_t> counts_;          // [size][size], by sender and receiver, of an exchange

  absl::Notification stop_;
  std::thread watch_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> JoinCpuRanks(const RankGroupOptions& options,
                                                        DeviceHealth* health) {
  SLUICE_RETURN_IF_ERROR(CheckRankGroupOptions(options));
  if (options.members != nullptr && !options.members->OneHost()) {
    return absl::InvalidArgumentError(
        "device: ranks on the cpu exchange their sums through the memory of one host, and these "
        "see several: start all of them on one host, with one /dev/shm, or give each a GPU");
  }
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<HostRanks> host,
      HostRanks::Join({options.name, options.rank, options.size, CpuRankGroup::SharedBytes(options),
                       options.join_timeout}));
  SLUICE_RETURN_IF_ERROR(host->Look(options.still_limit));  // From here on the others watch it.
  return std::make_unique<CpuRankGroup>(options, std::move(host), health);
}

}  // namespace sluice
