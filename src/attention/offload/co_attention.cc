#include "src/attention/offload/co_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/attention/offload/worker_share.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// At most two channels are under way, those of neighbouring layers.
constexpr int kSides = 2;

class CoAttentionImpl : public CoAttention {
 public:
  CoAttentionImpl(const Options& options, Buffer memory)
      : options_(options), memory_(std::move(memory)) {
    CoAttentionMemory carve(options_, memory_.as<std::byte>());
    for (CoAttentionSide& side : sides_) side = carve.Side();
    counts_ = carve.Counts();
    for (int32_t i = 0; i <= options_.max_rows; ++i) counts_[i] = i;
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
    if (options_.source == nullptr) {
      SLUICE_CHECK(lists.capacity == options_.capacity);
      const int32_t count = queries.rows * options_.kv_heads;
      piece(lists.counts, 0, to.lists.counts, 1, count * kWord);
      const int64_t of_list = lists.capacity * kWord;
      piece(lists.units, of_list, to.lists.units, count, of_list, lists.counts);
    }
    options_.device->kernels().CopyRows(stream, post);
    workers_->Raise(stream, channel);
  }

  // Answers lie by slot.
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
    options_.device->kernels().CopyRows(stream, bring);
  }

  SlotWorkers& workers() override { return *workers_; }

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

  absl::StatusOr<bool> Work(int worker, int channel) {
    WorkerShare& share = shares_[static_cast<size_t>(worker)];
    SLUICE_ASSIGN_OR_RETURN(const bool served, Serve(worker, channel, share));
    if (served) workers_->SetTokens(worker, share.tokens());
    return served;
  }

  // Returns whether there was a sequence to serve.
  absl::StatusOr<bool> Serve(int worker, int channel, WorkerShare& share) {
    const uint64_t bit = uint64_t{1} << worker;
    {
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return false;
      share.TakeRows(side(channel), [this, bit](int slot) {
        const uint64_t servers = workers_->Servers(slot);
        return (servers & bit) != 0 ? servers : uint64_t{0};
      });
      share.TakeItems(side(channel), channel, bit);
    }
    if (share.rows().empty()) return false;
    SLUICE_RETURN_IF_ERROR(SlotWorkers::InjectedFault());
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
    const absl::Cleanup rest = [this, worker] { workers_->SetReading(worker, -1); };
    {
      const SlotWorkers::Held held(*workers_, worker);
      if (!held) return false;
      // Stored while the step still waits, so that whoever sees the step done sees this too.
      workers_->SetReading(worker, row.slot);
      share.TakeQuery(side(channel), row, head);
      if (options_.source == nullptr) share.TakeList(side(channel), home, row, head);
    }
    if (options_.source == nullptr) {
      share.Compute(home, row, head);
    } else {
      Task task = share.TaskOf(row, head);
      task.channel = channel;
      task.scale = home.scale;
      const auto owes = [this, worker] { return workers_->Owes(worker); };
      SLUICE_RETURN_IF_ERROR(options_.source->Attend(worker, task, owes));
    }
    const SlotWorkers::Held held(*workers_, worker);
    if (!held) return false;
    share.Give(side(channel), row, head);
    return true;
  }

  const Options options_;
  const Buffer memory_;
  CoAttentionSide sides_[kSides];
  int32_t* counts_ = nullptr;  // [max_rows + 1] 0, 1, ...: a stream copies its row count from here
  std::vector<WorkerShare> shares_;       // by worker
  std::vector<ChannelHome> homes_;        // by channel
  std::unique_ptr<SlotWorkers> workers_;  // last: its threads use all members above
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
