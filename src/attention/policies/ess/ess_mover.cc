#include "src/attention/policies/ess/ess_mover.h"

#include "src/attention/latent/latent_views.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

RowMover::Options MoverOptions(const PolicyOptions& options, const EssTier& tier, int decode_rows) {
  RowMover::Options mover;
  mover.kind = options.ess.mover;
  mover.device = options.device;
  mover.slots = options.slots;
  mover.max_rows = decode_rows;
  // Rows that are updated together list their moves in the first one's list.
  mover.capacity = options.index_top_k * (options.ess.lru ? 1 : options.rows_per_sequence);
  mover.source = tier.Home(0).base;
  mover.target = tier.Pool(0).base;
  mover.unit_bytes = static_cast<int32_t>(tier.latent().bytes_per_token);
  mover.processors = options.ess.transfer_workers;
  mover.workers = options.workers;
  mover.deadline = options.worker_deadline;
  // Pools that hold every sequence whole never miss.
  const bool keeps = options.ess.warm_up && options.ess.lru;
  if ((keeps && tier.shape().HoldsAllWhole()) || options.ess.probe.row_copies) {
    mover.kind = PolicyOptions::Mover::kUva;
  }
  return mover;
}

}  // namespace

absl::StatusOr<ChosenMover> ChooseEssMover(const PolicyOptions& options, const EssTier& tier,
                                           int decode_rows) {
  const auto units = [](const PagePool& pool) {
    return pool.Capacity()[kLatentKind] * pool.layout().layers;
  };
  const RowMover::Options mover = MoverOptions(options, tier, decode_rows);
  SLUICE_ASSIGN_OR_RETURN(ChosenMover chosen,
                          ChooseMover(mover, {units(*options.dram), units(*options.hbm)}));
  if (options.ess.mover == PolicyOptions::Mover::kAuto) {
    Log(LogLevel::kInfo, "policy ess: mover chosen",
        {{"mover", LinkStatistics::kNames[static_cast<size_t>(chosen.link.mover)]},
         {"uva_gb_per_second", chosen.link.bytes_per_s[0] * 1e-9},
         {"cpu_gb_per_second", chosen.link.bytes_per_s[1] * 1e-9},
         {"workers", options.workers}});
  }
  return chosen;
}

}  // namespace sluice
