#include "src/base/nearest_name.h"

#include <catch2/catch.hpp>
#include <vector>

namespace sluice {
namespace {

TEST_CASE("the nearest name is offered unless nothing is near") {
  const std::vector<std::string> names = {"hbm_bytes", "dram_bytes", "max_sequences", "model"};
  CHECK(DidYouMean("hmb_bytes", names) == " (did you mean hbm_bytes?)");
  CHECK(DidYouMean("hbm-bytes", names) == " (did you mean hbm_bytes?)");
  CHECK(DidYouMean("max_sequence", names) == " (did you mean max_sequences?)");
  CHECK(DidYouMean("mdoel", names) == " (did you mean model?)");
  CHECK(DidYouMean("zzzzzz", names).empty());
  CHECK(DidYouMean(std::string(1000000, 'x'), names).empty());
  CHECK(DidYouMean("x", {}).empty());
}

}  // namespace
}  // namespace sluice
