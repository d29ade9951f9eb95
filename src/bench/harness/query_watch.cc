#include "src/bench/harness/query_watch.h"

#include <cmath>
#include <numeric>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice::bench {

absl::StatusOr<std::unique_ptr<QueryWatch>> QueryWatch::Create(AttentionPolicy* policy, int layers,
                                                               int heads, int head_dim,
                                                               Device* device) {
  const BufferAllocator allocator(device, "queries to look at");
  const int64_t words = int64_t{layers} * heads * head_dim;
  Buffer real, predicted;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &real));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &predicted));
  return std::unique_ptr<QueryWatch>(
      new QueryWatch(policy, heads, head_dim, std::move(real), std::move(predicted)));
}

double QueryWatch::MeanCosine(int layer) const {
  const float* a = At(real_, layer);
  const float* b = At(predicted_, layer);
  double sum = 0;
  for (int at = 0; at < size_; at += head_dim_, a += head_dim_, b += head_dim_) {
    const double ab = std::inner_product(a, a + head_dim_, b, 0.0);
    const double aa = std::inner_product(a, a + head_dim_, a, 0.0);
    const double bb = std::inner_product(b, b + head_dim_, b, 0.0);
    if (aa * bb > 0) sum += ab / std::sqrt(aa * bb);
  }
  return sum * head_dim_ / size_;
}

void QueryWatch::Ahead(Stream& stream, int layer, const Queries& predicted) {
  stream.Copy(At(predicted_, layer), predicted.q, static_cast<size_t>(size_) * 4);
  if (ForwardingPolicy::LooksAhead(layer)) ForwardingPolicy::Ahead(stream, layer, predicted);
}

void QueryWatch::Attend(Stream& stream, int layer, kernels::AttentionParams params) {
  stream.After(stream.Branch(kAheadBranch));
  if (params.decode_rows > 0) {
    stream.Copy(At(real_, layer), params.q, static_cast<size_t>(size_) * 4);
  }
  ForwardingPolicy::Attend(stream, layer, params);
}

}  // namespace sluice::bench
