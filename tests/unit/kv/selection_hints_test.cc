#include "src/kv/selection_hints.h"

#include <functional>

#include "src/base/error.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

constexpr uint32_t kBlock = 4;  // tokens in a block of kind 0

SelectionHints Good() {
  SelectionHints hints;
  hints.unit_tokens = kBlock;
  hints.entries.push_back({0, 0, std::nullopt, {0, 2, 5}});
  hints.entries.push_back({1, std::nullopt, 20, {1}});
  hints.queries = {1, -2, 3, 0.5f, 0, 7};
  return hints;
}

TEST_CASE("a hint's fault is named by its field, and the transfer can be committed after it") {
  struct Bad {
    const char* field;
    std::function<void(SelectionHints&)> spoil;
  };
  const std::vector<Bad> faults = {
      {"hints.unit_tokens", [](auto& h) { h.unit_tokens = 0; }},
      {"hints.unit_tokens", [](auto& h) { h.unit_tokens = 8; }},
      {"hints.entries[1].layer", [](auto& h) { h.entries[1].layer = 2; }},
      {"hints.entries[0].kv_head", [](auto& h) { h.entries[0].kv_head = 100; }},
      {"hints.entries[1].position", [](auto& h) { h.entries[1].position = kContext; }},
      {"hints.entries[0].units[2]", [](auto& h) { h.entries[0].units[2] = 6; }},
      {"hints.entries[0].units[1]", [](auto& h) { h.entries[0].units[1] = 0; }},
      {"hints.entries[0].units[2]", [](auto& h) { h.entries[0].units[2] = 1; }},
      {"hints.entries[0].units",
       [](auto& h) {
         h.entries[0].units = {0, 1, 2, 3, 4};
       }},
      {"hints.queries", [](auto& h) { h.queries.pop_back(); }},
      {"hints.queries",
       [](auto& h) {
         h.entries.clear();
         h.queries.push_back(0);
       }},
  };
  Table t(256 << 10, /*hint_tokens=*/16, &Table::Whole, /*hint_queries=*/6);
  const std::string id = t.ReserveAndFill();
  for (const Bad& bad : faults) {
    SelectionHints hints = Good();
    bad.spoil(hints);
    const absl::Status status = t.table->Commit(id, {}, nullptr, hints).status();
    INFO(bad.field << ": " << std::string(status.ToString()));
    CHECK(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == bad.field);
  }
  REQUIRE(t.table->Commit(id, {}, nullptr, Good()).ok());
  const auto attached = t.table->Attach(ById(id));
  REQUIRE(attached.ok());
  auto ready = t.table->TakeReady(*attached);
  REQUIRE((ready.ok() && ready->has_value()));
  REQUIRE((*ready)->hints.entries.size() == 2);
  CHECK((*ready)->hints.entries[0].units == std::vector<uint32_t>{0, 2, 5});
  CHECK((*ready)->hints.queries == Good().queries);
  ready->reset();
  CHECK(t.Empty());
}

TEST_CASE("a table whose policy has no use for hints checks them and drops them") {
  Table t;
  const std::string id = t.ReserveAndFill();
  SelectionHints bad = Good();
  bad.entries[0].layer = 7;
  CHECK(FieldOf(t.table->Commit(id, {}, nullptr, bad).status()) == "hints.entries[0].layer");
  REQUIRE(t.table->Commit(id, {}, nullptr, Good()).ok());
  const auto attached = t.table->Attach(ById(id));
  auto ready = t.table->TakeReady(*attached);
  REQUIRE((ready.ok() && ready->has_value()));
  CHECK((*ready)->hints.empty());
  ready->reset();
  CHECK(t.Empty());
}

TEST_CASE("units come newest row first, each once, of the layer and head that is asked for") {
  SelectionHints hints;
  hints.unit_tokens = 4;
  hints.entries.push_back({1, 0, 10, {0, 3}});
  hints.entries.push_back({1, std::nullopt, std::nullopt, {3, 5}});  // the last row, all heads
  hints.entries.push_back({1, 1, 11, {2}});
  hints.entries.push_back({0, 0, std::nullopt, {7}});
  const auto units = [&](int64_t unit_tokens, int64_t end, uint32_t layer, uint32_t head,
                         size_t most, std::vector<int32_t> taken = {}) {
    HintedUnits hinted(hints, unit_tokens, end);
    hinted.Append(2, 0, 100, &taken);  // changes nothing for the calls after it
    hinted.Append(layer, head, most, &taken);
    return taken;
  };
  using Units = std::vector<int32_t>;
  CHECK(units(4, 8, 1, 0, 100) == Units{3, 5, 0});
  CHECK(units(4, 8, 1, 1, 100) == Units{3, 5, 2});
  CHECK(units(4, 8, 1, 0, 2) == Units{3, 5});
  CHECK(units(4, 5, 1, 0, 100) == Units{3, 0});  // 5 is not below the end
  CHECK(units(4, 8, 1, 0, 100, {0, 5}) == Units{0, 5, 3});
  CHECK(units(4, 8, 0, 1, 100).empty());
  // The same units as tokens, and as larger units.
  CHECK(units(1, 64, 1, 1, 6) == Units{12, 13, 14, 15, 20, 21});
  CHECK(units(8, 8, 1, 0, 100) == Units{1, 2, 0});
}

}  // namespace
}  // namespace sluice
