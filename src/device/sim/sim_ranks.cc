#include "src/device/sim/sim_ranks.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

// Hands its operations to the ranks in the order in which its streams come to them.
class SimRankGroup : public RankGroup {
 public:
  SimRankGroup(SimRanks* ranks, const RankGroupOptions& options)
      : RankGroup(options.rank, options.size),
        ranks_(ranks),
        options_(options),
        pairs_(2 * static_cast<size_t>(options.size)) {}
  ~SimRankGroup() override { ranks_->healths_[static_cast<size_t>(rank())] = nullptr; }

  void Abort(const std::string& why) override { ranks_->Fail(RankLost(rank(), "gave up: " + why)); }
  absl::Status status() const override { return ranks_->status_; }

  using RankGroup::Operation;

 private:
  struct Arrival {
    SimRanks* ranks;
    SimRankGroup* group;
    int from, to;
    int64_t number;
    Operation operation;
    SimGate* gate;
  };

  void Enqueue(Stream& stream, const Operation& operation) override;
  static void Arrive(const Arrival& arrival);

  SimRanks* const ranks_;
  const RankGroupOptions options_;
  int64_t numbers_ = 0;         // operations of all ranks so far
  int64_t own_ = 0;             // operations so far
  std::vector<int64_t> pairs_;  // [size][2] operations with each rank so far: sent, received
};

struct SimRanks::Meeting {
  struct Side {
    std::optional<SimRankGroup::Operation> operation;
    std::vector<uint8_t> in;      // the operand, as it was when the rank came
    std::vector<int32_t> counts;  // of an exchange
    SimGate* gate = nullptr;      // null: not there yet, or gone on
  };
  std::map<int, Side> sides;
  absl::Duration deadline;
  int left = 0;
};

namespace {

using Operation = SimRankGroup::Operation;

size_t OperandBytes(const Operation& op, int size) {
  const auto n = static_cast<size_t>(op.count);
  switch (op.kind) {
    case Collective::kAllReduce:
      return n * static_cast<size_t>(SizeOf(op.type));
    case Collective::kReduceScatter:
      return static_cast<size_t>(size) * n * static_cast<size_t>(SizeOf(op.type));
    case Collective::kAllToAll:
      return static_cast<size_t>(size) * static_cast<size_t>(op.exchange.capacity) *
             static_cast<size_t>(op.exchange.unit_bytes);
    case Collective::kReceive:
      return 0;
    default:
      return n;
  }
}

float ValueOf(const std::vector<uint8_t>& in, int64_t i, DType type) {
  if (type == DType::kFloat32) return reinterpret_cast<const float*>(in.data())[i];
  return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(in.data())[i]);
}

}  // namespace

SimRanks::SimRanks(const SimRanksOptions& options, SimClock* clock)
    : options_(options),
      clock_(clock),
      random_(options.seed),
      healths_(static_cast<size_t>(options.size)) {}

SimRanks::~SimRanks() { *alive_ = false; }

absl::StatusOr<std::unique_ptr<RankGroup>> SimRanks::Join(const RankGroupOptions& options,
                                                          DeviceHealth* health) {
  SLUICE_RETURN_IF_ERROR(CheckRankGroupOptions(options));
  if (options.size != options_.size) {
    return absl::InvalidArgumentError(absl::StrCat("ranks: '", options.name, "' is a group of ",
                                                   options_.size, ", not of ", options.size));
  }
  DeviceHealth*& known = healths_[static_cast<size_t>(options.rank)];
  if (known != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("ranks: rank ", options.rank, " of '", options.name, "' has joined"));
  }
  known = health;
  return std::make_unique<SimRankGroup>(this, options);
}

SimRanks::Meeting& SimRanks::MeetingOf(const Key& key) {
  std::unique_ptr<Meeting>& meeting = meetings_[key];
  if (meeting == nullptr) meeting = std::make_unique<Meeting>();
  return *meeting;
}

void SimRanks::Fail(const absl::Status& why) {
  if (!status_.ok()) return;
  status_ = why;
  for (DeviceHealth* health : healths_) {
    if (health != nullptr) health->FailWith(why);
  }
  for (auto& [key, meeting] : meetings_) {
    for (auto& [rank, side] : meeting->sides) {
      if (side.gate != nullptr) std::exchange(side.gate, nullptr)->Open();
    }
  }
}

void SimRankGroup::Enqueue(Stream& stream, const Operation& operation) {
  const bool sends = operation.kind == Collective::kSend;
  const bool pair = sends || operation.kind == Collective::kReceive;
  Arrival arrival{ranks_, this, -1, -1, 0, operation, nullptr};
  if (pair) {
    arrival.from = sends ? rank() : operation.peer;
    arrival.to = sends ? operation.peer : rank();
    arrival.number = pairs_[2 * static_cast<size_t>(operation.peer) + (sends ? 0 : 1)]++;
  } else {
    arrival.number = numbers_++;
  }
  auto gate = std::make_unique<SimGate>(SimGate{.open = false, .waiters = {}});
  arrival.gate = gate.get();
  auto& sim = static_cast<SimStream&>(stream);
  sim.Enqueue<Arrival>([](const Arrival& a, CpuTeam*) { Arrive(a); }, arrival);
  sim.WaitFor(std::move(gate));
}

void SimRankGroup::Arrive(const Arrival& a) {
  SimRanks& ranks = *a.ranks;
  if (!ranks.status_.ok()) return a.gate->Open();
  const int rank = a.group->rank(), size = a.group->size();
  const SimRanks::Key key{a.from, a.to, a.number};
  SimRanks::Meeting& meeting = ranks.MeetingOf(key);
  SimRanks::Meeting::Side& side = meeting.sides[rank];
  side.gate = a.gate;
  // A rank that is lost holds its stream, and nobody hears of it.
  if (rank == ranks.options_.lost_rank && a.group->own_++ >= ranks.options_.lost_at) return;
  side.operation = a.operation;
  const size_t bytes = OperandBytes(a.operation, size);
  const auto* in = static_cast<const uint8_t*>(
      a.operation.kind == Collective::kAllToAll ? a.operation.exchange.send : a.operation.in);
  if (bytes > 0) side.in.assign(in, in + bytes);
  if (a.operation.kind == Collective::kAllToAll) {
    const int32_t* counts = a.operation.exchange.send_counts;
    side.counts.assign(counts, counts + size);
  }
  meeting.deadline = a.group->options_.deadline;
  ranks.Come(key, rank, a.from < 0 ? size : 2);
}

void SimRanks::Come(const Key& key, int rank, int meets) {
  Meeting& meeting = MeetingOf(key);
  const auto there = [](const auto& side) { return side.second.operation.has_value(); };
  const auto come = std::count_if(meeting.sides.begin(), meeting.sides.end(), there);
  const Operation& mine = *meeting.sides[rank].operation;
  for (const auto& [other, side] : meeting.sides) {
    const bool pair = std::get<0>(key) >= 0;
    if (!side.operation.has_value()) continue;
    if ((pair || side.operation->kind == mine.kind) && side.operation->count == mine.count)
      continue;
    return Fail(absl::InternalError(
        absl::StrCat("ranks differ: rank ", rank, " came to ", CollectiveName(mine.kind), " of ",
                     mine.count, ", and rank ", other, " to ", CollectiveName(side.operation->kind),
                     " of ", side.operation->count)));
  }
  if (come == meets) {
    meeting.left = meets;
    for (const auto& [each, side] : meeting.sides) {
      clock_->After(2 * random_.Uniform() * options_.time,
                    [this, alive = alive_, key, each = each] {
                      if (*alive) Finish(key, each);
                    });
    }
  } else if (come == 1) {
    clock_->After(meeting.deadline, [this, alive = alive_, key, kind = mine.kind] {
      if (!*alive) return;
      const auto found = meetings_.find(key);
      if (found == meetings_.end() || found->second->left > 0) return;
      const auto& [from, to, number] = key;
      for (int other = 0; other < options_.size; ++other) {
        if (from >= 0 && other != from && other != to) continue;
        const auto side = found->second->sides.find(other);
        if (side != found->second->sides.end() && side->second.operation.has_value()) continue;
        return Fail(RankLost(
            other, absl::StrCat("did not come to ", CollectiveName(kind), " number ", number,
                                " within ", absl::FormatDuration(found->second->deadline))));
      }
    });
  }
}

void SimRanks::Finish(const Key& key, int rank) {
  if (!status_.ok()) return;  // all gates are open
  Meeting& meeting = MeetingOf(key);
  Meeting::Side& mine = meeting.sides[rank];
  const Operation& op = *mine.operation;
  auto* const out = static_cast<uint8_t*>(op.out);
  const bool sums = op.kind == Collective::kAllReduce || op.kind == Collective::kReduceScatter;
  const int64_t first = op.kind == Collective::kReduceScatter ? rank * op.count : 0;
  for (int64_t i = 0; sums && i < op.count; ++i) {
    float sum = 0;
    for (auto& [other, side] : meeting.sides) {
      const float value = ValueOf(side.in, first + i, op.type);
      sum = other == 0 ? value : sum + value;
    }
    if (op.type == DType::kFloat32) {
      reinterpret_cast<float*>(out)[i] = sum;
    } else {
      reinterpret_cast<uint16_t*>(out)[i] = FloatToBFloat16(sum);
    }
  }
  if (op.kind == Collective::kAllGather) {
    for (auto& [other, side] : meeting.sides) {
      std::memcpy(out + other * op.count, side.in.data(), side.in.size());
    }
  } else if (op.kind == Collective::kBroadcast || op.kind == Collective::kReceive) {
    const std::vector<uint8_t>& in = meeting.sides[op.peer].in;
    std::memcpy(out, in.data(), in.size());
  } else if (op.kind == Collective::kAllToAll) {
    const AllToAllParams& p = op.exchange;
    const int64_t block = int64_t{p.capacity} * p.unit_bytes;
    for (auto& [other, side] : meeting.sides) {
      const int32_t units = std::clamp(side.counts[static_cast<size_t>(rank)], 0, p.capacity);
      p.receive_counts[other] = units;
      std::memcpy(static_cast<uint8_t*>(p.receive) + other * block, side.in.data() + rank * block,
                  static_cast<size_t>(units) * static_cast<size_t>(p.unit_bytes));
    }
  }
  std::exchange(mine.gate, nullptr)->Open();
  if (--meeting.left == 0) meetings_.erase(key);
}

}  // namespace sluice
