#include "src/request/tenant_quotas.h"

#include <catch2/catch.hpp>
#include <memory>
#include <utility>

#include "src/base/error.h"
#include "src/base/manual_clock.h"

namespace sluice {
namespace {

std::string Reason(const absl::Status& status) { return ReasonOf(status).value_or(""); }

struct Fixture {
  Fixture() { quotas.Set({{"a", {2, 100, 10}}, {"*", {1, 0, 0}}}); }
  auto Admit(const std::string& tenant) {
    return quotas.Admit(tenant, std::make_shared<TokenStream>(1000));
  }
  ManualClock clock;
  TenantQuotas quotas{&clock, [] { return absl::Seconds(3); }};
};

TEST_CASE("a tenant has its number of sequences until their ends") {
  Fixture f;
  auto first = f.Admit("a");
  auto second = f.Admit("a");
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  const absl::Status third = f.Admit("a").status();
  CHECK(Reason(third) == "TENANT_SEQUENCES");
  CHECK(RetryAfterOf(third) == absl::Seconds(3));
  (*first)->Finish({});
  CHECK(f.Admit("a").ok());  // it is dropped at once, like one that Submit refuses
  CHECK(f.Admit("a").ok());
  first->reset();  // counts once
  auto again = f.Admit("a");
  CHECK(again.ok());
  CHECK(Reason(f.Admit("a").status()) == "TENANT_SEQUENCES");
}

TEST_CASE("who is not named has what * says, each for itself, and nobody has no bound") {
  Fixture f;
  auto b = f.Admit("b"), c = f.Admit("c");
  CHECK(b.ok());
  CHECK(c.ok());
  CHECK(Reason(f.Admit("b").status()) == "TENANT_SEQUENCES");
  auto none = f.Admit(""), more = f.Admit("");
  CHECK(more.ok());
}

TEST_CASE("DRAM is given back with the last owner, also after the quotas") {
  TenantQuotas::Share late;
  {
    Fixture f;
    auto taken = f.quotas.TakeDram("a", 60);
    REQUIRE(taken.ok());
    CHECK(Reason(f.quotas.TakeDram("a", 41).status()) == "TENANT_DRAM");
    CHECK(Reason(f.quotas.TakeDram("a", UINT64_MAX).status()) == "TENANT_DRAM");
    CHECK(f.quotas.TakeDram("a", 40).ok());
    const TenantQuotas::Share copy = *taken;
    taken->reset();
    CHECK(!f.quotas.TakeDram("a", 41).ok());
    late = f.quotas.ChargeDram("a", 1000);  // the quota is not asked
    CHECK(!f.quotas.TakeDram("a", 1).ok());
  }
  late.reset();
}

TEST_CASE("tokens are forgiven as time goes by, and a refusal says when") {
  Fixture f;
  auto sink = f.Admit("a");
  REQUIRE(sink.ok());
  // the quota is 10 per second, which allows 100 at once
  for (int i = 0; i < 150; ++i) (*sink)->Emit({});
  const absl::Status refused = f.Admit("a").status();
  CHECK(Reason(refused) == "TENANT_TOKENS");
  CHECK(RetryAfterOf(refused) == absl::Milliseconds(5100));
  f.clock.Advance(absl::Milliseconds(5100));
  CHECK(f.Admit("a").ok());
  f.clock.Advance(absl::Hours(1));  // unused time is not saved up
  for (int i = 0; i < 101; ++i) (*sink)->Emit({});
  CHECK(!f.Admit("a").ok());
}

}  // namespace
}  // namespace sluice
