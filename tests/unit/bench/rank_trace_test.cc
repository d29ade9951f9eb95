// These tests are of the shares that sluice-bench ranks reads from a trace.
#include "src/bench/ranks/rank_trace.h"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

namespace sluice::bench {
namespace {

const absl::Time kStart = absl::UnixEpoch();

TraceSlice Slice(const std::string& name, int begin_ms, int end_ms,
                 TraceSlice::Kind kind = TraceSlice::Kind::kKernel) {
  TraceSlice slice;
  slice.kind = kind;
  slice.name = name;
  slice.begin = kStart + absl::Milliseconds(begin_ms);
  slice.end = kStart + absl::Milliseconds(end_ms);
  return slice;
}

RankTrace Sum(const std::vector<TraceSlice>& slices) {
  return SumOf(slices, kStart, kStart + absl::Milliseconds(100), 2);
}

TEST_CASE("operations of a group are hidden where another kernel runs beside them") {
  const RankTrace sum = Sum({Slice("Attention", 0, 30), Slice("ncclDevKernel_SendRecv", 20, 50),
                             Slice("Linear", 40, 44), Slice("all-to-all", 60, 70),
                             Slice("AllReduceKernel<Float>", 65, 80),
                             Slice("copy", 50, 60, TraceSlice::Kind::kCopy)});
  CHECK(sum.step == Approx(0.05));
  CHECK(sum.collective == Approx(0.025));  // 20 to 50 and 60 to 80, of two steps
  CHECK(sum.exchange == Approx(0.020));    // 20 to 50 and 60 to 70
  CHECK(sum.exposed == Approx(0.018));     // 30 to 40, 44 to 50, 60 to 80
}

TEST_CASE("what begins outside the steps does not count") {
  const RankTrace sum = Sum({Slice("ncclDevKernel_AllGather", -5, 10), Slice("Linear", 10, 20),
                             Slice("ncclDevKernel_AllGather", 100, 110)});
  CHECK(sum.collective == 0);
  CHECK(sum.exposed == 0);
}

}  // namespace
}  // namespace sluice::bench
