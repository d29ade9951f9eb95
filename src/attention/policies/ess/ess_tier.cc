#include "src/attention/policies/ess/ess_tier.h"

#include <algorithm>
#include <utility>

#include "src/attention/offload/home_admission.h"
#include "src/base/bisect.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"
#include "src/kv/page_copies.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<EssTier>> EssTier::Create(const Options& options) {
  SLUICE_CHECK(!options.hbm->overcommitted(), "what is taken at admission is never given up");
  SLUICE_ASSIGN_OR_RETURN(
      PoolTables tables,
      PoolTables::Create(options.device, options.hbm, options.dram, options.slots, options.shape));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<PoolWarmer> warmer,
                          PoolWarmer::Create(options.device, options.hbm, options.dram,
                                             options.slots, options.shape.most_places()));
  std::unique_ptr<EssTier> tier(new EssTier(options, std::move(tables), std::move(warmer)));
  SLUICE_RETURN_IF_ERROR(tier->AllocateTargets());
  return tier;
}

EssTier::EssTier(const Options& options, PoolTables tables, std::unique_ptr<PoolWarmer> warmer)
    : options_(options),
      tables_(std::move(tables)),
      slots_(static_cast<size_t>(options.slots)),
      warmer_(std::move(warmer)),
      copy_stream_(options.device->NewStream(Device::StreamKind::kCopy)) {
  for (Slot& slot : slots_) {
    slot.placed = options.device->NewEvent();
    slot.cleared = options.device->NewEvent();
  }
}

EssTier::~EssTier() {
  warmer_.reset();  // Completes what it was given.
  for (const Slot& slot : slots_) {
    slot.placed->Wait();
    slot.cleared->Wait();
  }
  for (const Targets& targets : targets_) {
    if (targets.done != nullptr) targets.done->Wait();
  }
}

absl::Status EssTier::AllocateTargets() {
  const int64_t words = int64_t{layout().layers} * options_.decode_rows;
  const BufferAllocator allocator(options_.device, "targets of new entries");
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &device_targets_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &target_counts_));
  for (Targets& targets : targets_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &targets.units));
    targets.done = options_.device->NewEvent();
  }
  const Buffer& staged = targets_[0].units;
  std::fill_n(staged.as<int32_t>(), layout().layers, options_.decode_rows);
  copy_stream_->Copy(target_counts_.data(), staged.data(), staged.bytes());
  copy_stream_->Record(*targets_[0].done);
  targets_[0].done->Wait();
  return options_.device->Health();
}

Footprint EssTier::FootprintOf(int64_t context, int64_t total) const {
  return {{total, context}, options_.shape.HbmTokens(total)};
}

int64_t EssTier::max_tokens() const {
  return LargestThat(0, options_.shape.max_context, [this](int64_t tokens) {
    const Footprint need = FootprintOf(tokens, tokens);
    return options_.hbm->CouldEverFit(need.hbm_tokens) &&
           options_.dram->CouldEverFit(need.dram_tokens);
  });
}

SequencePlacement::Headroom EssTier::HeadroomNow() const {
  return {options_.hbm->HeadroomNow(), options_.dram->HeadroomNow().firm_tokens};
}

bool EssTier::Admit(int slot, int64_t context, int64_t total,
                    std::unique_ptr<SequenceCache>& home) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  SLUICE_CHECK(home != nullptr || context == 0);
  if (!AdmitWithHome(options_.hbm, options_.shape.HbmTokens(total), options_.dram, {total, context},
                     home, &s.hbm)) {
    return false;
  }
  s.home = std::move(home);
  s.total = total;
  s.kept = 0;
  s.index_at_home = context > 0;
  warmer_->Join(slot);
  s.copies.clear();
  s.then.clear();
  s.pages = PoolPages(options_.shape, *s.hbm, total);
  tables_.Publish(slot, *s.home, *s.hbm, s.pages, &s.copies);
  tables_.Clear(s.pages, &s.copies, &s.then);
  CopyIndex(s, *s.home, *s.hbm, context);
  // Each is one command, however scattered the pages are.
  copy_stream_->CopyBatch(s.copies.data(), s.copies.size());
  copy_stream_->CopyBatch(s.then.data(), s.then.size());
  copy_stream_->Record(*s.placed);
  return true;
}

void EssTier::CopyIndex(Slot& s, const SequenceCache& from, const SequenceCache& to, int64_t tokens,
                        int64_t begin) const {
  for (int layer = 0; layer < layout().layers; ++layer) {
    CopyPages(from, to, layer, kIndexKind, tokens, &s.copies, begin);
  }
}

bool EssTier::Warm(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (!s.placed->Ready() || !s.cleared->Ready() || !warmer_->Done(slot)) return false;
  for (auto* ops : {&s.copies, &s.then, &s.warm_copies, &s.warm_then}) ops->clear();
  if (s.index_at_home) {
    s.home->ShrinkTo({s.total, 0});
    s.index_at_home = false;
  }
  return true;
}

Event& EssTier::WarmEvent(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (!warmer_->Done(slot)) return warmer_->DoneEvent(slot);  // It is the latest of the three.
  return s.cleared->Ready() ? *s.placed : *s.cleared;
}

void EssTier::Grow(int slot, int64_t tokens) const {
  SLUICE_CHECK(tokens <= slots_[static_cast<size_t>(slot)].total);
}

void EssTier::Release(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(s.hbm != nullptr && Warm(slot), "released once, and while nothing is copied");
  s.home.reset();
  s.hbm.reset();
}

bool EssTier::ReserveHostCopy(int slot, int64_t tokens) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  // The warmer still reads the home's pages. (The engine does not ask in this state: a sequence
  // that ends well has had a step.)
  if (!warmer_->Done(slot)) return false;
  const TokensByKind wanted = {s.total, tokens};
  if (!s.home->Covers(wanted) && !s.home->Extend(wanted)) return false;
  s.index_at_home = false;  // The index keys that are there stay.
  return true;
}

void EssTier::Evict(int slot, int64_t tokens) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(Warm(slot) && s.home->Covers({s.total, tokens}), "there is a way out");
  s.kept = tokens;
  if (tokens > 0) {
    s.home->EnsureTokens({s.total, tokens});
    CopyIndex(s, *s.hbm, *s.home, tokens, s.home->shared_tokens());
    copy_stream_->CopyBatch(s.copies.data(), s.copies.size());
  }
  copy_stream_->Record(*s.placed);
}

std::unique_ptr<SequenceCache> EssTier::DetachHostCache(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(Warm(slot), "taken while nothing is copied");
  std::unique_ptr<SequenceCache> home = std::move(s.home);
  // Memory for tokens that may never come is not kept: a next turn asks for its own.
  home->ShrinkTo(s.kept);
  Release(slot);
  if (s.kept == 0) home.reset();
  return home;
}

void EssTier::WarmUp(int slot, int64_t tokens, SelectionHints hints, bool fill) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  SLUICE_CHECK(s.hbm != nullptr && s.cleared->Ready() && warmer_->Done(slot),
               "a slot is warmed once at a time");
  SLUICE_CHECK(tokens > 0 && tokens <= s.total);
  s.warm_copies.clear();
  s.warm_then.clear();
  tables_.Clear(s.pages, &s.warm_copies, &s.warm_then);
  const bool whole = fill && HoldsWhole(slot);
  if (whole) {
    tables_.FillWhole(slot, s.pages, tokens, &s.warm_then);
    for (int layer = 0; layer < layout().layers; ++layer) {
      CopyPages(*s.home, *s.hbm, layer, kLatentKind, tokens, &s.warm_copies);
    }
  }
  copy_stream_->CopyBatch(s.warm_copies.data(), s.warm_copies.size());
  copy_stream_->CopyBatch(s.warm_then.data(), s.warm_then.size());
  copy_stream_->Record(*s.cleared);
  if (whole) return;
  PoolWarmer::WarmUp warm_up;
  warm_up.sequence = {s.home.get(), &s.pages, options_.shape.PlaceOfPages(s.total)};
  warm_up.tokens = tokens;
  warm_up.hints = std::move(hints);
  warm_up.fill = fill;
  warm_up.before = s.cleared.get();
  warmer_->Start(slot, std::move(warm_up));
}

void EssTier::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                        absl::Span<const int32_t> positions, const std::vector<bool>& generates) {
  Targets& targets = targets_[next_targets_];
  next_targets_ = (next_targets_ + 1) % targets_.size();
  targets.done->Wait();  // It is ready, unless more steps are under way than there are targets.
  const int64_t rows = options_.decode_rows, block = latent().block_tokens;
  auto* const units = targets.units.as<int32_t>();
  std::fill_n(units, layout().layers * rows, -1);
  const auto known = std::min(static_cast<int64_t>(slots.size()), rows);
  for (int64_t r = 0; r < known; ++r) {
    const int32_t slot = slots[static_cast<size_t>(r)];
    if (slot < 0 || !generates[static_cast<size_t>(slot)]) continue;
    const int64_t position = positions[static_cast<size_t>(r)];
    const SequenceCache& home = *slots_[static_cast<size_t>(slot)].home;
    for (int layer = 0; layer < layout().layers; ++layer) {
      const int64_t page = home.Pages(layer, kLatentKind)[static_cast<size_t>(position / block)];
      units[layer * rows + r] = static_cast<int32_t>(page * block + position % block);
    }
  }
  stream.Copy(device_targets_.data(), units, targets.units.bytes());
  stream.Record(*targets.done);
}

void EssTier::WriteThrough(Stream& stream, const void* written, int begin, int end) const {
  const int64_t bytes = latent().bytes_per_token;
  const int64_t list = options_.decode_rows * bytes;
  kernels::TransferParams move{};
  move.source = static_cast<const uint8_t*>(written) + begin * list;
  move.source_stride = list;
  move.target = options_.dram->base(kLatentKind);
  move.source_pitch = move.target_pitch = bytes;
  move.target_units = device_targets_.as<int32_t>() + int64_t{begin} * options_.decode_rows;
  move.counts = target_counts_.as<int32_t>();
  move.lists = end - begin;
  move.capacity = options_.decode_rows;
  move.unit_bytes = static_cast<int32_t>(bytes);
  // A step's entries are few: 76 rows of 656 bytes take 1 us of the link.
  move.max_workers = 8;
  options_.device->kernels().Transfer(stream, move);
}

kernels::PagedLatents EssTier::Home(int layer) const {
  return LatentsIn(*options_.dram, tables_.home_table(layer), tables_.home_stride(),
                   options_.latent_rank);
}

kernels::PagedLatents EssTier::Pool(int layer) const {
  return LatentsIn(*options_.hbm, tables_.pool_table(layer), tables_.stride(),
                   options_.latent_rank);
}

kernels::PagedIndexKeys EssTier::Index(int layer) const {
  return IndexKeysIn(*options_.hbm, tables_.index_table(layer), tables_.stride());
}

}  // namespace sluice
