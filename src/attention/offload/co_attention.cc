#include "src/attention/offload/co_attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/attention/offload/worker_share.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/device/worker_team.h"

namespace sluice {
namespace {

// At most two channels are under way, those of neighbouring layers.
constexpr int kSides = 2;

// A worker's hold on the round, as long as the round waits for the worker.
class Held {
 public:
  Held(WorkerTeam& team, int worker) : team_(team), worker_(worker), held_(team.Hold(worker)) {}
  ~Held() {
    if (held_) team_.LetGo(worker_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  explicit operator bool() const { return held_; }

 private:
  WorkerTeam& team_;
  const int worker_;
  const bool held_;
};

// The event that a slot is at rest. Nothing signals it, because it is awaited only after a worker's
// fault.
class SlotRest : public Event {
 public:
  SlotRest(const CoAttention* owner, int slot) : owner_(owner), slot_(slot) {}
  bool Ready() const override { return owner_->AtRest(slot_); }
  void Wait() const override {
    while (!Ready()) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

 private:
  const CoAttention* const owner_;
  const int slot_;
};

// Returns the first `count` workers, as bits.
uint64_t Bits(int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

class CoAttentionImpl : public CoAttention {
 public:
  CoAttentionImpl(const Options& options, Buffer memory)
      : options_(options), memory_(std::move(memory)) {
    CoAttentionMemory carve(options_, memory_.as<std::byte>());
    for (CoAttentionSide& side : sides_) side = carve.Side();
    counts_ = carve.Counts();
    for (int32_t i = 0; i <= options_.max_rows; ++i) counts_[i] = i;
    states_ = std::make_unique<WorkerState[]>(static_cast<size_t>(options_.workers));
    for (int slot = 0; slot < options_.slots; ++slot) rests_.emplace_back(this, slot);
    shares_.reserve(static_cast<size_t>(options_.workers));
    for (int w = 0; w < options_.workers; ++w) shares_.emplace_back(options_);
    homes_.resize(static_cast<size_t>(options_.layers));
    servers_ = std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(options_.slots));
  }

  absl::Status Begin() {
    WorkerTeamOptions team;
    team.mailbox = {options_.layers, options_.workers, options_.slots, options_.deadline};
    SLUICE_ASSIGN_OR_RETURN(
        team_, options_.device->NewWorkerTeam(
                   team, [this](int worker, int channel) { return Work(worker, channel); }));
    for (int slot = 0; slot < options_.slots; ++slot) Join(slot);
    return absl::OkStatus();
  }

  void Start(Stream& stream, int channel, const KvAttention::Queries& queries,
             const kernels::UnitLists& lists, const kernels::PagedCache& home) override {
    SLUICE_CHECK(queries.rows <= options_.max_rows && queries.heads == options_.heads);
    SetHome(channel, home, queries.scale);
    const CoAttentionSide& to = side(channel);
    const int32_t width = options_.heads * options_.head_dim;
    kernels::CopyRowsParams post{};
    const auto piece = [&post](const void* source, int64_t source_pitch, void* target, int32_t rows,
                               int64_t bytes) {
      post.pieces[post.count++] = {
          source, target, source_pitch, bytes, nullptr, rows, static_cast<int32_t>(bytes)};
    };
    constexpr auto kWord = static_cast<int64_t>(sizeof(int32_t));
    piece(queries.q, queries.stride * kWord, to.q, queries.rows, width * kWord);
    piece(counts_ + queries.rows, kWord, to.rows, 1, kWord);
    piece(queries.slots, 0, to.slots, 1, queries.rows * kWord);
    piece(queries.positions, 0, to.positions, 1, queries.rows * kWord);
    if (options_.source == nullptr) {
      SLUICE_CHECK(lists.capacity == options_.capacity);
      const int64_t count = int64_t{queries.rows} * options_.kv_heads;
      piece(lists.counts, 0, to.lists.counts, 1, count * kWord);
      // Copies all of each list: only the device knows how many units count.
      piece(lists.units, 0, to.lists.units, 1, count * lists.capacity * kWord);
    }
    options_.device->kernels().CopyRows(stream, post);
    team_->Raise(stream, channel);
  }

  // Answers lie by slot.
  void Finish(Stream& stream, int channel, const int32_t* slots, int rows, float* o,
              float* lse) override {
    team_->Await(stream, channel);
    const CoAttentionSide& from = side(channel);
    kernels::CopyRowsParams bring{};
    const auto piece = [&](const float* source, float* target, int32_t width) {
      const int32_t bytes = width * static_cast<int32_t>(sizeof(float));
      bring.pieces[bring.count++] = {source, target, bytes, bytes, slots, rows, bytes};
    };
    piece(from.o, o, options_.heads * options_.head_dim);
    piece(from.lse, lse, options_.heads);
    options_.device->kernels().CopyRows(stream, bring);
  }

  void Join(int slot) override {
    const uint64_t servers = ServersOf(slot);
    servers_[static_cast<size_t>(slot)].store(servers, std::memory_order_relaxed);
    team_->SetServers(slot, servers);
    team_->Reset(slot);
  }

  absl::Status Health(int slot) const override {
    const char* what = nullptr;
    switch (team_->error(slot)) {
      case MailboxError::kNone:
        return absl::OkStatus();
      case MailboxError::kFailed:
        what = "failed";
        break;
      case MailboxError::kLeft:
        what = "has died";
        break;
      case MailboxError::kDeadline:
        what = "did not answer in time";
        break;
    }
    return WithReason(
        absl::InternalError(absl::StrCat("a CPU worker that attends to this sequence ", what)),
        reasons::kWorkerFailed);
  }

  // A worker that is at work on a sequence past its step has missed the deadline, and the
  // sequence's health says so before the step is done. If the sequence is healthy, the workers
  // belong to a step under way.
  bool AtRest(int slot) const override {
    if (team_->error(slot) == MailboxError::kNone) return true;
    for (int w = 0; w < options_.workers; ++w) {
      const WorkerState& state = states_[static_cast<size_t>(w)];
      if (state.slot.load(std::memory_order_acquire) == slot) return false;
    }
    return true;
  }
  Event& RestEvent(int slot) override { return rests_[static_cast<size_t>(slot)]; }

  WorkerStatistics Statistics() const override {
    WorkerStatistics out;
    out.workers = options_.workers - std::popcount(team_->gone());
    out.failed = team_->failures(MailboxError::kFailed);
    out.left = team_->failures(MailboxError::kLeft);
    out.late = team_->failures(MailboxError::kDeadline);
    for (int w = 0; w < options_.workers; ++w) {
      const WorkerState& state = states_[static_cast<size_t>(w)];
      out.busy += absl::Nanoseconds(state.busy_ns.load(std::memory_order_relaxed));
      out.tokens += state.tokens.load(std::memory_order_relaxed);
    }
    return out;
  }

 private:
  const CoAttentionSide& side(int channel) const { return sides_[channel % kSides]; }

  // Written before the channel's first round, read by workers in every one.
  void SetHome(int channel, const kernels::PagedCache& home, float scale) {
    ChannelHome& known = homes_[static_cast<size_t>(channel)];
    if (known.cache.base == nullptr) {
      known = {home, scale};
    }
    SLUICE_CHECK(known.cache.base == home.base && known.cache.block_table == home.block_table &&
                     known.scale == scale,
                 "a channel is of one layer");
  }

  // Returns the workers of the slot's group that are left; if none is, those of the next group.
  uint64_t ServersOf(int slot) const {
    const int groups = CoAttentionGroups(options_);
    const uint64_t gone = team_->gone();
    for (int i = 0; i < groups; ++i) {
      const int group = (slot + i) % groups;
      const int begin = group * options_.workers / groups;
      const int end = (group + 1) * options_.workers / groups;
      const uint64_t left = Bits(end) & ~Bits(begin) & ~gone;
      if (left != 0) return left;
    }
    return Bits(options_.workers);  // all have died: the next round says so
  }

  absl::Status Work(int worker, int channel) {
    const auto begin = std::chrono::steady_clock::now();
    WorkerShare& share = shares_[static_cast<size_t>(worker)];
    const absl::StatusOr<bool> served = Serve(worker, channel, share);
    if (!served.ok()) return served.status();
    if (!*served) return absl::OkStatus();
    WorkerState& state = states_[static_cast<size_t>(worker)];
    const auto busy = std::chrono::steady_clock::now() - begin;
    state.busy_ns.store(state.busy_ns.load(std::memory_order_relaxed) +
                            std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count(),
                        std::memory_order_relaxed);
    state.tokens.store(share.tokens(), std::memory_order_relaxed);
    return absl::OkStatus();
  }

  // Returns whether there was a sequence to serve.
  absl::StatusOr<bool> Serve(int worker, int channel, WorkerShare& share) {
    const uint64_t bit = uint64_t{1} << worker;
    {
      const Held held(*team_, worker);
      if (!held) return false;
      share.TakeRows(side(channel), [this, bit](int slot) {
        const uint64_t servers =
            servers_[static_cast<size_t>(slot)].load(std::memory_order_relaxed);
        return (servers & bit) != 0 ? servers : uint64_t{0};
      });
      share.TakeItems(side(channel), channel, bit);
    }
    if (share.rows().empty()) return false;
    SLUICE_RETURN_IF_ERROR(InjectedFault());
    for (size_t i = 0; i < share.rows().size(); ++i) {
      const WorkerShare::Row& row = share.rows()[i];
      for (int head = 0; head < options_.kv_heads; ++head) {
        if (!share.Mine(i, head)) continue;
        SLUICE_ASSIGN_OR_RETURN(const bool in_time, Attend(worker, channel, row, head, share));
        if (!in_time) return true;
      }
    }
    return true;
  }

  // Attends to one head of a row. Returns false if it is too late and nothing was written.
  absl::StatusOr<bool> Attend(int worker, int channel, const WorkerShare::Row& row, int head,
                              WorkerShare& share) {
    const ChannelHome& home = homes_[static_cast<size_t>(channel)];
    WorkerState& state = states_[static_cast<size_t>(worker)];
    const absl::Cleanup rest = [&state] { state.slot.store(-1, std::memory_order_release); };
    {
      const Held held(*team_, worker);
      if (!held) return false;
      // Stored while the step still waits, so that whoever sees the step done sees this too.
      state.slot.store(row.slot, std::memory_order_relaxed);
      share.TakeQuery(side(channel), row, head);
      if (options_.source == nullptr) share.TakeList(side(channel), home, row, head);
    }
    if (options_.source == nullptr) {
      share.Compute(home, row, head);
    } else {
      Task task = share.TaskOf(row, head);
      task.channel = channel;
      task.scale = home.scale;
      const auto owes = [this, worker] { return team_->Owes(worker); };
      SLUICE_RETURN_IF_ERROR(options_.source->Attend(worker, task, owes));
    }
    const Held held(*team_, worker);
    if (!held) return false;
    share.Give(side(channel), row, head);
    return true;
  }

  static absl::Status InjectedFault() {
    if (SLUICE_FAILPOINT(kAttentionWorkerExit)) {
      return absl::AbortedError("failpoint attention.worker_exit");
    }
    if (SLUICE_FAILPOINT(kAttentionWorker)) {
      return absl::InternalError("failpoint attention.worker");
    }
    return absl::OkStatus();
  }

  // The state of a worker that other threads read. Only the worker writes it.
  struct alignas(64) WorkerState {
    std::atomic<int64_t> busy_ns{0};
    std::atomic<int64_t> tokens{0};
    std::atomic<int32_t> slot{-1};  // slot whose host cache it reads
  };

  const Options options_;
  const Buffer memory_;
  CoAttentionSide sides_[kSides];
  int32_t* counts_ = nullptr;  // [max_rows + 1] 0, 1, ...: a stream copies its row count from here
  std::vector<WorkerShare> shares_;                   // by worker
  std::vector<ChannelHome> homes_;                    // by channel
  std::unique_ptr<WorkerState[]> states_;             // by worker
  std::deque<SlotRest> rests_;                        // by slot
  std::unique_ptr<std::atomic<uint64_t>[]> servers_;  // [slots] workers, as bits
  std::unique_ptr<WorkerTeam> team_;                  // last: its threads use all members above
};

}  // namespace

// Workers that share a sequence share its KV heads, so a group has no more workers than there are
// KV heads. The sequences of a group can even out among its workers, but not among groups, so
// groups are no smaller than that either. The exception: two workers and two slots make two groups,
// so that half of the sequences survive the loss of a worker.
int CoAttentionGroups(const CoAttention::Options& options) {
  const int by_heads = (options.workers + options.kv_heads - 1) / options.kv_heads;
  return std::clamp(std::max(by_heads, 2), 1, std::min(options.workers, options.slots));
}

absl::StatusOr<std::unique_ptr<CoAttention>> CoAttention::Create(const Options& given) {
  Options options = given;
  if (options.kernels == nullptr) options.kernels = kernels::AvailableKernelTables().back();
  if (options.kernels->sparse_attention == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("the kernels ", options.kernels->name, " have no sparse attention"));
  }
  if (options.slots < 1 || options.layers < 1 || options.max_rows < 1 || options.kv_heads < 1 ||
      options.heads % options.kv_heads != 0 || options.head_dim < 1 ||
      (options.source == nullptr && (options.capacity < 1 || options.unit_tokens < 1))) {
    return absl::InvalidArgumentError("co-attention: a shape is not above 0");
  }
  SLUICE_ASSIGN_OR_RETURN(Buffer memory, options.device->Allocate(
                                             MemoryKind::kPinned, CoAttentionMemory::Bytes(options),
                                             "requests to CPU workers and their answers"));
  auto out = std::make_unique<CoAttentionImpl>(options, std::move(memory));
  SLUICE_RETURN_IF_ERROR(out->Begin());
  return out;
}

}  // namespace sluice
