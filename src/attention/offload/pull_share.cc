#include "src/attention/offload/pull_share.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/attention/offload/patience.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

absl::Status InjectedFault() {
  if (SLUICE_FAILPOINT(kAttentionArbiterExit)) {
    return absl::AbortedError("failpoint attention.arbiter_exit");
  }
  if (SLUICE_FAILPOINT(kAttentionArbiter)) {
    return absl::InternalError("failpoint attention.arbiter");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PullShare>> PullShare::Create(const CoAttention::Options& options) {
  if (options.source != nullptr) {
    return absl::InvalidArgumentError("co-attention: a device pulls no parts of a source's lists");
  }
  if (options.pullers > kernels::kMostPullers) {
    return absl::InvalidArgumentError(absl::StrCat("co-attention: expected at most ",
                                                   kernels::kMostPullers, " pullers, found ",
                                                   options.pullers));
  }
  if (!options.device->WorkersRunBesideStreams()) {
    return absl::UnimplementedError(
        absl::StrCat("co-attention: on device ", options.device->name(),
                     " workers run only while no stream has anything to do, so that nobody would "
                     "answer it if it pulled parts of lists"));
  }
  const int64_t lists = int64_t{options.max_rows} * options.kv_heads;
  const int64_t results =
      lists * CoAttentionMostParts(options) * (options.heads / options.kv_heads);
  const BufferAllocator allocator(options.device, "the parts of lists that the device pulls");
  Buffer words, memory;
  const int64_t bytes = (int64_t{options.pullers} * 2 + 2) * int64_t{sizeof(Word)};
  static_assert(sizeof(kernels::PullAsk) == sizeof(Word));
  static_assert(sizeof(kernels::PullGrant) == sizeof(Word));
  SLUICE_RETURN_IF_ERROR(allocator.Array(MemoryKind::kPinned, bytes, 1, &words));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, results * (options.head_dim + 1) + lists, &memory));
  return std::unique_ptr<PullShare>(new PullShare(options, std::move(words), std::move(memory)));
}

PullShare::PullShare(const CoAttention::Options& options, Buffer words, Buffer results)
    : options_(options),
      answers_(options),
      most_parts_(CoAttentionMostParts(options)),
      words_(std::move(words)),
      results_(std::move(results)),
      view_(WordsOf(words_, options.pullers)),
      arbiter_(view_, options.pullers),
      tokens_(std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(options.layers))) {}

PullWords PullShare::WordsOf(const Buffer& words, int pullers) {
  PullWords view;
  view.asks = words.as<kernels::PullAsk>();
  view.grants = reinterpret_cast<kernels::PullGrant*>(view.asks + pullers);
  Word* const others = reinterpret_cast<Word*>(view.grants + pullers);
  view.closed = &others[0].value;
  view.missed = &others[1].value;
  return view;
}

void PullShare::Enqueue(Stream& stream, const kernels::SparseAttentionParams& attention) {
  const int64_t lists = int64_t{options_.max_rows} * options_.kv_heads;
  const int64_t results = lists * most_parts_ * answers_.group();
  kernels::PullAttentionParams pull{};
  pull.attention = attention;
  pull.attention.places = nullptr;
  pull.least_units = CoAttentionPartUnits(options_, kernels::SizeOf(attention.cache.type));
  pull.most_parts = most_parts_;
  pull.pullers = options_.pullers;
  pull.asks = view_.asks;
  pull.grants = view_.grants;
  pull.closed = view_.closed;
  pull.missed = view_.missed;
  pull.deadline_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(options_.deadline));
  pull.part_o = results_.as<float>();
  pull.part_lse = pull.part_o + results * options_.head_dim;
  pull.taken = reinterpret_cast<uint32_t*>(pull.part_lse + results);
  options_.device->kernels().PullAttention(stream, pull);

  kernels::MergePartsParams merge{};
  merge.part_o = pull.part_o;
  merge.part_lse = pull.part_lse;
  merge.taken = pull.taken;
  merge.slots = attention.slots;
  merge.o = attention.o;
  merge.lse = attention.lse;
  merge.rows = attention.rows;
  merge.heads = attention.heads;
  merge.kv_heads = options_.kv_heads;
  merge.head_dim = options_.head_dim;
  merge.most_parts = most_parts_;
  options_.device->kernels().MergeParts(stream, merge);
}

// Sequences that join from now on have no arbiter, so that its faults are no more theirs.
void PullShare::Close(SlotWorkers& workers) const {
  arbiter_.Close();
  workers.RetireCommon();
}

void PullShare::CloseIfMissed(SlotWorkers& workers) const {
  if (arbiter_.missed() && !arbiter_.closed()) Close(workers);
}

absl::Status PullShare::Arbitrate(SlotWorkers& workers, int channel, const CoAttentionSide& side,
                                  const PartBoard& board) {
  if (arbiter_.closed()) return absl::OkStatus();
  absl::Cleanup close = [this, &workers] { Close(workers); };
  if (arbiter_.missed() || !TakeLists(workers, side)) return absl::OkStatus();
  Patience patience;
  while (!arbiter_.over()) {
    const int puller = arbiter_.Asking();
    if (puller >= 0) {
      SLUICE_RETURN_IF_ERROR(InjectedFault());
      const Reply reply = Answer(workers, puller, channel, side, board);
      if (reply == Reply::kTooLate) return absl::OkStatus();
      if (reply == Reply::kAnswered) {
        patience.Reset();
        continue;
      }
    }
    // A puller that gave up may have been granted a part since, which nobody would attend to.
    if (arbiter_.missed()) return absl::InternalError("the device waited too long for a part");
    if (!workers.Owes(arbiter())) return absl::OkStatus();
    patience.Pause();
  }
  std::move(close).Cancel();
  return absl::OkStatus();
}

// Empty lists are left to the workers, who answer them at once. Returns false if it is too late.
bool PullShare::TakeLists(SlotWorkers& workers, const CoAttentionSide& side) {
  const SlotWorkers::Held held(workers, arbiter());
  if (!held) return false;
  arbiter_.Begin();
  awaited_.clear();
  patient_until_ = PatientUntil(options_.deadline);
  for (int32_t row = 0; row < *side.rows; ++row) {
    const int32_t slot = side.slots[row];
    if (slot < 0 || !workers.CommonServes(slot)) continue;
    for (int32_t head = 0; head < options_.kv_heads; ++head) {
      const int64_t list = int64_t{row} * options_.kv_heads + head;
      if (options_.maker != nullptr) {
        awaited_.push_back({list, slot});
      } else if (side.lists.counts[list] > 0) {
        arbiter_.Offer(list);
      }
    }
  }
  return true;
}

// Offers the lists that have been made since the last look. Nobody waits for a list of a sequence
// that has failed, since the worker that had it may be gone.
void PullShare::OfferMade(const SlotWorkers& workers, const CoAttentionSide& side,
                          const PartBoard& board) {
  if (awaited_.empty()) return;
  std::erase_if(awaited_, [&](const Awaited& awaited) {
    if (!board.IsMade(awaited.list)) return workers.Failed(awaited.slot);
    if (side.lists.counts[awaited.list] > 0) arbiter_.Offer(awaited.list);
    return true;
  });
  if (!awaited_.empty() && std::chrono::steady_clock::now() > patient_until_) awaited_.clear();
}

PullShare::Reply PullShare::Answer(SlotWorkers& workers, int puller, int channel,
                                   const CoAttentionSide& side, const PartBoard& board) {
  const SlotWorkers::Held held(workers, arbiter());
  if (!held) return Reply::kTooLate;
  OfferMade(workers, side, board);
  const PartArbiter::Part part = arbiter_.Claim(board);
  if (part.list < 0 && !awaited_.empty()) return Reply::kWait;
  arbiter_.Grant(puller, part);  // first, since the puller waits for it
  if (part.list >= 0) FinishForDevice(part, channel, side, board);
  return Reply::kAnswered;
}

// Nothing of a part that the device takes is in the workers' answer. Where a list has several
// parts, Merge reads no `o` of an empty one.
void PullShare::FinishForDevice(const PartArbiter::Part& granted, int channel,
                                const CoAttentionSide& side, const PartBoard& board) {
  CoAttentionPart part;
  part.row.row = static_cast<int32_t>(granted.list / options_.kv_heads);
  part.row.slot = side.slots[part.row.row];
  part.head = static_cast<int>(granted.list % options_.kv_heads);
  part.list = granted.list;
  part.part = granted.part;
  part.parts = board.Parts(granted.list);
  const PartAnswers::Place to = answers_.PlaceOf(side, part);
  if (part.parts == 1) std::fill_n(to.o, answers_.group_floats(), 0.0f);
  std::fill_n(to.lse, answers_.group(), -std::numeric_limits<float>::infinity());
  const PartBoard::Units units = board.UnitsOf(granted.list, granted.part);
  tokens_[static_cast<size_t>(channel)].fetch_add(
      int64_t{units.end - units.begin} * options_.unit_tokens, std::memory_order_relaxed);
  answers_.Finish(board, side, part);
}

}  // namespace sluice
