#include "src/service/pull/address_list.h"

#include <catch2/catch.hpp>
#include <string>

namespace sluice {
namespace {

bool Allows(const std::string& list, const std::string& address) {
  const auto parsed = AddressList::Parse(list);
  REQUIRE(parsed.ok());
  const auto host = ParseHostPort(address);
  REQUIRE(host.ok());
  return parsed->Allows(*host);
}

TEST_CASE("a list allows what it names and nothing else") {
  const std::string list = "localhost, 127.0.0.0/8, prefill-0:7000,*.prefill.svc, fd00::/9,[::1]:5";
  CHECK(Allows(list, "localhost:1"));
  CHECK(Allows(list, "LOCALHOST:1"));
  CHECK(Allows(list, "127.255.1.2:1"));
  CHECK(Allows(list, "[::ffff:127.0.0.1]:1"));
  CHECK(Allows(list, "prefill-0:7000"));
  CHECK(Allows(list, "a.prefill.svc:9"));
  CHECK(Allows(list, "[fd7f::1]:9"));
  CHECK(Allows(list, "[::1]:5"));
  CHECK_FALSE(Allows(list, "128.0.0.1:1"));
  CHECK_FALSE(Allows(list, "prefill-0:7001"));
  CHECK_FALSE(Allows(list, "prefill-1:7000"));
  CHECK_FALSE(Allows(list, "prefill.svc:9"));
  CHECK_FALSE(Allows(list, "aprefill.svc:9"));
  CHECK_FALSE(Allows(list, "a.prefill.svc.evil:9"));
  CHECK_FALSE(Allows(list, "localhost.evil:1"));
  CHECK_FALSE(Allows(list, "[fd80::1]:9"));
  CHECK_FALSE(Allows(list, "[::1]:6"));
  CHECK_FALSE(Allows("", "127.0.0.1:1"));
  CHECK(Allows("*", "anywhere.example:1"));
  CHECK(Allows("0.0.0.0/0", "8.8.8.8:1"));
  CHECK_FALSE(Allows("0.0.0.0/0", "a.name:1"));
  CHECK_FALSE(Allows("*.0.0.1", "127.0.0.1:1"));
}

TEST_CASE("an entry that is none is quoted") {
  for (const std::string entry : {"10.0.0.0/33", "a.b/8", "fd00::/129", "10.0.0.0/", "a:0", "a:x",
                                  "a b", "http://a:1", "*x", "*.", "a:65536", "10.0.0.0/-1"}) {
    CAPTURE(entry);
    const auto parsed = AddressList::Parse("localhost," + entry);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().message().find("\"" + entry + "\"") != std::string::npos);
  }
}

}  // namespace
}  // namespace sluice
