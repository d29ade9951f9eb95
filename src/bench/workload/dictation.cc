#include "src/bench/workload/dictation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/kv/sequence_cache.h"

namespace sluice::bench {
namespace {

constexpr int32_t kSlot = 0;

}  // namespace

Dictation::Dictation(const Parts& parts)
    : parts_(parts),
      stream_(parts.device->NewStream(Device::StreamKind::kCompute)),
      done_(parts.device->NewEvent()) {}

Dictation::~Dictation() { End(); }

absl::StatusOr<std::unique_ptr<Dictation>> Dictation::Create(const Parts& parts) {
  std::unique_ptr<Dictation> dictation(new Dictation(parts));
  SLUICE_RETURN_IF_ERROR(dictation->Allocate());
  return dictation;
}

absl::Status Dictation::Allocate() {
  SLUICE_ASSIGN_OR_RETURN(contexts_, ContextReader::Create(parts_.device));
  const BufferAllocator allocator(parts_.device, "dictation");
  SLUICE_RETURN_IF_ERROR(allocator.MirroredWords(parts_.max_context, &tokens_));
  SLUICE_RETURN_IF_ERROR(allocator.MirroredWords(4, &rows_));
  return allocator.MirroredWords(parts_.model->config().vocab_size, &logits_);
}

absl::Status Dictation::Finish() {
  stream_->Record(*done_);
  done_->Wait();
  return parts_.device->Health();
}

absl::Status Dictation::WaitUntilWarm() {
  parts_.policy->WarmEvent(kSlot).Wait();
  if (parts_.policy->Warm(kSlot)) return parts_.device->Health();
  return absl::InternalError("a sequence was admitted but did not become warm");
}

void Dictation::End() {
  if (admitted_) {
    parts_.policy->WarmEvent(kSlot).Wait();  // A step may have failed before.
    parts_.policy->Release(kSlot);
  }
  admitted_ = false;
}

absl::Status Dictation::Begin(const Context& context, int total) {
  End();
  count_ = static_cast<int>(context.tokens.size());
  total_ = total;
  SLUICE_CHECK(count_ >= 2 && count_ <= total && total <= parts_.max_context);
  std::copy(context.tokens.begin(), context.tokens.end(), tokens_.host.as<int32_t>());
  stream_->Copy(tokens_.device.data(), tokens_.host.data(), tokens_.host.bytes());
  SLUICE_RETURN_IF_ERROR(Finish());
  const auto no_room = [&] {
    return absl::ResourceExhaustedError(
        absl::StrCat("a sequence of ", total, " tokens does not fit policy ", parts_.policy->name(),
                     "; raise --hbm-bytes or --dram-bytes"));
  };
  const int64_t handed_over = count_ - 1;
  decoded_ = 0;
  Reservation room = parts_.dram->TryReserve(parts_.policy->FootprintOf(count_, total).dram_tokens);
  if (room.empty()) return no_room();
  auto home = std::make_unique<SequenceCache>(parts_.dram, std::move(room));
  home->EnsureTokens(count_);
  WriteContext(context, parts_.model->cache_layout(), *contexts_, *home);
  if (!parts_.policy->Admit(kSlot, handed_over, total, Promise::kFirm, home)) return no_room();
  admitted_ = true;
  SLUICE_RETURN_IF_ERROR(WaitUntilWarm());
  if (parts_.policy->NeedsEndPrompt()) {
    // A policy that learns from the last row of a prompt alone (fluxion) gets it, as in an engine.
    if (parts_.policy->last_rows_wanted(total) == 1) {
      SLUICE_RETURN_IF_ERROR(Run(count_ - 2, /*is_prompt=*/true));
    }
    parts_.policy->EndPrompt(kSlot, handed_over, {});
    SLUICE_RETURN_IF_ERROR(WaitUntilWarm());
  }
  if (count_ <= parts_.policy->exact_tokens()) return absl::OkStatus();
  for (int i = 0; i < parts_.policy->rehearsals(); ++i) {
    SLUICE_RETURN_IF_ERROR(Step().status());
  }
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const float>> Dictation::Step() {
  SLUICE_RETURN_IF_ERROR(Run(count_ - 1, /*is_prompt=*/false));
  ++decoded_;
  return absl::MakeConstSpan(logits_.host.as<float>(),
                             static_cast<size_t>(parts_.model->config().vocab_size));
}

absl::Status Dictation::Run(int32_t position, bool is_prompt) {
  int32_t* const rows = rows_.host.as<int32_t>();
  rows[0] = kSlot;
  rows[1] = position;
  rows[2] = 0;
  rows[3] = decoded_;
  parts_.policy->Grow(kSlot, count_);
  const int32_t slots[] = {kSlot};
  const int32_t positions[] = {position};
  parts_.policy->BeginStep(*stream_, slots, positions);
  stream_->Copy(rows_.device.data(), rows, rows_.host.bytes());
  stream_->Copy(tokens_.device.data(), tokens_.host.data(), tokens_.host.bytes());
  StepInputs in;
  in.tokens = tokens_.device.as<int32_t>();
  in.token_stride = parts_.max_context;
  in.slots = rows_.device.as<int32_t>();
  in.numbers = in.slots + 3;
  in.positions = in.slots + 1;
  in.rows = 1;
  in.decode_rows = is_prompt ? 0 : 1;
  in.logit_rows = in.slots + 2;
  in.logit_count = 1;
  in.logits = logits_.device.as<float>();
  parts_.model->Forward(*stream_, in, *parts_.policy);
  stream_->Copy(logits_.host.data(), logits_.device.data(), logits_.host.bytes());
  SLUICE_RETURN_IF_ERROR(Finish());
  return parts_.policy->SlotHealth(kSlot);
}

void Dictation::Append(int32_t next) {
  SLUICE_CHECK(count_ < total_);
  tokens_.host.as<int32_t>()[count_++] = next;
}

}  // namespace sluice::bench
