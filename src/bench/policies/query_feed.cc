#include "src/bench/policies/query_feed.h"

#include <cstring>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice::bench {

absl::StatusOr<std::unique_ptr<QueryFeed>> QueryFeed::Create(AttentionPolicy* policy, int layers,
                                                             int heads, int head_dim,
                                                             Device* device) {
  const int size = heads * head_dim;
  const BufferAllocator allocator(device, "queries that replace predictions");
  const int64_t words = int64_t{layers} * size;
  Buffer host, queries;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, words, &host));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, &queries));
  return std::unique_ptr<QueryFeed>(
      new QueryFeed(policy, layers, size, std::move(host), std::move(queries)));
}

void QueryFeed::Set(absl::Span<const float> queries) {
  SLUICE_CHECK(queries.size() == static_cast<size_t>(layers_) * static_cast<size_t>(size_));
  std::memcpy(host_.data(), queries.data(), queries.size() * sizeof(float));
}

void QueryFeed::Ahead(Stream& stream, int layer, const Queries& predicted) {
  float* const here = queries_.as<float>() + int64_t{layer} * size_;
  stream.Copy(here, host_.as<float>() + int64_t{layer} * size_,
              static_cast<size_t>(size_) * sizeof(float));
  Queries fed = predicted;
  fed.q = here;
  fed.stride = size_;
  ForwardingPolicy::Ahead(stream, layer, fed);
}

}  // namespace sluice::bench
