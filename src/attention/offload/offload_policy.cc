#include "src/attention/offload/offload_policy.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

namespace {

// Fills `units`, which is ascending and below `end`, up to `count` units with the newest that it
// lacks.
void AddNewest(int64_t end, size_t count, std::vector<int32_t>* units) {
  auto unit = static_cast<int32_t>(end - 1);
  const size_t named = units->size();
  for (size_t i = named; units->size() < count; --unit) {
    while (i > 0 && (*units)[i - 1] > unit) --i;
    if (i == 0 || (*units)[i - 1] != unit) units->push_back(unit);
  }
  std::sort(units->begin(), units->end());
}

}  // namespace

int OffloadPolicy::MaxDecodeRows(const PolicyOptions& options) {
  return std::max(options.slots, options.device->RowBucket(options.slots));
}

absl::StatusOr<Buffer> OffloadPolicy::AllocateWritten(const PolicyOptions& options) {
  const CacheKind& kind = options.hbm->layout().kinds[0];
  const int64_t bytes = int64_t{options.hbm->layout().layers} * MaxDecodeRows(options) *
                        kind.heads * kind.bytes_per_token;
  return options.device->Allocate(MemoryKind::kDevice, static_cast<size_t>(bytes),
                                  "keys and values of a step");
}

OffloadPolicy::OffloadPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier,
                             Buffer written)
    : name_(options.name),
      options_(options),
      tier_(std::move(tier)),
      written_(std::move(written)),
      totals_(static_cast<size_t>(options.slots)) {}

KernelSet& OffloadPolicy::kernels() const { return options_.device->kernels(); }

Footprint OffloadPolicy::FootprintOf(int64_t context, int64_t total) const {
  return tier_->FootprintOf(context, total);
}
int64_t OffloadPolicy::max_tokens() const { return tier_->max_tokens(); }
SequencePlacement::Headroom OffloadPolicy::HeadroomNow() const { return tier_->HeadroomNow(); }

int64_t OffloadPolicy::exact_tokens() const {
  const int64_t most = options_.max_context;
  const bool all_dense = tier_->options().dense_layers >= options_.hbm->layout().layers;
  return all_dense ? most : std::min(SparseExactTokens(), most);
}

bool OffloadPolicy::Admit(int slot, int64_t context, int64_t total, Promise promise,
                          std::unique_ptr<SequenceCache>& home) {
  SLUICE_CHECK(promise == Promise::kFirm, "nothing is preempted");
  if (!tier_->Admit(slot, context, total, home)) return false;
  totals_[static_cast<size_t>(slot)] = total;
  if (slot_workers() != nullptr) slot_workers()->Join(slot);
  Joined(slot);
  return true;
}

// A late worker may still read the host cache; that must end before anything of the slot goes to
// another sequence.
bool OffloadPolicy::Warm(int slot) {
  return tier_->Warm(slot) && (slot_workers() == nullptr || slot_workers()->AtRest(slot));
}

Event& OffloadPolicy::WarmEvent(int slot) {
  if (slot_workers() != nullptr && !slot_workers()->AtRest(slot))
    return slot_workers()->RestEvent(slot);
  return tier_->WarmEvent(slot);
}

absl::Status OffloadPolicy::SlotHealth(int slot) const {
  return slot_workers() == nullptr ? absl::OkStatus() : slot_workers()->Health(slot);
}

WorkerStatistics OffloadPolicy::Workers() const {
  return slot_workers() == nullptr ? WorkerStatistics{} : slot_workers()->Statistics();
}

void OffloadPolicy::AwaitWarmUps() {
  for (int slot = 0; slot < options_.slots; ++slot) tier_->WarmEvent(slot).Wait();
}

bool OffloadPolicy::Grow(int slot, int64_t tokens) {
  tier_->Grow(slot, tokens);
  return true;
}

void OffloadPolicy::BeginStep(Stream& /*stream*/, absl::Span<const int32_t> /*slots*/,
                              absl::Span<const int32_t> /*positions*/) {}

void OffloadPolicy::Release(int slot) {
  SLUICE_CHECK(Warm(slot), "a slot is released at rest");
  Left(slot);
  tier_->Release(slot);
}

int64_t OffloadPolicy::hint_tokens() const {
  return int64_t{tier_->options().recall_blocks} * tier_->block_tokens();
}

void OffloadPolicy::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  tier_->WarmUp(slot, tokens, FirstUnits(slot, tokens, hints),
                [&](Stream& stream, const OffloadTier::BulkRow& row) {
                  BuildArrays(stream, slot, tokens, row);
                });
}

bool OffloadPolicy::MakeFirm(int /*slot*/) { return true; }
bool OffloadPolicy::ReserveHostCopy(int /*slot*/, int64_t /*tokens*/, SharedPrefix /*prefix*/) {
  return true;
}
const SequenceCache* OffloadPolicy::HostCache(int slot) const { return tier_->MutableHomeOf(slot); }
SequenceCache* OffloadPolicy::HostCacheOfPrompt(int slot) { return tier_->MutableHomeOf(slot); }
void OffloadPolicy::Evict(int /*slot*/, int64_t /*tokens*/) {}
std::unique_ptr<SequenceCache> OffloadPolicy::DetachHostCache(int slot) {
  SLUICE_CHECK(Warm(slot), "a slot is released at rest");
  Left(slot);
  std::unique_ptr<SequenceCache> home = tier_->DetachHostCache(slot);
  tier_->Release(slot);
  return home;
}

void OffloadPolicy::Retain(Stream& stream, int layer, const Queries& rows, bool only_free) const {
  kernels::RetainParams retain{};
  retain.residency = tier_->Residency(layer);
  retain.slots = rows.slots;
  retain.positions = rows.positions;
  retain.resident = tier_->Places(layer);
  retain.rows = rows.rows;
  retain.unit_tokens = tier_->options().unit_tokens;
  retain.only_free = only_free;
  kernels().Retain(stream, retain);
}

int64_t OffloadPolicy::UnitsBeforeRing(int64_t tokens) const {
  const OffloadTierOptions& o = tier_->options();
  const int64_t ring = o.ring_blocks * tier_->block_tokens() / o.unit_tokens;
  return std::max<int64_t>(tokens / o.unit_tokens - ring + 1, 0);
}

int64_t OffloadPolicy::PlacesBehindRing(int slot, int64_t tokens) const {
  const OffloadTierOptions& o = tier_->options();
  const int64_t ring = o.ring_blocks * tier_->block_tokens() / o.unit_tokens;
  const int64_t places = tier_->PlacesOf(totals_[static_cast<size_t>(slot)]);
  return std::min(std::max<int64_t>(places - ring, 0), UnitsBeforeRing(tokens));
}

std::vector<std::vector<int32_t>> OffloadPolicy::FirstUnits(int slot, int64_t tokens,
                                                            const SelectionHints& hints) {
  const OffloadTierOptions& o = tier_->options();
  const int64_t per_block = tier_->block_tokens() / o.unit_tokens;
  const int64_t end = UnitsBeforeRing(tokens);
  const int64_t count = PlacesBehindRing(slot, tokens);
  std::vector<int32_t> newest;
  for (int64_t i = 0; i < count; ++i) {
    newest.push_back(static_cast<int32_t>(i < per_block ? i : end - count + i));
  }
  const int layers = o.hbm->layout().layers;
  std::vector<std::vector<int32_t>> all(static_cast<size_t>((layers - o.dense_layers) * kv().heads),
                                        newest);
  if (hints.entries.empty()) return all;
  HintedUnits hinted(hints, o.unit_tokens, end);
  size_t list = 0;
  for (int layer = o.dense_layers; layer < layers; ++layer) {
    for (int head = 0; head < kv().heads; ++head, ++list) {
      std::vector<int32_t>& units = all[list];
      units.resize(static_cast<size_t>(std::min(per_block, count)));
      hinted.Append(static_cast<uint32_t>(layer), static_cast<uint32_t>(head),
                    static_cast<size_t>(count) - units.size(), &units);
      std::sort(units.begin(), units.end());
      AddNewest(end, static_cast<size_t>(count), &units);
    }
  }
  return all;
}

void OffloadPolicy::BuildArrays(Stream& /*stream*/, int /*slot*/, int64_t /*tokens*/,
                                const OffloadTier::BulkRow& /*row*/) {}

void* OffloadPolicy::written(int layer) const {
  return written_.as<uint8_t>() +
         int64_t{layer} * max_decode_rows() * kv().heads * kv().bytes_per_token;
}

void OffloadPolicy::WriteHome(Stream& stream, int layer, const int32_t* slots,
                              const int32_t* positions, int32_t rows) const {
  kernels().WriteThrough(stream, {written(layer), slots, positions, tier_->Home(layer), rows});
}

void OffloadPolicy::EndStep(Stream& stream) {
  for (int i = 0; i < Stream::kBranches; ++i) stream.After(stream.Branch(i));
}

void OffloadPolicy::Append(Stream& stream, int layer, kernels::RopeAppendParams params) {
  const int32_t decode = params.decode_rows;
  kernels::RopeAppendParams prompt = params;
  if (decode > 0) {
    SLUICE_CHECK(decode <= max_decode_rows(), "one decode row of a sequence in a step");
    params.cache = tier_->dense(layer) ? tier_->Dense(layer) : tier_->Ring(layer);
    params.written = written(layer);
    params.rows = decode;
    kernels().RopeAppend(stream, params);
    if (attends_at_home()) WriteHome(stream, layer, params.slots, params.positions, decode);
  }
  if (prompt.rows == decode) return;
  prompt.cache = tier_->Home(layer);
  const int64_t dim = prompt.cache.head_dim;
  prompt.qkv += decode * (prompt.heads + 2 * prompt.cache.kv_heads) * dim;
  prompt.cos_sin += decode * dim;
  prompt.slots += decode;
  prompt.positions += decode;
  prompt.rows -= decode;
  prompt.decode_rows = 0;
  kernels().RopeAppend(stream, prompt);
}

void OffloadPolicy::Attend(Stream& stream, int layer, kernels::AttentionParams params) {
  const int32_t decode = params.decode_rows;
  kernels::AttentionParams prompt = params;
  if (decode > 0) {
    Queries queries{params.q, params.q_stride, params.slots, params.positions,
                    decode,   params.heads,    params.scale};
    if (tier_->dense(layer)) {
      params.cache = tier_->Dense(layer);
      params.rows = decode;
      kernels().Attention(stream, params);
    } else {
      AttendSparse(stream, layer, queries, params.out, params.out_type);
    }
    // Nothing reads these tokens in the host cache, or what Settle makes of them, before the next
    // step: the newest tokens lie in HBM.
    Stream& settling = SettlingBranch(stream);
    settling.After(stream);
    if (!attends_at_home()) WriteHome(settling, layer, params.slots, params.positions, decode);
    queries.q = nullptr;
    if (!tier_->dense(layer)) Settle(settling, layer, queries);
  }
  if (prompt.rows == decode) return;
  prompt.cache = tier_->Home(layer);
  prompt.q += decode * prompt.q_stride;
  prompt.slots += decode;
  prompt.positions += decode;
  prompt.out = static_cast<uint8_t*>(prompt.out) + int64_t{decode} * prompt.heads *
                                                       prompt.cache.head_dim *
                                                       kernels::SizeOf(prompt.out_type);
  if (prompt.lse != nullptr) prompt.lse += int64_t{decode} * prompt.heads;
  prompt.rows -= decode;
  prompt.decode_rows = 0;
  kernels().Attention(stream, prompt);
}

}  // namespace sluice
