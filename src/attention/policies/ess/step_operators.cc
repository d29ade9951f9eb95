#include "src/attention/policies/ess/step_operators.h"

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

StepOperators::StepOperators(const PolicyOptions& options, int32_t decode_rows, const EssTier* tier,
                             const IndexSelection* selection)
    : decode_rows_(decode_rows),
      rows_per_sequence_(options.rows_per_sequence),
      transfer_workers_(options.ess.transfer_workers),
      forget_(!options.ess.lru),
      q_type_(options.device->kernels().activation_type()),
      tier_(tier),
      selection_(selection) {}

absl::StatusOr<StepOperators> StepOperators::Create(const PolicyOptions& options,
                                                    int32_t decode_rows, const EssTier* tier,
                                                    const IndexSelection* selection) {
  StepOperators b(options, decode_rows, tier, selection);
  const int64_t rows = decode_rows;
  const CacheLayout& layout = tier->layout();
  const BufferAllocator entries(options.device, "ess's lists of entries");
  const BufferAllocator results(options.device, "ess's partial results");
  SLUICE_RETURN_IF_ERROR(BufferAllocator(options.device, "ess's new entries")
                             .Array(MemoryKind::kDevice, layout.layers * rows,
                                    tier->latent().bytes_per_token, &b.written_));
  b.lists_.capacity = options.index_top_k;
  b.ahead_.capacity = options.ess.prefetch;
  for (Lists* lists : {&b.lists_, &b.ahead_}) {
    if (lists->capacity == 0) continue;
    // Rows that are updated together list their moves in the first one's list.
    lists->move_capacity = lists->capacity * (b.forget_ ? b.rows_per_sequence_ : 1);
    for (Buffer* units : {&lists->resident, &lists->arriving}) {
      SLUICE_RETURN_IF_ERROR(entries.Words(MemoryKind::kDevice, rows * lists->capacity, units));
    }
    for (Buffer* units : {&lists->sources, &lists->targets}) {
      SLUICE_RETURN_IF_ERROR(
          entries.Words(MemoryKind::kDevice, rows * lists->move_capacity, units));
    }
    for (Buffer* counts : {&lists->resident_counts, &lists->arriving_counts, &lists->move_counts}) {
      SLUICE_RETURN_IF_ERROR(entries.Words(MemoryKind::kDevice, rows, counts));
    }
  }
  const int64_t heads = options.heads, rank = options.latent_rank;
  SLUICE_RETURN_IF_ERROR(results.Words(MemoryKind::kDevice, rows * heads * rank, &b.o_));
  SLUICE_RETURN_IF_ERROR(results.Words(MemoryKind::kDevice, rows * heads, &b.lse_));
  SLUICE_RETURN_IF_ERROR(results.Array(
      MemoryKind::kDevice,
      options.device->kernels().SparseMlaScratchBytes(static_cast<int32_t>(rows), options.heads,
                                                      options.latent_rank, options.index_top_k),
      1, &b.scratch_));
  SLUICE_ASSIGN_OR_RETURN(b.counters_,
                          SelectionCounters::Create(options.device, options.slots, layout));
  return b;
}

uint8_t* StepOperators::written(int layer) const {
  return written_.as<uint8_t>() + int64_t{layer} * decode_rows_ * tier_->latent().bytes_per_token;
}

kernels::UpdateResidencyParams StepOperators::UpdateInto(const Lists& lists, int32_t list,
                                                         int layer,
                                                         const LatentAttention::Params& a,
                                                         int32_t row, int32_t rows,
                                                         kernels::UnitLists selected) const {
  const int64_t at = int64_t{list} * lists.capacity;
  const int64_t moves = int64_t{list} * lists.move_capacity;
  kernels::UpdateResidencyParams update{};
  update.residency = tier_->Residency(layer);
  update.slots = a.slots + row;
  update.positions = a.positions + row;
  update.selected = selected;
  update.selected.units += int64_t{row} * selected.capacity;
  update.selected.counts += row;
  update.resident = lists.resident.as<int32_t>() + at;
  update.resident_counts = lists.resident_counts.as<int32_t>() + list;
  update.arriving = lists.arriving.as<int32_t>() + at;
  update.arriving_counts = lists.arriving_counts.as<int32_t>() + list;
  update.home = tier_->Home(layer);
  update.pool = tier_->Pool(layer);
  update.source_units = lists.sources.as<int32_t>() + moves;
  update.target_units = lists.targets.as<int32_t>() + moves;
  update.move_counts = lists.move_counts.as<int32_t>() + list;
  update.move_capacity = lists.move_capacity;
  update.counters = counters_->of(layer);
  update.rows = rows;
  update.forget = forget_;
  if (!forget_) update.whole = tier_->whole();
  return update;
}

kernels::UpdateResidencyParams StepOperators::UpdateResidency(int layer,
                                                              const LatentAttention::Params& a,
                                                              int32_t row, int32_t list,
                                                              int32_t rows) const {
  kernels::UpdateResidencyParams update =
      UpdateInto(lists_, list, layer, a, row, rows, selection_->lists());
  update.ahead = 1;
  update.in_turn = rows_per_sequence_ > 1 && !forget_;
  return update;
}

kernels::UpdateResidencyParams StepOperators::UpdateRunnersUp(
    int layer, const LatentAttention::Params& a) const {
  kernels::UpdateResidencyParams update = UpdateInto(ahead_, a.first_row, layer, a, a.first_row,
                                                     a.decode_rows, selection_->runners_up(layer));
  update.speculative = true;
  return update;
}

kernels::TransferParams StepOperators::Move(const Lists& lists, int layer, int32_t first,
                                            int32_t rows) const {
  const int64_t bytes = tier_->latent().bytes_per_token;
  kernels::TransferParams move{};
  move.source = tier_->Home(layer).base;
  move.target = tier_->Pool(layer).base;
  move.source_pitch = move.target_pitch = bytes;
  move.source_units = lists.sources.as<int32_t>() + int64_t{first} * lists.move_capacity;
  move.target_units = lists.targets.as<int32_t>() + int64_t{first} * lists.move_capacity;
  move.counts = lists.move_counts.as<int32_t>() + first;
  move.lists = rows;
  move.capacity = lists.move_capacity;
  move.unit_bytes = static_cast<int32_t>(bytes);
  return move;
}

kernels::TransferParams StepOperators::Fetch(int layer, int32_t first, int32_t rows) const {
  kernels::TransferParams move = Move(lists_, layer, first, rows);
  move.max_workers = transfer_workers_;
  return move;
}

kernels::TransferParams StepOperators::FetchRunnersUp(int layer, int32_t first,
                                                      int32_t rows) const {
  kernels::TransferParams move = Move(ahead_, layer, first, rows);
  move.max_workers = kPrefetchWorkers;
  return move;
}

kernels::SparseMlaParams StepOperators::Attention(const LatentAttention::Params& a, int32_t first,
                                                  int32_t rows) const {
  const kernels::PagedLatents pool = tier_->Pool(0);
  const int64_t q_row = int64_t{a.heads} * (pool.rank + pool.rope) * SizeOf(q_type_);
  const int64_t out_row = int64_t{a.heads} * pool.rank * SizeOf(a.out_type);
  kernels::SparseMlaParams p{};
  p.q = static_cast<const uint8_t*>(a.q) + first * q_row;
  p.slots = a.slots + first;
  p.capacity = selection_->lists().capacity;
  p.out = static_cast<uint8_t*>(a.out) + first * out_row;
  p.scratch = scratch_.data();
  p.scratch_bytes = static_cast<int64_t>(scratch_.bytes());
  p.rows = rows;
  p.heads = a.heads;
  p.scale = a.scale;
  p.q_type = q_type_;
  p.out_type = a.out_type;
  return p;
}

kernels::SparseMlaParams StepOperators::AttendPool(int layer,
                                                   const LatentAttention::Params& a) const {
  const int64_t first = a.first_row, units = first * lists_.capacity;
  kernels::SparseMlaParams attend = Attention(a, a.first_row, a.decode_rows);
  attend.decode_rows = a.decode_rows;
  attend.cache = tier_->Pool(layer);
  attend.entries = lists_.resident.as<int32_t>() + units;
  attend.counts = lists_.resident_counts.as<int32_t>() + first;
  attend.then_entries = lists_.arriving.as<int32_t>() + units;
  attend.then_counts = lists_.arriving_counts.as<int32_t>() + first;
  attend.other_o = o_.as<float>();
  attend.other_lse = lse_.as<float>();
  return attend;
}

kernels::SparseMlaParams StepOperators::AttendHome(int layer,
                                                   const LatentAttention::Params& a) const {
  const kernels::UnitLists selected = selection_->lists();
  const int32_t first = a.decode_rows;
  kernels::SparseMlaParams attend = Attention(a, first, a.rows - first);
  attend.cache = tier_->Home(layer);
  attend.entries = selected.units + int64_t{first} * selected.capacity;
  attend.counts = selected.counts + first;
  return attend;
}

}  // namespace sluice
