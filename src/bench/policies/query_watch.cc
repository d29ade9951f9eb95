#include "src/bench/policies/query_watch.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice::bench {

absl::StatusOr<std::unique_ptr<QueryWatch>> QueryWatch::Create(AttentionPolicy* policy, int layers,
                                                               int heads, int head_dim,
                                                               Device* device) {
  const int size = heads * head_dim;
  const BufferAllocator allocator(device, "queries to look at");
  const int64_t words = int64_t{layers} * size;
  Buffer real, predicted;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &real));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &predicted));
  return std::unique_ptr<QueryWatch>(
      new QueryWatch(policy, size, std::move(real), std::move(predicted)));
}

void QueryWatch::Ahead(Stream& stream, int layer, const Queries& predicted) {
  stream.Copy(At(predicted_, layer), predicted.q, static_cast<size_t>(size_) * 4);
}

void QueryWatch::Attend(Stream& stream, int layer, kernels::AttentionParams params) {
  stream.After(stream.Branch(kAheadBranch));
  if (params.decode_rows > 0) {
    stream.Copy(At(real_, layer), params.q, static_cast<size_t>(size_) * 4);
  }
  ForwardingPolicy::Attend(stream, layer, params);
}

}  // namespace sluice::bench
