#include "src/profile/skew_run.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/attention/policies/recall/projection.h"
#include "src/profile/skew.h"

namespace sluice {
namespace {

constexpr int64_t kJudgedQueries = 64;  // Most queries of a head that judge it.

struct HeadResult {
  std::vector<float> projection;  // [head_dim][rank]
  SkewQuality quality;
};

HeadResult SkewHead(const HeadQueries& head, int64_t head_dim, int64_t rank) {
  const auto queries = static_cast<int64_t>(head.q.size()) / head_dim;
  const int64_t seen = queries - queries / 8;
  const absl::Span<const float> q = head.q;
  HeadResult result;
  result.projection = SkewOf(q.subspan(0, static_cast<size_t>(seen * head_dim)), head_dim, rank);
  // The judged queries are evenly spread over those that were not seen.
  const int64_t stride = std::max<int64_t>(1, (queries - seen) / kJudgedQueries);
  std::vector<float> judged;
  for (int64_t i = seen; i < queries; i += stride) {
    const auto row = q.subspan(static_cast<size_t>(i * head_dim), static_cast<size_t>(head_dim));
    judged.insert(judged.end(), row.begin(), row.end());
  }
  const std::vector<float> plain = PlainProjection({1, 1, head_dim, rank});
  result.quality.plain = RankCorrelation(judged, head.k, plain, head_dim, rank);
  result.quality.skewed = RankCorrelation(judged, head.k, result.projection, head_dim, rank);
  return result;
}

}  // namespace

SkewResult MakeSkew(const CapturedQueries& captured, int64_t rank, int threads,
                    const std::function<void(int64_t, int64_t)>& progress) {
  const size_t heads = captured.heads.size();
  std::vector<HeadResult> results(heads);
  {
    std::atomic<size_t> next{0};
    absl::Mutex mutex;
    int64_t done = 0;
    std::vector<std::jthread> team;
    for (int i = 0; i < threads; ++i) {
      team.emplace_back([&] {
        for (size_t h = next++; h < heads; h = next++) {
          results[h] = SkewHead(captured.heads[h], captured.head_dim, rank);
          absl::MutexLock lock(&mutex);
          progress(++done, static_cast<int64_t>(heads));
        }
      });
    }
  }
  SkewResult all;
  all.layers.resize(static_cast<size_t>(captured.layers));
  const auto kv_heads = static_cast<size_t>(captured.kv_heads);
  for (size_t h = 0; h < heads; ++h) {
    const HeadResult& head = results[h];
    all.projection.insert(all.projection.end(), head.projection.begin(), head.projection.end());
    all.layers[h / kv_heads].plain += head.quality.plain / static_cast<double>(kv_heads);
    all.layers[h / kv_heads].skewed += head.quality.skewed / static_cast<double>(kv_heads);
  }
  return all;
}

}  // namespace sluice
