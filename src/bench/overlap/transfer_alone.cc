#include "src/bench/overlap/transfer_alone.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "src/attention/latent/latent_views.h"
#include "src/base/status_macros.h"
#include "src/base/timing.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

constexpr int kPasses = 7;

// The lists of all layers, [layers][batch][capacity], and their counts, [layers][batch].
struct Lists {
  Buffer memory;
  int32_t *sources, *targets, *counts;
};

absl::StatusOr<Lists> ListsIn(const PolicyOptions& o, MemoryKind kind, int64_t lists,
                              int64_t capacity) {
  Lists out{};
  SLUICE_ASSIGN_OR_RETURN(
      out.memory, o.device->Allocate(kind, static_cast<size_t>(lists * (2 * capacity + 1)) * 4,
                                     "lists of entries to fetch"));
  out.sources = out.memory.as<int32_t>();
  out.targets = out.sources + lists * capacity;
  out.counts = out.targets + lists * capacity;
  return out;
}

}  // namespace

absl::StatusOr<TransferAlone> MeasureTransferAlone(const PolicyOptions& o, int batch,
                                                   int64_t context,
                                                   absl::Span<const double> misses) {
  const auto layers = static_cast<int64_t>(misses.size());
  const int64_t most = std::llround(*std::max_element(misses.begin(), misses.end()));
  TransferAlone found;
  if (most == 0) return found;
  const CacheKind& kind = o.dram->layout().kinds[kLatentKind];
  const int64_t homes = o.dram->Capacity()[kLatentKind] * o.dram->layout().layers;
  const int64_t places = o.hbm->Capacity()[kLatentKind] * o.hbm->layout().layers;
  const int64_t lists = layers * batch;
  SLUICE_CHECK(context <= homes && most <= context && lists * most <= places);
  SLUICE_ASSIGN_OR_RETURN(const Lists staged, ListsIn(o, MemoryKind::kPinned, lists, most));
  SLUICE_ASSIGN_OR_RETURN(const Lists there, ListsIn(o, MemoryKind::kDevice, lists, most));
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t list = layer * batch + row;
      // A sequence's entries of one layer lie together, layer after layer.
      const int64_t home = (row * layers + layer) * context % (homes - context + 1);
      const int64_t pool = (row * layers + layer) * (places / lists);
      const int64_t count = std::llround(misses[static_cast<size_t>(layer)]);
      staged.counts[list] = static_cast<int32_t>(count);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = list * most + i;
        staged.sources[at] = static_cast<int32_t>(home + i * context / count);
        staged.targets[at] = static_cast<int32_t>(pool + i * (places / lists) / count);
      }
      found.bytes += static_cast<double>(count * kind.bytes_per_token);
    }
  }
  const std::unique_ptr<Stream> stream = o.device->NewStream(Device::StreamKind::kCompute);
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Program> program,
                          o.device->Record(*stream, [&](Stream& s) {
                            for (int64_t layer = 0; layer < layers; ++layer) {
                              kernels::TransferParams move{};
                              move.source = o.dram->base(kLatentKind);
                              move.target = o.hbm->base(kLatentKind);
                              move.source_pitch = move.target_pitch = kind.bytes_per_token;
                              move.source_units = there.sources + layer * batch * most;
                              move.target_units = there.targets + layer * batch * most;
                              move.counts = there.counts + layer * batch;
                              move.lists = batch;
                              move.capacity = static_cast<int32_t>(most);
                              move.unit_bytes = static_cast<int32_t>(kind.bytes_per_token);
                              move.max_workers = o.ess.transfer_workers;
                              o.device->kernels().Transfer(s, move);
                            }
                          }));
  const std::unique_ptr<TimedEvent> begin = o.device->NewTimedEvent(),
                                    end = o.device->NewTimedEvent();
  stream->Copy(there.memory.data(), staged.memory.data(), staged.memory.bytes());
  std::vector<double> seconds;
  for (int pass = 0; pass <= kPasses; ++pass) {
    stream->Record(*begin);
    program->Run(*stream);
    stream->Record(*end);
    end->Wait();
    begin->Wait();
    if (pass > 0) seconds.push_back(absl::ToDoubleSeconds(end->Since(*begin)));
  }
  SLUICE_RETURN_IF_ERROR(o.device->Health());
  found.seconds = TimingOf(seconds).median;
  return found;
}

}  // namespace sluice::bench
