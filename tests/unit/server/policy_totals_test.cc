// These tests say how the totals of ranks become those of their node, and how they get to rank 0.
#include "src/server/policy_totals.h"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/device/rank_channel.h"
#include "tests/support/ranks.h"

namespace sluice {
namespace {

// Returns totals in which every number is another one, and another one for each `seed`.
PolicyTotals Totals(double seed) {
  PolicyTotals totals;
  totals.selection = {{{seed + 1, seed + 2, seed + 3}, {seed + 4, seed + 5, seed + 6}},
                      seed + 7,
                      seed + 8,
                      seed + 9};
  totals.workers = {seed + 10, seed + 0.5, seed + 12, {seed + 13, seed + 14, seed + 15}};
  totals.schedules = {{seed + 16, seed + 17, seed + 18}, seed + 19};
  totals.link = {static_cast<int>(seed) % 2, {seed + 20, seed + 21}};
  return totals;
}

void CheckSame(const PolicyTotals& found, const PolicyTotals& want) {
  REQUIRE(found.selection.layers.size() == want.selection.layers.size());
  for (size_t i = 0; i < want.selection.layers.size(); ++i) {
    CHECK(found.selection.layers[i].selected == want.selection.layers[i].selected);
    CHECK(found.selection.layers[i].missed == want.selection.layers[i].missed);
    CHECK(found.selection.layers[i].fetched == want.selection.layers[i].fetched);
  }
  CHECK(found.selection.rows == want.selection.rows);
  CHECK(found.selection.link_bytes == want.selection.link_bytes);
  CHECK(found.selection.places == want.selection.places);
  CHECK(found.workers.alive == want.workers.alive);
  CHECK(found.workers.busy_seconds == want.workers.busy_seconds);
  CHECK(found.workers.tokens == want.workers.tokens);
  CHECK(found.workers.failures == want.workers.failures);
  CHECK(found.schedules.layers == want.schedules.layers);
  CHECK(found.schedules.changes == want.schedules.changes);
  CHECK(found.link.mover == want.link.mover);
  CHECK(found.link.bytes_per_s == want.link.bytes_per_s);
}

TEST_CASE("a node's totals are those of its only rank") {
  for (const bool own_rows : {false, true}) {
    CheckSame(TotalsOfNode({Totals(100)}, own_rows), Totals(100));
  }
}

TEST_CASE("work is summed over ranks, and choices are rank 0's") {
  const std::vector<PolicyTotals> ranks = {Totals(100), Totals(301), Totals(200)};
  for (const bool own_rows : {false, true}) {
    PolicyTotals want;  // three times what a number adds to its seed, and the seeds' sum
    want.selection = {{{604, 607, 610}, {613, 616, 619}}, 0, 625, 0};
    // Every rank of a divided model counts the same rows; those of experts have rows of their own.
    want.selection.rows = own_rows ? 622 : 308;
    want.selection.places = own_rows ? 628 : 310;
    want.workers = {631, 602.5, 637, {640, 643, 646}};
    want.schedules = {{116, 117, 118}, 658};
    want.link = {0, {120, 121}};
    CheckSame(TotalsOfNode(ranks, own_rows), want);
  }
}

TEST_CASE("a rank that has reported nothing adds nothing") {
  CheckSame(TotalsOfNode({Totals(100), PolicyTotals(), PolicyTotals()}, true), Totals(100));
}

TEST_CASE("totals survive the way from rank to rank") {
  PolicyTotals none = Totals(3);
  none.selection.layers.clear();
  PolicyTotals most = Totals(5);
  most.selection.layers.assign(1024, {1e15, 2, 3});  // the most layers that a model may have
  for (const PolicyTotals& totals : {Totals(7), none, most}) {
    const std::vector<uint8_t> bytes = WriteTotals(totals);
    CHECK(bytes.size() <= RankChannel::kMostReportBytes);
    PolicyTotals read;
    REQUIRE(ReadTotals(bytes, &read));
    CheckSame(read, totals);
    for (const size_t size : {size_t{0}, size_t{1}, bytes.size() - 1}) {
      PolicyTotals kept = Totals(11);
      CHECK_FALSE(ReadTotals(absl::MakeConstSpan(bytes).first(size), &kept));
      CheckSame(kept, Totals(11));
    }
  }
}

TEST_CASE("rank 0 collects what the others left, and keeps the last it could read", "[ranks]") {
  const auto wrong = testing::RunRankThreads(
      testing::RankOptions(3), [](const RankGroupOptions& options) -> std::string {
        const auto channel =
            JoinHostChannel({options.name, options.rank, options.size, options.join_timeout});
        if (!channel.ok()) return std::string(channel.status().message());
        const auto meet = [&] { return (*channel)->Meet(absl::Seconds(10)).ok(); };
        TotalsCollector collector(channel->get());
        const auto tokens = [&] {
          std::vector<double> by_rank;
          for (const PolicyTotals& totals : collector.Collect(Totals(50))) {
            by_rank.push_back(totals.workers.tokens);
          }
          return by_rank;
        };
        if (options.rank == 0 && tokens() != std::vector<double>{62, 0, 0}) return "not zeros";
        if (!meet()) return "no meeting";
        if (options.rank != 0) (*channel)->Report(WriteTotals(Totals(options.rank * 1000)));
        if (!meet()) return "no meeting";
        if (options.rank == 0 && tokens() != std::vector<double>{62, 1012, 2012}) return "not left";
        if (!meet()) return "no meeting";
        if (options.rank == 1) (*channel)->Report({1, 2, 3});  // of no form
        if (options.rank == 2) (*channel)->Report(WriteTotals(Totals(3000)));
        if (!meet()) return "no meeting";
        if (options.rank == 0 && tokens() != std::vector<double>{62, 1012, 3012}) return "not kept";
        return meet() ? "" : "no meeting";
      });
  CHECK(testing::Joined(wrong) == "");
}

}  // namespace
}  // namespace sluice
