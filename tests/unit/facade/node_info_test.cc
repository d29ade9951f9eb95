#include "src/facade/node_info.h"

#include <catch2/catch.hpp>

namespace sluice {
namespace {

TEST_CASE("times are ISO 8601 in UTC") {
  CHECK(IsoTime(absl::FromUnixSeconds(1'795'392'000)) == "2026-11-23T00:00:00Z");
}

}  // namespace
}  // namespace sluice
