#include "src/server/plan.h"

#include <catch2/catch.hpp>
#include <cstdlib>

#include "src/kv/page_pool.h"

namespace sluice {
namespace {

CacheLayout Layout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 3;
  kind.block_tokens = 32;
  kind.parts = 2;
  kind.bytes_per_token = 256;
  return {30, {kind}};
}

TEST_CASE("what the plan says fits is what a pool takes") {
  const CacheLayout layout = Layout();
  const int64_t bytes = GENERATE(as<int64_t>(), 1 << 20, 5'000'000, 64 << 20);
  const int64_t context = GENERATE(as<int64_t>(), 1, 33, 500, 2000);
  auto pool = PagePool::Create(
      "hbm", layout,
      Buffer(std::calloc(1, static_cast<size_t>(bytes)), static_cast<size_t>(bytes),
             [](void* data, size_t) { std::free(data); }));
  REQUIRE(pool.ok());
  CHECK(TokensThatFit(layout, bytes) == (*pool)->capacity_tokens());
  std::vector<Reservation> held;
  for (;;) {
    Reservation one = (*pool)->TryReserve(context);
    if (one.empty()) break;
    held.push_back(std::move(one));
  }
  CHECK(SequencesThatFit(layout, bytes, context) == static_cast<int64_t>(held.size()));
}

TEST_CASE("the plan shows the contexts up to the longest, and caps by max_sequences") {
  PlanInput in;
  in.model.name = "m";
  in.model.architecture = "llama";
  in.model.layers = 30;
  in.model.heads = 9;
  in.model.kv_heads = 3;
  in.model.head_dim = 64;
  in.model.hidden_size = 576;
  in.model.intermediate_size = 1536;
  in.model.vocab_size = 49152;
  in.model.tie_word_embeddings = true;
  in.layout = Layout();
  in.hbm_bytes = int64_t{1} << 30;
  in.dram_bytes = int64_t{4} << 30;
  in.max_context = 8192;
  in.max_sequences = 32;
  in.max_rows = 544;
  const std::string plan = FormatPlan(in);
  INFO(plan);
  CHECK_THAT(plan, Catch::Contains("policy full"));
  CHECK_THAT(plan, Catch::Contains("22.5 KiB a token"));
  CHECK_THAT(plan, Catch::Contains("8192"));
  // 512 tokens take 11.25 MiB: 91 would fit into 1 GiB, 364 do into 4 GiB.
  CHECK_THAT(plan, Catch::Contains("11.2 MiB"));
  CHECK_THAT(plan, Catch::Contains("512      11.2 MiB                32               364"));
}

}  // namespace
}  // namespace sluice
