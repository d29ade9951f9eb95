#include "src/attention/offload/co_attention.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/attention/offload/patience.h"
#include "src/attention/offload/pull_share.h"
#include "src/attention/offload/worker_share.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// At most two channels are under way, those of neighbouring layers.
constexpr int kSides = 2;

class CoAttentionImpl : public CoAttention {
 public:
  // `pull` is null if the device takes no parts.
  CoAttentionImpl(const Options& options, Buffer memory, std::unique_ptr<PullShare> pull)
      : options_(options), memory_(std::move(memory)), pull_(std::move(pull)) {
    CoAttentionMemory carve(options_, memory_.as<std::byte>());
    for (CoAttentionSide& side : sides_) side = carve.Side();
    counts_ = carve.Counts();
    for (int32_t i = 0; i <= options_.max_rows; ++i) counts_[i] = i;
    no_words_ = carve.NoWords();
    word_arrays_ = carve.WordArrays();
    const int64_t lists = int64_t{options_.max_rows} * options_.kv_heads;
    std::fill_n(no_words_, lists, PartWords{});
    for (CoAttentionSide& side : sides_) {
      std::fill_n(side.words, word_arrays_ * lists, PartWords{});
    }
    MakeRoomForParts();
    shares_.reserve(static_cast<size_t>(options_.workers));
    for (int w = 0; w < options_.workers; ++w) shares_.emplace_back(options_);
    homes_.resize(static_cast<size_t>(options_.layers));
  }

  absl::Status Begin() {
    SlotWorkers::Options workers;
    workers.device = options_.device;
    workers.channels = options_.layers;
    workers.workers = options_.workers;
    workers.slots = options_.slots;
    workers.groups = CoAttentionGroups(options_);
    workers.has_common_worker = pull_ != nullptr;
    workers.deadline = options_.deadline;
    SLUICE_ASSIGN_OR_RETURN(workers_, SlotWorkers::Create(workers, [this](int worker, int channel) {
                              return Work(worker, channel);
                            }));
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
                               int64_t bytes, const int32_t* words = nullptr) {
      post.pieces[post.count++] = {
          source, target, source_pitch, bytes, nullptr, rows, static_cast<int32_t>(bytes), words};
    };
    constexpr auto kWord = static_cast<int64_t>(sizeof(int32_t));
    piece(queries.q, queries.stride * kWord, to.q, queries.rows, width * kWord);
    piece(counts_ + queries.rows, kWord, to.rows, 1, kWord);
    piece(queries.slots, 0, to.slots, 1, queries.rows * kWord);
    piece(queries.positions, 0, to.positions, 1, queries.rows * kWord);
    if (options_.maker != nullptr) {
      options_.maker->Post(queries.rows, &post);
    } else if (options_.source == nullptr) {
      SLUICE_CHECK(lists.capacity == options_.capacity);
      const int32_t count = queries.rows * options_.kv_heads;
      piece(lists.counts, 0, to.lists.counts, 1, count * kWord);
      const int64_t of_list = lists.capacity * kWord;
      piece(lists.units, of_list, to.lists.units, count, of_list, lists.counts);
    }
    options_.device->kernels().CopyRows(stream, post);
    workers_->Raise(stream, channel);
  }

  // Answers lie by slot. The words of the lists are wiped for the next request of this side, which
  // comes after this: at Start they would be one piece too many for the launch.
  void Finish(Stream& stream, int channel, const int32_t* slots, int rows, float* o,
              float* lse) override {
    workers_->Await(stream, channel);
    const CoAttentionSide& from = side(channel);
    kernels::CopyRowsParams bring{};
    const auto piece = [&](const float* source, float* target, int32_t width) {
      const int32_t bytes = width * static_cast<int32_t>(sizeof(float));
      bring.pieces[bring.count++] = {source, target, bytes, bytes, slots, rows, bytes};
    };
    piece(from.o, o, options_.heads * options_.head_dim);
    piece(from.lse, lse, options_.heads);
    const int64_t list_words = options_.kv_heads * int64_t{sizeof(PartWords)};
    bring.pieces[bring.count++] = {no_words_,
                                   from.words,
                                   0,
                                   options_.max_rows * list_words,
                                   nullptr,
                                   word_arrays_,
                                   static_cast<int32_t>(rows * list_words)};
    options_.device->kernels().CopyRows(stream, bring);
  }

  void Pull(Stream& stream, int channel, const kernels::SparseAttentionParams& attention) override {
    kernels::SparseAttentionParams pulled = attention;
    if (options_.maker != nullptr) {
      const kernels::UnitLists& made = side(channel).lists;
      pulled.units = made.units;
      pulled.counts = made.counts;
      pulled.capacity = made.capacity;
    }
    SLUICE_CHECK(pull_ != nullptr && pulled.rows <= options_.max_rows &&
                 pulled.capacity == options_.capacity);
    pull_->Enqueue(stream, pulled);
  }
  int64_t PulledTokens(int channel) const override {
    return pull_ == nullptr ? 0 : pull_->tokens(channel);
  }

  SlotWorkers& workers() override { return *workers_; }

 private:
  // A list of one part needs no room, and pages that are never written cost nothing.
  void MakeRoomForParts() {
    const int most_parts = CoAttentionMostParts(options_);
    if (most_parts == 1) return;
    const int64_t values = int64_t{options_.max_rows} * options_.heads * most_parts;
    for (int i = 0; i < kSides; ++i) {
      const auto floats = static_cast<size_t>(values * (options_.head_dim + 1));
      part_results_[i] = std::make_unique_for_overwrite<float[]>(floats);
      sides_[i].part_o = part_results_[i].get();
      sides_[i].part_lse = sides_[i].part_o + values * options_.head_dim;
    }
  }

  ListMaker::Round RoundOf(int channel) const {
    const CoAttentionSide& of = side(channel);
    return {channel, *of.rows, of.slots, of.positions, of.q, of.maker_words, of.lists};
  }
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

  absl::StatusOr<bool> Work(int worker, int channel) {
    if (worker == options_.workers) return Arbitrate(channel);
    WorkerShare& share = shares_[static_cast<size_t>(worker)];
    if (pull_ != nullptr) pull_->CloseIfMissed(*workers_);
    SLUICE_ASSIGN_OR_RETURN(const bool served, Serve(worker, channel, share));
    if (served) workers_->SetTokens(worker, share.tokens());
    return served;
  }

  // The arbiter waits for others most of the time, which is no time that a worker is busy.
  absl::StatusOr<bool> Arbitrate(int channel) {
    SLUICE_RETURN_IF_ERROR(pull_->Arbitrate(*workers_, channel, side(channel), BoardOf(channel)));
    return false;
  }

  // The next thing that a worker does in a round.
  enum class Turn { kDone, kWait, kMakeList, kAttend };

  // Returns whether there was a sequence to serve. A worker holds the round when it claims a part
  // and when it gives the results, not in between; if it is late, it writes nothing.
  absl::StatusOr<bool> Serve(int worker, int channel, WorkerShare& share) {
    const PartBoard board = BoardOf(channel);
    const absl::Cleanup rest = [this, worker] { workers_->SetReading(worker, -1); };
    RoundWait wait(options_.deadline);
    Turn turn = Turn::kDone;
    {
      const SlotWorkers::Held held(*workers_, worker);
      if (!held || !TakeRows(worker, channel, board, share)) return false;
      turn = Next(worker, channel, board, share, wait);
    }
    SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
    while (turn != Turn::kDone) {
      if (turn == Turn::kWait) wait.Pause();
      if (turn == Turn::kMakeList) SLUICE_RETURN_IF_ERROR(Make(worker, channel));
      if (turn == Turn::kAttend) SLUICE_RETURN_IF_ERROR(Attend(worker, channel, share));
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) break;
      if (turn == Turn::kMakeList) GiveTask(worker, channel, board);
      if (turn == Turn::kAttend) share.Give(board, side(channel));
      turn = Next(worker, channel, board, share, wait);
      if (turn != Turn::kWait) wait.End();
    }
    wait.End();
    workers_->SetWaited(worker, wait.sum());
    return true;
  }

  // Returns whether the worker serves any row.
  bool TakeRows(int worker, int channel, const PartBoard& board, WorkerShare& share) {
    const uint64_t bit = uint64_t{1} << worker;
    share.TakeRows(side(channel), [this, bit](int slot) {
      const uint64_t servers = workers_->Servers(slot);
      return (servers & bit) != 0 ? servers : uint64_t{0};
    });
    if (share.rows().empty()) return false;
    if (options_.maker != nullptr) options_.maker->Take(worker, RoundOf(channel), *workers_);
    share.Divide(board, side(channel), channel, bit);
    return true;
  }

  // Claims what the worker does next.
  Turn Next(int worker, int channel, const PartBoard& board, WorkerShare& share,
            const RoundWait& wait) {
    if (options_.maker != nullptr) {
      const std::optional<int> slot = options_.maker->Claim(worker, RoundOf(channel));
      if (slot.has_value()) {
        workers_->SetReading(worker, *slot);
        return Turn::kMakeList;
      }
    }
    if (Claim(worker, channel, board, share)) return Turn::kAttend;
    // The worker that had such a list may be gone.
    const auto lost = [this](int slot) { return workers_->Failed(slot); };
    if (!share.AwaitsLists(lost) || !wait.patient()) return Turn::kDone;
    workers_->SetReading(worker, -1);
    return Turn::kWait;
  }

  absl::Status Make(int worker, int channel) {
    SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
    options_.maker->Compute(worker, channel);
    return absl::OkStatus();
  }
  void GiveTask(int worker, int channel, const PartBoard& board) {
    const std::optional<int64_t> list = options_.maker->Give(worker, RoundOf(channel));
    if (list.has_value()) board.SetMade(*list);
  }

  // Claims the worker's next part. Parts without units are answered at once. Returns false if
  // nothing is left. REQUIRES: the worker holds the round.
  bool Claim(int worker, int channel, const PartBoard& board, WorkerShare& share) {
    const ChannelHome& home = homes_[static_cast<size_t>(channel)];
    while (share.Claim(board, side(channel), home)) {
      if (!share.empty()) {
        // Stored while the step still waits, so that whoever sees the step done sees this too.
        workers_->SetReading(worker, share.part().row.slot);
        return true;
      }
      share.Compute(home);
      share.Give(board, side(channel));
    }
    return false;
  }

  // Attends to the part that the worker has claimed.
  absl::Status Attend(int worker, int channel, WorkerShare& share) {
    const ChannelHome& home = homes_[static_cast<size_t>(channel)];
    if (options_.source == nullptr) {
      share.Compute(home);
      return absl::OkStatus();
    }
    Task task = share.TaskOf();
    task.channel = channel;
    task.scale = home.scale;
    return options_.source->Attend(worker, task, [this, worker] { return workers_->Owes(worker); });
  }

  // A source's lists are whole.
  PartBoard BoardOf(int channel) const {
    const CoAttentionSide& of = side(channel);
    if (options_.source != nullptr) return {of.words, nullptr, 1};
    const kernels::DType type = homes_[static_cast<size_t>(channel)].cache.type;
    return {of.words, of.lists.counts, CoAttentionPartUnits(options_, kernels::SizeOf(type))};
  }

  const Options options_;
  const Buffer memory_;
  const std::unique_ptr<PullShare> pull_;
  CoAttentionSide sides_[kSides];
  std::unique_ptr<float[]> part_results_[kSides];
  int32_t* counts_ = nullptr;  // [max_rows + 1] 0, 1, ...: a stream copies its row count from here
  PartWords* no_words_ = nullptr;         // [max_rows][kv_heads] zeros: a stream copies them
  int32_t word_arrays_ = 1;               // arrays of words that a side has
  std::vector<WorkerShare> shares_;       // by worker
  std::vector<ChannelHome> homes_;        // by channel
  std::unique_ptr<SlotWorkers> workers_;  // last: its threads use all members above
};

}  // namespace

// A group has no more workers than there are KV heads: a sequence with short lists, one part each,
// has no more work to share. The sequences of a group can even out among its workers, but not among
// groups, so groups are no smaller than that either. The exception: two workers and two slots make
// two groups, so that half of the sequences survive the loss of a worker.
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
      (options.source == nullptr &&
       (options.capacity < 1 || options.unit_tokens < 1 || options.part_bytes < 1))) {
    return absl::InvalidArgumentError("co-attention: a shape is not above 0");
  }
  if (options.source != nullptr && options.maker != nullptr) {
    return absl::InvalidArgumentError("co-attention: a source has no lists that could be made");
  }
  SLUICE_ASSIGN_OR_RETURN(Buffer memory, options.device->Allocate(
                                             MemoryKind::kPinned, CoAttentionMemory::Bytes(options),
                                             "requests to CPU workers and their answers"));
  std::unique_ptr<PullShare> pull;
  if (options.pullers > 0) {
    SLUICE_ASSIGN_OR_RETURN(pull, PullShare::Create(options));
  }
  auto out = std::make_unique<CoAttentionImpl>(options, std::move(memory), std::move(pull));
  SLUICE_RETURN_IF_ERROR(out->Begin());
  return out;
}

}  // namespace sluice
