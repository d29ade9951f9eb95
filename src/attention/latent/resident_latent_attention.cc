#include "src/attention/latent/resident_latent_attention.h"

#include <algorithm>
#include <utility>

#include "src/attention/latent/sparse_mla_rows.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<ResidentLatentAttention>> ResidentLatentAttention::Create(
    const Options& options) {
  std::unique_ptr<ResidentLatentAttention> made(new ResidentLatentAttention(options));
  Device* const device = options.device;
  if (options.top_k > 0) {
    IndexSelection::Options selection{device, options.max_rows, options.decode_rows, options.top_k,
                                      options.max_context};
    selection.sequence_rows = options.sequence_rows;
    SLUICE_ASSIGN_OR_RETURN(made->selection_, IndexSelection::Create(selection));
  } else {
    const size_t bytes = static_cast<size_t>(options.max_rows) * sizeof(int32_t);
    SLUICE_ASSIGN_OR_RETURN(made->counts_,
                            device->Allocate(MemoryKind::kDevice, bytes, "lengths of rows"));
    for (HostCounts& counts : made->host_counts_) {
      SLUICE_ASSIGN_OR_RETURN(counts.memory,
                              device->Allocate(MemoryKind::kPinned, bytes, "lengths of rows"));
      counts.done = device->NewEvent();
    }
  }
  const int64_t scratch = device->kernels().SparseMlaScratchBytes(
      options.decode_rows, options.heads, options.rank,
      options.top_k > 0 ? options.top_k : options.max_context);
  SLUICE_ASSIGN_OR_RETURN(made->scratch_,
                          device->Allocate(MemoryKind::kDevice, static_cast<size_t>(scratch),
                                           "scratch of latent attention"));
  return made;
}

ResidentLatentAttention::~ResidentLatentAttention() {
  for (const HostCounts& counts : host_counts_) {
    if (counts.done != nullptr) counts.done->Wait();
  }
}

void ResidentLatentAttention::BeginStep(Stream& stream, absl::Span<const int32_t> positions) {
  if (selection_ != nullptr) return;
  HostCounts& host = host_counts_[next_counts_];
  next_counts_ = (next_counts_ + 1) % host_counts_.size();
  host.done->Wait();  // It is ready, unless more steps are under way than there are counts.
  std::transform(positions.begin(), positions.end(), host.memory.as<int32_t>(),
                 [](int32_t position) { return position + 1; });
  stream.Copy(counts_.data(), host.memory.data(), positions.size() * sizeof(int32_t));
  stream.Record(*host.done);
}

void ResidentLatentAttention::Attend(Stream& stream, int layer,
                                     const kernels::PagedLatents& latents,
                                     const kernels::PagedIndexKeys* keys,
                                     const LatentAttention::Params& attention) {
  kernels::SparseMlaParams mla =
      SparseMlaOfRows(attention, latents, options_.device->kernels().activation_type(), scratch_);
  if (selection_ != nullptr) {
    Stream& queries = stream.Branch(kQueryBranch);
    selection_->Select(stream, layer, *keys, attention, attention.first_row, attention.rows,
                       [&] { queries.After(stream); });
    attention.make_queries(queries);
    stream.After(queries);
    const kernels::UnitLists lists = selection_->lists();
    mla.entries = lists.units + int64_t{attention.first_row} * lists.capacity;
    mla.counts = lists.counts + attention.first_row;
    mla.capacity = lists.capacity;
  } else {
    attention.make_queries(stream);
    mla.counts = counts_.as<int32_t>() + attention.first_row;
    mla.capacity = options_.max_context;
  }
  options_.device->kernels().SparseMla(stream, mla);
}

void ResidentLatentAttention::Observe(SelectionObserver observer) {
  SLUICE_CHECK(selection_ != nullptr, "without an indexer nothing is selected");
  selection_->Observe(std::move(observer));
}

}  // namespace sluice
